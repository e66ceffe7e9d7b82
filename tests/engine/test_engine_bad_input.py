"""What goes wrong in one request ends that one alone, with a clear error; all others are as if it had never been."""

import math
import random

import mlx.core as mx
import pytest
from engine_oracles import (
    FAMILIES,
    PARTS,
    POLICIES,
    alone,
    finish,
    new_sequence,
    random_tokens,
)

from mlxgen.engine import Engine, PrefixStore, Request
from mlxgen.errors import RequestError
from mlxgen.sampler import Sampler, Stage
from mlxgen.testing.models import tiny_decoder

POISON = 297  # a token whose embedding is no number
WELL = Sampler.from_config({"temperature": 0, "logit_bias": {POISON: -math.inf}}, vocab_size=298)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    model = tiny_decoder(request.param, **FAMILIES[request.param], tie_word_embeddings=False)
    model.embed_tokens.weight[POISON] = mx.nan
    return model


def policies(model):
    return POLICIES if model.spec.layers[-1].mixer is not None else POLICIES[:1]


def prompt(rnd, count):
    return tuple(token % POISON for token in random_tokens(rnd, count))


def healthy(rnd, count, max_tokens):
    return Request(prompt=prompt(rnd, count), sampler=WELL, max_tokens=max_tokens, prefill_chunk=rnd.choice([4, 512]))


class Failing(Stage):
    """A stage that breaks when it is used."""

    def __call__(self, logits, context):
        raise ValueError("this stage is broken")


class Later(Stage):
    """A stage that breaks with the third token."""

    def __call__(self, logits, context):
        if 2 in context.steps:
            raise ValueError("this stage is broken")
        return logits


def sick(rnd, kind):
    if kind == "model":
        return Request(prompt=(*prompt(rnd, 30), POISON, 5), sampler=WELL, max_tokens=9)
    stage = Later() if kind == "late" else Failing()
    return Request(prompt=prompt(rnd, 30), sampler=Sampler(stages=(stage,), seed=1), max_tokens=9)


@pytest.mark.parametrize("kind", ["model", "late", "stage"])
def test_a_sick_row_ends_alone_and_leaves_nothing_to_those_that_come_after(model, kind):
    """The place that it had in the batch is taken by a shorter one, beside longer ones."""
    rnd = random.Random(kind)
    for policy in policies(model):
        requests = [healthy(rnd, *sizes) for sizes in ((50, 30), (40, 30), (45, 30), (3, 12), (9, 5))]
        want = [alone(model, request, policy) for request in requests]
        engine = Engine(model, PARTS, store=PrefixStore(1 << 30))
        running = [engine.submit(request, new_sequence(model, policy)) for request in requests[:3]]
        while len(engine.scheduler.running) < 3:
            engine.step()
        bad = engine.submit(sick(rnd, kind), new_sequence(model, policy))
        while not bad.done:
            engine.step()
        running += [engine.submit(request, new_sequence(model, policy)) for request in requests[3:]]
        finish(engine)
        assert bad.finish == "error" and len(bad.produced) == (2 if kind == "late" else 0)
        assert isinstance(bad.error, RequestError if kind == "model" else ValueError)
        for generation, expected in zip(running, want, strict=True):
            assert (generation.produced, generation.error) == (expected.produced, None)

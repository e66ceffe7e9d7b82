"""The engine's contract: nothing that happens around a request, and no way of computing it, changes its answer.

Random requests, greedy and seeded, with every stage of the sampler, on every kind of cache; token-identical.
"""

import dataclasses
import random

import pytest
from engine_oracles import (
    PARTS,
    POLICIES,
    STAGES,
    alone,
    finish,
    new_sequence,
    random_request,
    random_tokens,
)

from mlxgen.cache import storage
from mlxgen.cache.buffer import QuantizedBuffer
from mlxgen.engine import Engine, PrefixStore, Scheduler
from mlxgen.engine.shelf import Shelf
from mlxgen.sampler import known_stages

PLENTY = 1 << 30
SEEDS = range(3)


@pytest.fixture(autouse=True)
def _little_slack(monkeypatch):
    """Windows forget soon, so that short prompts see it."""
    monkeypatch.setattr("mlxgen.cache.layer_cache.WindowCache.slack", 3)


def policies(model):
    return POLICIES if model.spec.layers[-1].mixer is not None else POLICIES[:1]


def same(generation, expected):
    assert generation.error is None
    assert (generation.produced, generation.finish) == (expected.produced, expected.finish)
    quantized = any(isinstance(buffer, QuantizedBuffer) for buffer in buffers(expected.sequence))
    # A value near the border of a quantization step may fall to its other side.
    got, want = ([token.logprob for token in g.waiting] for g in (generation, expected))
    assert got == pytest.approx(want, abs=5e-2 if quantized else 1e-4)


def buffers(sequence):
    return [cache.keys for cache in sequence.caches if hasattr(cache, "keys")]


def test_every_stage_takes_part():
    assert set(STAGES) == set(known_stages())


@pytest.mark.parametrize("seed", [0, 1, 12])  # the last one mixes policies most
def test_company_order_and_cancelled_neighbours_change_nothing(model, seed):
    """Rows of different policies come in any order and at any time, some are cancelled, and some must make room."""
    rnd = random.Random(seed)
    requests = [random_request(rnd) for _ in range(6)]
    kinds = [rnd.choice(policies(model)) for _ in requests]
    want = [alone(model, request, kind) for request, kind in zip(requests, kinds, strict=True)]
    for _ in range(2):
        engine, running, doomed = Engine(model, PARTS, Scheduler(max_rows=rnd.choice([2, 4, 64]))), {}, []
        for i in rnd.sample(range(6), 6):
            running[i] = engine.submit(requests[i], new_sequence(model, kinds[i]))
            if rnd.random() < 0.5:
                doomed.append(engine.submit(random_request(rnd), new_sequence(model, rnd.choice(policies(model)))))
            for _ in range(rnd.randint(0, 4)):
                engine.step()
            if doomed and rnd.random() < 0.7:
                engine.cancel(doomed.pop())
        finish(engine)
        for i, expected in enumerate(want):
            same(running[i], expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_change_nothing(model, seed):
    rnd = random.Random(seed)
    request = random_request(rnd, prompt=random_tokens(rnd, 21), prefill_chunk=512)
    policy = policies(model)[seed % len(policies(model))]
    want = alone(model, request, policy)
    for chunk in (1, 2, 5, 20, 21, 22):
        same(alone(model, dataclasses.replace(request, prefill_chunk=chunk), policy), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_computed_before_changes_nothing(model, seed, tmp_path):
    """Prompts that begin alike, in two processes after each other, with a store in memory and in a folder."""
    rnd = random.Random(seed)
    policy, start, cached = policies(model)[seed % len(policies(model))], random_tokens(rnd, 24), 0
    for _ in range(2):
        shelf = Shelf(tmp_path, PLENTY, lambda: "these weights", storage)
        engine = Engine(model, PARTS, store=PrefixStore(rnd.choice([0, PLENTY]), shelf))
        running = []
        for _ in range(4):
            prompt = (*start[: rnd.choice([24, 24, 17])], *random_tokens(rnd, rnd.choice([0, 1, 9])))
            running.append(engine.submit(random_request(rnd, prompt=prompt), new_sequence(model, policy)))
            for _ in range(rnd.choice([0, 3, 20])):
                engine.step()
        finish(engine)
        shelf.wait()
        for generation in running:
            same(generation, alone(model, generation.request, policy))
        cached = sum(generation.cached_tokens for generation in running)
    assert cached > 0

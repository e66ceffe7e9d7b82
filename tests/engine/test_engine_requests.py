"""Requests in the engine: failures that stay with their row, turns of long prompts, cancelling, budgets, memory."""

import random

import mlx.core as mx
import pytest
from engine_oracles import PARTS, alone, finish, random_request

from mlxgen.cache import Full
from mlxgen.engine import Engine, Request, Scheduler, TokenSequence
from mlxgen.errors import FitError, RequestError
from mlxgen.sampler import Sampler, Stage
from mlxgen.testing.models import tiny_decoder


@pytest.fixture(scope="module", params=["llama", "gemma2", "lfm2"])
def model(request):
    extra = {"gemma2": dict(sliding_window=6), "lfm2": dict(layer_types=["conv", "full_attention"], conv_L_cache=3)}
    return tiny_decoder(request.param, **extra.get(request.param, {}))


class Failing(Stage):
    """A stage that breaks when it is used."""

    def __call__(self, logits, context):
        raise ValueError("this stage is broken")


def test_one_failing_row_does_not_take_the_others(model):
    rnd = random.Random(0)
    good = [random_request(rnd, max_tokens=8, eos_ids=frozenset()) for _ in range(2)]
    want = [alone(model, r, Full()).produced for r in good]
    broken = Request(prompt=(1, 2), sampler=Sampler(stages=(Failing(),), seed=1), max_tokens=8)
    engine = Engine(model, PARTS)
    a, b, c = (engine.submit(r, TokenSequence(lambda: Full()(model.spec))) for r in (good[0], broken, good[1]))
    finish(engine)
    assert [a.produced, c.produced] == want
    assert b.finish == "error" and "this stage is broken" in str(b.error)
    later = engine.submit(good[0], TokenSequence(lambda: Full()(model.spec)))
    finish(engine)
    assert later.produced == want[0]


def test_scores_that_are_no_numbers_end_only_their_row(model):
    class Poison(Stage):
        def __call__(self, logits, context):
            return logits * mx.nan

    rnd = random.Random(1)
    good = random_request(rnd, max_tokens=6, eos_ids=frozenset())
    engine = Engine(model, PARTS)
    sick = Request(prompt=(3,), sampler=Sampler(stages=(Poison(),), seed=1), max_tokens=5)
    a, b = (engine.submit(r, TokenSequence(lambda: Full()(model.spec))) for r in (good, sick))
    finish(engine)
    assert a.produced == alone(model, good, Full()).produced
    assert isinstance(b.error, RequestError) and b.finish == "error"


def test_a_long_prompt_stalls_nobody_for_more_than_one_chunk(model):
    engine = Engine(model, PARTS)
    greedy = Sampler.from_config({"temperature": 0})
    quick = engine.submit(
        Request(prompt=(1, 2), sampler=greedy, max_tokens=40), TokenSequence(lambda: Full()(model.spec))
    )
    engine.step(), engine.step()
    long = Request(prompt=tuple(range(200)), sampler=greedy, max_tokens=2, prefill_chunk=10)
    slow = engine.submit(long, TokenSequence(lambda: Full()(model.spec)))
    for _ in range(15):
        before = len(quick.produced)
        engine.step()
        assert len(quick.produced) == before + 1  # a token of the other between any two chunks
    assert not slow.produced


def test_cancelling_frees_at_once_and_leaves_the_others(model):
    engine = Engine(model, PARTS)
    rnd = random.Random(3)
    keep, drop = (random_request(rnd, max_tokens=12, eos_ids=frozenset()) for _ in range(2))
    a, b = (engine.submit(r, TokenSequence(lambda: Full()(model.spec))) for r in (keep, drop))
    for _ in range(5):
        engine.step()
    held = sum(lane._batch.nbytes for lane in engine._lanes.values())
    engine.cancel(b)
    b.sequence.reset()
    assert sum(lane._batch.nbytes for lane in engine._lanes.values()) < held
    finish(engine)
    assert b.finish == "cancelled" and a.produced == alone(model, keep, Full()).produced


def test_the_budget_queues_and_makes_room_for_higher_priority(model):
    def cost(generations):
        return sum(len(g.request.prompt) + g.request.max_tokens for g in generations)

    engine = Engine(model, PARTS, Scheduler(cost=cost, budget_bytes=40))
    greedy = Sampler.from_config({"temperature": 0})

    def submit(prompt, count, priority=0):
        request = Request(prompt=tuple(prompt), sampler=greedy, max_tokens=count, priority=priority)
        return engine.submit(request, TokenSequence(lambda: Full()(model.spec))), request

    with pytest.raises(FitError, match="needs 61 bytes of cache, but the budget is 40"):
        submit([1], 60)
    (a, ra), (b, rb) = submit([1, 2], 20), submit([3, 4], 20)
    for _ in range(4):
        engine.step()
    assert a.produced and not b.produced  # 22 + 22 bytes do not fit into 40
    c, rc = submit([5, 6], 25, priority=1)
    engine.step(), engine.step()
    assert c.produced and a not in engine.scheduler.running
    finish(engine)
    for generation, request in ((a, ra), (b, rb), (c, rc)):
        assert generation.produced == alone(model, request, Full()).produced


def test_a_sequence_that_was_in_a_batch_goes_on(model):
    """Each answer's caches serve the next prompt, as in a conversation."""
    rnd = random.Random(4)
    engine, greedy = Engine(model, PARTS), Sampler.from_config({"temperature": 0})
    sequences = [TokenSequence(lambda: Full()(model.spec)) for _ in range(3)]
    prompts = [tuple(rnd.randrange(298) for _ in range(n)) for n in (3, 9, 5)]
    first = [
        engine.submit(Request(prompt=p, sampler=greedy, max_tokens=n), s)
        for p, s, n in zip(prompts, sequences, (4, 9, 6), strict=True)
    ]
    finish(engine)
    again = [Request(prompt=(*g.known, 7, 8), sampler=greedy, max_tokens=5) for g in first]
    second = [engine.submit(r, s) for r, s in zip(again, sequences, strict=True)]
    finish(engine)
    for before, request, generation in zip(first, again, second, strict=True):
        assert generation.cached_tokens >= len(before.known) - 1
        assert generation.produced == alone(model, request, Full()).produced

"""Beam search equals a slow one, is exhaustive where it is wide enough, and does not mind its neighbours."""

import dataclasses
import itertools
import math
import random

import mlx.core as mx
import pytest
from engine_oracles import PARTS, POLICIES, alone, finish, new_sequence, random_request, random_tokens

from mlxgen.cache import Full
from mlxgen.engine import Engine, PrefixStore, Request, Scheduler
from mlxgen.errors import FitError, RequestError
from mlxgen.sampler import Sampler, Stage, candidates
from mlxgen.testing.models import tiny_decoder

BEAM_PARTS = dataclasses.replace(PARTS, candidates=candidates)
GREEDY = Sampler.from_config({"temperature": 0})


def search(model, request, policy=None, engine=None):
    """The answers as (tokens, score), the best first."""
    engine = engine or Engine(model, BEAM_PARTS)
    generation = engine.submit(request, new_sequence(model, policy or Full()))
    finish(engine)
    return results(generation)


def results(generation):
    assert generation.error is None
    return [(tuple(g.produced), g.score) for g in (generation, *generation.others)]


def log_softmax(logits):
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def slow_search(model, request):
    """The definition: whole sequences anew at each step, no cache, no batch."""
    beams, done = [((), 0.0)], []
    for length in range(1, request.max_tokens + 1):
        grown = []
        for tokens, total in beams:
            logprobs = log_softmax(model(mx.array([[*request.prompt, *tokens]]))[0, -1]).tolist()
            grown += [((*tokens, token), total + logprob) for token, logprob in enumerate(logprobs)]
        grown.sort(key=lambda beam: -beam[1])
        grown = grown[: 2 * request.beams * len(beams)]
        ended = [b for b in grown if b[0][-1] in request.eos_ids or length == request.max_tokens]
        done += [(tokens, total / length**request.length_penalty) for tokens, total in ended]
        beams = [b for b in grown if b not in ended][: request.beams]
    return sorted(done, key=lambda answer: -answer[1])[: request.best]


def same(found, want):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
    assert [score for _, score in found] == pytest.approx([score for _, score in want], abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_the_slow_search(model, seed):
    rnd = random.Random(seed)
    beams = rnd.randint(2, 5)
    request = Request(
        prompt=random_tokens(rnd, rnd.randint(1, 12)),
        sampler=GREEDY,
        max_tokens=rnd.randint(1, 7),
        eos_ids=frozenset(rnd.sample(range(298), 60)),
        beams=beams,
        best=rnd.randint(1, beams),
        length_penalty=rnd.choice([-0.5, 0.0, 0.7, 1.0, 2.0]),
        prefill_chunk=rnd.choice([3, 512]),
    )
    same(search(model, request), slow_search(model, request))


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
def test_with_enough_beams_it_finds_the_best_of_all_answers(length_penalty):
    """Every sequence of a tiny vocabulary is tried by the oracle; nothing is cut off too early."""
    model = tiny_decoder("llama", vocab_size=5, hidden_size=32)
    prompt, eos, longest = (1, 4, 2), 3, 4
    answers = []
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(5), repeat=length):
            if eos in tokens[:-1] or (length < longest and tokens[-1] != eos):
                continue
            logprobs = log_softmax(model(mx.array([[*prompt, *tokens]]))[0])
            total = sum(logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens))
            answers.append((tokens, total / length**length_penalty))
    answers.sort(key=lambda answer: -answer[1])
    request = Request(
        prompt=prompt, sampler=GREEDY, max_tokens=longest, eos_ids=frozenset({eos}),
        beams=64, best=10, length_penalty=length_penalty,
    )  # fmt: skip
    same(search(model, request), answers[:10])


def test_it_ends_as_soon_as_nothing_better_can_come(llama):
    """The likeliest token ends the answer, so no beam needs to be followed for long."""
    bias = Sampler.from_config({"temperature": 0, "logit_bias": {7: 30.0}}, vocab_size=298)
    request = Request(prompt=(1, 2), sampler=bias, max_tokens=500, eos_ids=frozenset({7}), beams=3, length_penalty=0.0)
    engine = Engine(llama, BEAM_PARTS)
    generation = engine.submit(request, new_sequence(llama, Full()))
    steps = 0
    while engine.step():
        steps += 1
    assert generation.produced == [7] and generation.finish == "stop" and steps < 6


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_company_in_the_batch(model, policy, monkeypatch):
    """Two searches and two samplings in one batch, on caches of any policy: each as by itself."""
    monkeypatch.setattr("mlxgen.cache.layer_cache.WindowCache.slack", 3)
    if policy != POLICIES[0] and model.spec.layers[-1].mixer is None:
        pytest.skip("this family has no such cache")
    rnd = random.Random(str(policy))
    bias = Sampler.from_config({"temperature": 0, "repetition_penalty": 1.4}, vocab_size=298)
    searches = [
        Request(prompt=random_tokens(rnd, 14), sampler=GREEDY, max_tokens=8, beams=3, best=2),
        Request(prompt=random_tokens(rnd, 5), sampler=bias, max_tokens=11, beams=2, best=2),
    ]
    company = [random_request(rnd, max_tokens=9, eos_ids=frozenset()) for _ in range(2)]
    want = [search(model, request, policy) for request in searches]
    engine = Engine(model, BEAM_PARTS, store=PrefixStore(1 << 30))
    running = []
    for request in (searches[0], company[0], searches[1], company[1]):
        running.append(engine.submit(request, new_sequence(model, policy)))
        engine.step(), engine.step()
    finish(engine)
    for found, expected in zip((results(running[0]), results(running[2])), want, strict=True):
        same(found, expected)
    for generation, request in zip((running[1], running[3]), company, strict=True):
        assert generation.produced == alone(model, request, policy).produced


def test_the_chain_of_the_sampler_counts(llama):
    """What a stage forbids is in no beam, and scores are those of what is left."""
    plain = Request(prompt=(5, 6), sampler=GREEDY, max_tokens=4, beams=3, best=3, top_logprobs=2)
    first = search(llama, plain)
    forbidden = {token: -math.inf for tokens, _ in first for token in tokens}
    sampler = Sampler.from_config({"temperature": 0, "logit_bias": forbidden}, vocab_size=298)
    engine = Engine(llama, BEAM_PARTS)
    generation = engine.submit(dataclasses.replace(plain, sampler=sampler), new_sequence(llama, Full()))
    finish(engine)
    assert not {token for tokens, _ in results(generation) for token in tokens} & set(forbidden)
    first_token, *_ = generation.take()
    own = log_softmax(llama(mx.array([[5, 6]]))[0, -1])  # the model's own log-probabilities, as ever
    assert first_token.logprob == pytest.approx(own[first_token.id].item(), abs=1e-5)
    assert [i for i, _ in first_token.top_logprobs] == mx.argsort(-own)[:2].tolist()


def test_cancelling_in_the_middle_frees_everything(llama):
    engine = Engine(llama, BEAM_PARTS)
    rnd = random.Random(1)
    other = random_request(rnd, max_tokens=12, eos_ids=frozenset())
    a = engine.submit(Request(prompt=(1, 2, 3), sampler=GREEDY, max_tokens=50, beams=4), new_sequence(llama, Full()))
    b = engine.submit(other, new_sequence(llama, Full()))
    for _ in range(6):
        engine.step()
    engine.cancel(a)
    assert a.finish == "cancelled" and not a.produced
    assert all(len(lane._batch.sequences) <= 1 for lane in engine._lanes.values())
    finish(engine)
    assert b.produced == alone(llama, other, Full()).produced


def test_a_search_that_must_make_room_begins_anew(llama):
    request = Request(prompt=(1, 2, 3), sampler=GREEDY, max_tokens=9, beams=3, best=3)
    want = search(llama, request)
    engine = Engine(llama, BEAM_PARTS, Scheduler(max_rows=3))
    generation = engine.submit(request, new_sequence(llama, Full()))
    for _ in range(5):
        engine.step()
    urgent = engine.submit(Request(prompt=(9,), sampler=GREEDY, max_tokens=3, priority=1), new_sequence(llama, Full()))
    engine.step()
    assert generation in engine.scheduler.waiting
    finish(engine)
    assert urgent.done
    same(results(generation), want)


def test_a_broken_sampler_or_model_ends_only_the_search(llama):
    class Failing(Stage):
        def __call__(self, logits, context):
            raise ValueError("this stage is broken")

    class Poison(Stage):
        def __call__(self, logits, context):
            return logits * mx.nan

    rnd = random.Random(2)
    other = random_request(rnd, max_tokens=6, eos_ids=frozenset())
    for stage, text in ((Failing(), "this stage is broken"), (Poison(), "not numbers")):
        engine = Engine(llama, BEAM_PARTS)
        sampler = dataclasses.replace(GREEDY, stages=(stage, *GREEDY.stages))
        request = Request(prompt=(1, 2), sampler=sampler, max_tokens=5, beams=2)
        sick = engine.submit(request, new_sequence(llama, Full()))
        good = engine.submit(other, new_sequence(llama, Full()))
        finish(engine)
        assert sick.finish == "error" and text in str(sick.error)
        assert good.produced == alone(llama, other, Full()).produced


def test_more_beams_than_rows_or_positions_are_refused(llama):
    request = Request(prompt=(1, 2), sampler=GREEDY, max_tokens=30, beams=9)
    with pytest.raises(FitError, match="`beams` must be at most 4"):
        Engine(llama, BEAM_PARTS, Scheduler(max_rows=4)).submit(request, new_sequence(llama, Full()))
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[3.0] * 8, rope_theta=1e4)
    model = tiny_decoder("phi3", rope_scaling=rope, original_max_position_embeddings=16, sliding_window=None)
    with pytest.raises(RequestError, match="`max_tokens` must be at most 14 with `beams`"):
        Engine(model, BEAM_PARTS).submit(request, new_sequence(model, Full()))
    beyond = Request(prompt=random_tokens(random.Random(0), 20), sampler=GREEDY, max_tokens=4, beams=3)
    same(search(model, beyond), slow_search(model, beyond))

"""Guesses change how fast an answer comes, never the answer: greedy or drawn, alone or beside others."""

import dataclasses
import random

import mlx.core as mx
import pytest
from engine_oracles import PARTS, alone, family, finish, new_sequence, random_request, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.cache import Full, Window
from mlxgen.engine import DraftModel, Engine, Lookup, Request, TokenSequence
from mlxgen.engine.speculation import CANNOT, TOO_LITTLE_SLACK, Costs, Guess, Speculator
from mlxgen.sampler import Sampler, sample, sample_ahead
from mlxgen.testing.models import tiny_decoder

PARTS = dataclasses.replace(PARTS, sample_ahead=sample_ahead)
GREEDY = Sampler.from_config({"temperature": 0})
SAMPLERS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 7},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": 0.3, "seed": -3},
    {"temperature": 1.0, "xtc": {"probability": 0.5, "threshold": 0.05}, "seed": 2**40},
    {"temperature": 1.0, "mirostat": 3.0, "seed": 5},
]
ALWAYS = Lookup(tokens=5, ngram=1, always=True)


@pytest.fixture(scope="module", params=["llama", "gemma2", "lfm2", "falcon_h1"])
def model(request):
    return family(request.param)


def draft(model, tokens=3, small=None, **options):
    small = small or model
    options = {"vocab_size": 298, "tokens": tokens, "always": True, **options}
    return DraftModel(small, lambda: TokenSequence(lambda: Full()(small.spec)), sample, **options)


def answers(generation):
    return generation.produced, generation.finish


def speculate(model, request, policy, speculation):
    engine = Engine(model, PARTS)
    generation = engine.submit(dataclasses.replace(request, speculation=speculation), new_sequence(model, policy))
    finish(engine)
    return generation


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
@pytest.mark.parametrize("policy", [Full(), Window(size=9, sinks=2)], ids=repr)
def test_an_answer_is_the_same_with_guesses(model, policy, sampling):
    rnd = random.Random(str(sampling))
    few = rnd.sample(range(298), 5)  # so that much repeats itself
    bias = {"logit_bias": dict.fromkeys(few, 6.0)}
    accepted = 0
    for speculation in (ALWAYS, draft(model, rnd.randint(1, 5))):
        request = random_request(
            rnd,
            prompt=tuple(rnd.choices(few, k=rnd.choice([1, 12, 30]))),
            sampler=Sampler.from_config({**sampling, **bias}, vocab_size=298),
            max_tokens=24,
            eos_ids=frozenset(rnd.sample(range(298), 2)),
            top_logprobs=rnd.choice([-1, 2]),
        )
        want = alone(model, request, policy)
        got = speculate(model, request, policy, speculation)
        assert answers(got) == answers(want)
        accepted += got.speculator.accepted
        for a, b in zip(got.waiting, want.waiting, strict=True):
            assert (a.logprob is None) == (b.logprob is None)
            assert a.logprob is None or a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert accepted > 4 or got.speculator.off == CANNOT


@pytest.mark.parametrize("count", [1, 2, 5])
def test_200_greedy_tokens_with_a_random_draft(llama, count):
    request = Request(prompt=(5, 6, 7), sampler=GREEDY, max_tokens=200)
    stranger = tiny_decoder("llama", seed=9)
    want = alone(llama, request, Full()).produced
    for small in (stranger, llama):
        got = speculate(llama, request, Full(), draft(llama, count, small))
        assert len(got.produced) == 200 and got.produced == want
        if small is llama:  # it knows what it will say
            assert got.speculator.accepted == got.speculator.drafted
            assert got.speculator.checks <= 200 // (count + 1) + 1


def test_models_that_agree_draw_the_same(llama):
    """The draft uses the random numbers of the answer, so its guesses are right also at a high temperature."""
    sampler = Sampler.from_config({"temperature": 1.5, "top_p": 0.95, "seed": 3})
    request = Request(prompt=(5, 6, 7), sampler=sampler, max_tokens=60)
    got = speculate(llama, request, Full(), draft(llama, 4))
    assert got.speculator.accepted == got.speculator.drafted > 40


def test_a_model_that_cannot_forget_does_not_guess():
    for name in ("lfm2", "falcon_h1"):
        model = family(name)
        got = speculate(model, Request(prompt=(1, 1, 1, 1), sampler=GREEDY, max_tokens=8), Full(), ALWAYS)
        assert got.speculator.off == CANNOT and got.speculator.checks == 0


def test_a_window_with_too_little_slack_starts_anew(monkeypatch):
    """More guesses than a window can forget: it is computed anew, and the answer is right all the same."""
    monkeypatch.setattr("mlxgen.cache.layer_cache.WindowCache.slack", 1)
    model, policy = family("llama"), Window(size=6, sinks=1)
    rnd = random.Random(1)
    outcomes = set()
    for _ in range(6):
        request = Request(prompt=tuple(rnd.choices([3, 4], k=20)), sampler=GREEDY, max_tokens=16)
        want = alone(model, request, policy)
        got = speculate(model, request, policy, Lookup(tokens=8, ngram=1, always=True))
        assert answers(got) == answers(want)
        outcomes.add(got.speculator.off)
    assert TOO_LITTLE_SLACK in outcomes


@pytest.mark.parametrize("seed", range(4))
def test_beside_others_who_come_and_go(model, seed):
    """Guesses are made while a row is alone; rows that join in the middle of a check, or leave it, change nothing."""
    rnd = random.Random(seed)
    policies = [rnd.choice([Full(), Window(size=9, sinks=2)]) for _ in range(6)]
    requests = []
    for _ in policies:
        few = rnd.sample(range(298), 3)
        prompt = tuple(rnd.choices(few, k=rnd.choice([2, 9, 21])))
        requests.append(random_request(rnd, prompt=prompt, max_tokens=rnd.randint(1, 20), eos_ids=frozenset(few[:1])))
    want = [answers(alone(model, r, p)) for r, p in zip(requests, policies, strict=True)]
    engine, got, doomed = Engine(model, PARTS), [], []
    for request, policy in zip(requests, policies, strict=True):
        speculation = rnd.choice([ALWAYS, draft(model, 2), None])
        got.append(engine.submit(dataclasses.replace(request, speculation=speculation), new_sequence(model, policy)))
        if rnd.random() < 0.5:
            other = random_request(rnd, prompt=(7, 7, 7, 7, 7), speculation=ALWAYS, max_tokens=30, eos_ids=frozenset())
            doomed.append(engine.submit(other, new_sequence(model, policy)))
        for _ in range(rnd.randint(0, 9)):
            engine.step()
        if doomed and rnd.random() < 0.6:
            engine.cancel(doomed.pop())
    finish(engine)
    assert [answers(g) for g in got] == want


def test_a_cancelled_row_goes_on_where_it_was(llama):
    """Whatever was being checked, the sequence holds just the tokens that were handed out."""
    for steps in range(2, 9):
        engine = Engine(llama, PARTS)
        request = Request(prompt=(4, 4, 4, 4, 4), sampler=GREEDY, max_tokens=40, speculation=ALWAYS)
        sequence = new_sequence(llama, Full())
        generation = engine.submit(request, sequence)
        for _ in range(steps):
            engine.step()
        engine.cancel(generation)
        assert sequence.tokens == generation.known[: sequence.caches[0].offset]
        again = Request(prompt=(*generation.known, 8), sampler=GREEDY, max_tokens=6)
        later = engine.submit(again, sequence)
        finish(engine)
        assert later.produced == alone(llama, again, Full()).produced


def test_where_a_rope_turns():
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[3.0] * 8, rope_theta=1e4)
    model = tiny_decoder("phi3", rope_scaling=rope, original_max_position_embeddings=16, sliding_window=None)
    for length in (5, 11, 14, 15, 16, 17):
        request = Request(prompt=tuple([3, 4] * length)[:length], sampler=GREEDY, max_tokens=20)
        want = alone(model, request, Full()).produced
        assert speculate(model, request, Full(), ALWAYS).produced == want
        assert speculate(model, request, Full(), draft(model, 3)).produced == want


def test_a_drafter_that_fails_leaves_the_answer_alone(llama):
    class Broken:
        def start(self, generation):
            return Speculator(self, Costs(), always=True)

        def hopes(self, generation):
            return Guess(tokens=[1], kinds=[("broken", 1.0)])

        def guess(self, generation, limit):
            raise ValueError("no idea")

    request = Request(prompt=(5, 6, 7), sampler=GREEDY, max_tokens=9)
    got = speculate(llama, request, Full(), Broken())
    assert answers(got) == answers(alone(llama, request, Full()))
    assert got.speculator.off == "off: no idea"


def test_guesses_that_do_not_pay_are_not_tried(llama):
    """A check that costs 9 plain steps and is never right: after the first there are none, for some time."""
    slow = Costs(plain_s=1.0, slopes=dict.fromkeys(range(8), 9.0))
    slow.plain = slow.check = lambda *_: None
    request = Request(prompt=random_tokens(random.Random(0), 9), sampler=GREEDY, max_tokens=60)
    got = speculate(llama, request, Full(), Lookup(tokens=4, ngram=1, costs=slow))
    assert got.speculator.checks == 0 and got.speculator.drafted == 0
    quick = Costs(plain_s=1.0, slopes=dict.fromkeys(range(8), 0.0))
    quick.plain = quick.check = lambda *_: None
    prompt = tuple([3, 4, 5, 6, 7, 8] * 5)
    got = speculate(llama, dataclasses.replace(request, prompt=prompt), Full(), Lookup(tokens=4, costs=quick))
    assert got.speculator.checks > 0


def test_what_was_seen_of_guesses_fades():
    class Now:
        produced: list[int] = []  # noqa: RUF012
        guide = None

    class Always:
        def guess(self, generation, limit):
            return Guess(tokens=[1] * 4, kinds=[(0, 0.8)] * 4)

    speculator = Speculator(Always(), Costs(slopes=dict.fromkeys(range(8), 0.4)))
    guess = speculator.guess(Now, 4)
    assert guess is not None and not speculator.paused
    for _ in range(3):
        speculator.checked(guess, 0, 1.0, Now)
    assert speculator.guess(Now, 4) is None and speculator.paused
    Now.produced = [0] * 600
    assert speculator.guess(Now, 4) is not None


@pytest.mark.parametrize(("slope", "expected"), [(0.0, 4), (0.3, 2), (1.0, 0)])
def test_as_many_guesses_are_checked_as_pay(slope, expected):
    """Chances 0.9, 0.9, 0.1, 0.1: what each guess adds to the cost decides how many there are."""

    class Now:
        produced: list[int] = []  # noqa: RUF012
        guide = None

    class Four:
        def guess(self, generation, limit):
            return Guess(tokens=[1, 2, 3, 4], kinds=[("sure", 0.9)] * 2 + [("unsure", 0.1)] * 2)

    guess = Speculator(Four(), Costs(slopes=dict.fromkeys(range(8), slope))).guess(Now, 9)
    assert len(guess.tokens if guess else []) == expected


def test_one_hiccup_does_not_rule_out_a_size():
    costs = Costs()
    costs.plain(1.0)
    costs.check(4, 500.0)
    assert costs.ratio(4) < 4
    for _ in range(40):
        costs.check(4, 9.0)
    assert costs.ratio(4) == pytest.approx(9.0, rel=0.1)
    costs.plain(500.0)
    assert costs.plain_s < 1.5


def naive_lookup(known, ngram, count):
    """What followed the longest earlier occurrence of the end, of equals the newest; None below `ngram` tokens."""
    best = (0, 0)
    for place in range(1, len(known)):
        length = 0
        while length < min(place, 32) and known[place - 1 - length] == known[-1 - length]:
            length += 1
        if length >= ngram and length >= best[1]:
            best = (place, length)
    if not best[1]:
        return None
    tokens = list(known)
    for i in range(count):
        tokens.append(tokens[best[0] + i])
    return tokens[len(known) :]


@settings(max_examples=200, deadline=None)
@given(
    known=st.lists(st.integers(0, 2), min_size=1, max_size=16),
    ngram=st.integers(1, 3),
    steps=st.lists(st.integers(0, 2), max_size=6),
)
def test_lookup_finds_the_longest_match(known, ngram, steps):
    request = Request(prompt=tuple(known), sampler=GREEDY, max_tokens=9)
    generation = Engine(None, PARTS).submit(request, TokenSequence(list))
    drafter = Lookup(tokens=4, ngram=ngram).start(generation).drafter
    for token in [*steps, None]:
        guess = drafter.guess(generation, 3)
        assert (guess and guess.tokens) == naive_lookup(generation.known, ngram, 3)
        if token is not None:
            generation.produced.append(token)


def test_plain_decoding_costs_no_more_primitives(llama):
    """Requests without guesses and guides run the graph that they ran before."""
    from mlxgen.bench.counts import primitives

    engine = Engine(llama, PARTS)
    engine.submit(Request(prompt=(1, 2, 3), sampler=GREEDY, max_tokens=9), new_sequence(llama, Full()))
    engine.step()
    lane = engine._lanes[False]
    caches = Full()(llama.spec)
    mx.eval(llama(mx.array([[1, 2, 3]]), caches))
    bare = mx.argmax(llama(lane._step.tokens[:, None], caches)[:, -1], axis=-1)
    logits = lane._forward(lane._step)
    picked = engine.pick(lane._step.rows, logits).tokens
    assert primitives(logits) <= primitives(bare)
    assert picked.shape == (1,)

"""Prompts that begin alike: what is reused changes no answer, is never changed itself, and stays within its budget."""

import random

import mlx.core as mx
import pytest
from engine_oracles import (
    GREEDY,
    PARTS,
    POLICIES,
    alone,
    contents,
    family,
    finish,
    new_sequence,
    random_request,
    random_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.cache import Full, Quantized, Window
from mlxgen.engine import Engine, PrefixStore, Request, Scheduler
from mlxgen.engine.sequence import common_length
from mlxgen.engine.token_trie import TokenTrie
from mlxgen.testing.models import tiny_decoder

PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def _little_slack(monkeypatch):
    """Windows forget soon, so that short prompts see it."""
    monkeypatch.setattr("mlxgen.cache.layer_cache.WindowCache.slack", 3)


def usable(model):
    return POLICIES if model.spec.layers[-1].mixer is not None else POLICIES[:1]


# -- the trie, against a list

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.booleans(), WORDS), max_size=14), asked=WORDS)
def test_the_trie_finds_what_a_search_finds(changes, asked):
    trie, plain = TokenTrie(), {}
    for remove, word in changes:
        if remove and word in plain:
            trie.remove(word)
            del plain[word]
        elif not remove:
            trie.insert(word, word)
            plain[word] = word
    found = list(trie.matches(asked))
    assert sorted(found) == sorted((word, common_length(word, asked)) for word in plain)
    assert [shared for _, shared in found] == sorted((shared for _, shared in found), reverse=True)
    assert trie.prefixes(asked) == sorted((w for w in plain if asked[: len(w)] == w), key=len)


# -- answers


def prompts_that_begin_alike(rnd, count):
    """Prompts that share beginnings of many lengths; some come twice, some contain others."""
    prompts = [random_tokens(rnd, rnd.randint(1, 20))]
    while len(prompts) < count:
        known = rnd.choice(prompts)
        kept = rnd.choice([len(known), rnd.randint(0, len(known))])
        prompts.append(known[:kept] + random_tokens(rnd, rnd.choice([0, 1, 4, 15]) if kept else 5))
    return rnd.sample(prompts, count)


@pytest.mark.parametrize("seed", range(4))
def test_a_cached_beginning_changes_no_answer(model, seed):
    """One after another, several at once, with little and much room: as each from nothing."""
    rnd = random.Random(seed)
    policy = usable(model)[seed % len(usable(model))]
    store = PrefixStore(rnd.choice([300_000, PLENTY]))
    engine = Engine(model, PARTS, Scheduler(max_rows=rnd.choice([1, 3, 64])), store)
    running = []
    for prompt in prompts_that_begin_alike(rnd, 12):
        request = random_request(rnd, prompt=prompt)
        running.append(engine.submit(request, new_sequence(model, policy)))
        for _ in range(rnd.choice([0, 2, 40])):
            engine.step()
    finish(engine)
    for generation in running:
        assert generation.produced == alone(model, generation.request, policy).produced
    assert store.budget_bytes < PLENTY or sum(g.cached_tokens for g in running) > 0
    assert store.nbytes <= store.budget_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_behind_a_cached_beginning_are_the_cold_ones(model, policy):
    if policy not in usable(model):
        pytest.skip("this family has no such cache")
    rnd = random.Random(0)
    prompt = random_tokens(rnd, 23)
    store = PrefixStore(PLENTY)
    engine = Engine(model, PARTS, store=store)
    for tail in ([], [5], [7, 8, 9]):
        request = Request(prompt=(*prompt, *tail), sampler=GREEDY, max_tokens=6, top_logprobs=0, prefill_chunk=5)
        generation = engine.submit(request, new_sequence(model, policy))
        finish(engine)
        cold = alone(model, request, policy)
        # A value near the border of a quantization step may fall to its other side.
        atol = 5e-2 if isinstance(policy, Quantized) else 1e-5
        for warm, want in zip(generation.take(), cold.take(), strict=True):
            assert warm.id == want.id and warm.logprob == pytest.approx(want.logprob, abs=atol)
        assert generation.cached_tokens >= 22 if tail else generation.cached_tokens == 0


def test_the_same_prompt_again_computes_one_token(model):
    engine = Engine(model, PARTS, store=PrefixStore(PLENTY))
    request = Request(prompt=random_tokens(random.Random(1), 30), sampler=GREEDY, max_tokens=5)
    first, again = (engine.submit(request, new_sequence(model, Full())) for _ in range(2))
    finish(engine)
    third = engine.submit(request, new_sequence(model, Full()))
    finish(engine)
    assert first.produced == again.produced == third.produced == alone(model, request, Full()).produced
    # The second was waiting for the very same prompt, so it has had nothing to compute.
    assert (first.cached_tokens, again.cached_tokens, third.cached_tokens) == (0, 30, 29)


def test_a_running_request_lends_what_it_has(model):
    rnd = random.Random(2)
    start = random_tokens(rnd, 40)
    engine = Engine(model, PARTS)
    options = dict(sampler=GREEDY, max_tokens=20, prefill_chunk=16)
    requests = [Request(prompt=start + random_tokens(rnd, n), **options) for n in (3, 4, 9)]
    running = []
    for request in requests:
        running.append(engine.submit(request, new_sequence(model, Full())))
        for _ in range(5):
            engine.step()
    assert all(not g.done for g in running)
    finish(engine)
    exact = 40 if running[0].sequence.trims_freely else 32  # else the last mark that all share
    assert [g.cached_tokens for g in running] == [0, exact, exact]
    assert [g.produced for g in running] == [alone(model, r, Full()).produced for r in requests]


def test_two_streams_from_one_entry_leave_it_as_it_was(model):
    rnd = random.Random(3)
    start = random_tokens(rnd, 24)
    store = PrefixStore(PLENTY)
    engine = Engine(model, PARTS, store=store)
    engine.submit(Request(prompt=start, sampler=GREEDY, max_tokens=1), new_sequence(model, Full()))
    finish(engine)
    (entry,) = store._entries.values()
    before = contents(entry)
    requests = [Request(prompt=start[:n] + random_tokens(rnd, 5), sampler=GREEDY, max_tokens=9) for n in (23, 24, 23)]
    running = [engine.submit(request, new_sequence(model, Full())) for request in requests]
    for _ in range(9):
        engine.step()
    assert contents(entry) == before
    finish(engine)
    for request, generation in zip(requests, running, strict=True):
        assert generation.cached_tokens >= 23 and generation.produced == alone(model, request, Full()).produced
    entries = [e for e in store._entries.values() if e is entry]
    assert not entries or contents(entry) == before


def test_cancelled_and_failed_neighbours_leave_no_wrong_entry(model):
    """What a request that was cut off at any moment has stored serves others as well as anything."""
    rnd = random.Random(4)
    store = PrefixStore(PLENTY)
    engine = Engine(model, PARTS, store=store)
    start, checked = random_tokens(rnd, 18), []
    for _ in range(12):
        request = random_request(rnd, prompt=start + random_tokens(rnd, rnd.randint(1, 6)), eos_ids=frozenset())
        doomed = engine.submit(request, new_sequence(model, Full()))
        for _ in range(rnd.randint(0, 8)):
            engine.step()
        engine.cancel(doomed)
        follow = random_request(rnd, prompt=(*doomed.known, 9))
        checked.append(engine.submit(follow, new_sequence(model, Full())))
        finish(engine)
    for generation in checked:
        assert generation.produced == alone(model, generation.request, Full()).produced


def test_sequences_of_different_policies_never_mix(llama):
    rnd = random.Random(5)
    engine = Engine(llama, PARTS, store=PrefixStore(PLENTY))
    prompt = random_tokens(rnd, 30)
    request = Request(prompt=prompt, sampler=GREEDY, max_tokens=6)
    for policy in (*POLICIES, Quantized(group_size=32, k_bits=4, start=6), Window(size=9, sinks=1)):
        for expected in (0, 29):
            generation = engine.submit(request, new_sequence(llama, policy))
            finish(engine)
            assert generation.cached_tokens == expected
            assert generation.produced == alone(llama, request, policy).produced


def test_a_sequence_of_no_kind_shares_nothing(llama):
    engine = Engine(llama, PARTS, store=PrefixStore(PLENTY))
    request = Request(prompt=(1, 2, 3, 4), sampler=GREEDY, max_tokens=3)
    for _ in range(2):
        sequence = new_sequence(llama, Full())
        sequence.kind = None
        generation = engine.submit(request, sequence)
        finish(engine)
        assert generation.cached_tokens == 0
    assert len(engine.store) == 0


def test_sequences_on_both_sides_of_a_ropes_change_never_mix():
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[3.0] * 8, rope_theta=1e4)
    model = tiny_decoder("phi3", rope_scaling=rope, original_max_position_embeddings=16, sliding_window=None)
    engine = Engine(model, PARTS, store=PrefixStore(PLENTY))
    start = random_tokens(random.Random(6), 12)
    talk = new_sequence(model, Full())
    for length, own in ((12, None), (15, None), (24, None), (20, None), (10, None), (13, talk), (25, talk)):
        request = Request(prompt=(*start, *range(20))[:length], sampler=GREEDY, max_tokens=7)
        generation = engine.submit(request, own or new_sequence(model, Full()))
        finish(engine)
        assert generation.produced == alone(model, request, Full()).produced, length


# -- memory


def stored(model, store, tokens, policy=None, **options):
    """Put a computed sequence into the store."""
    sequence = new_sequence(model, policy or Full(), **options)
    model(mx.array([list(tokens)]), sequence.caches)
    sequence.tokens = list(tokens)
    store.add(sequence)


def reusable(model, store, tokens):
    found = store.find(new_sequence(model, Full()), tokens)
    return 0 if found is None else len(found.tokens)


def test_the_least_recently_used_goes_first(llama):
    store = PrefixStore(PLENTY)
    stored(llama, store, [1, 2, 3])
    one = store.nbytes
    store = PrefixStore(2 * one)
    stored(llama, store, [1, 2, 3])
    for first in (40, 50, 60):
        stored(llama, store, [first, 2, 3])
        assert reusable(llama, store, [1, 2, 3, 4]) == 3  # using it is what keeps it
    assert len(store) == 2 and store.nbytes <= 2 * one
    assert [reusable(llama, store, [first, 2, 3]) for first in (40, 50, 60)] == [0, 0, 3]


def test_a_beginning_of_one_token_counts(llama):
    store = PrefixStore(PLENTY)
    stored(llama, store, [7])
    assert reusable(llama, store, [7, 8, 9]) == 1
    assert reusable(llama, store, [8, 7, 9]) == 0
    assert reusable(llama, store, []) == 0


def test_an_entry_holds_its_tokens_and_not_the_allocation(llama):
    store = PrefixStore(PLENTY)
    stored(llama, store, range(10))
    per_token = 2 * len(llama.layers) * 2 * 32 * 4  # keys and values, 2 heads of 32, float32
    assert store.nbytes == 10 * per_token


def test_what_is_larger_than_the_budget_is_not_kept_and_drops_nothing(llama):
    store = PrefixStore(11_000)
    stored(llama, store, [1, 2, 3])
    stored(llama, store, range(40))
    assert len(store) == 1 and reusable(llama, store, [1, 2, 3]) == 3


@pytest.mark.parametrize("name", ["gemma2", "lfm2", "llama"])
def test_the_turns_of_a_conversation_do_not_pile_up(name):
    model, rnd = family(name), random.Random(7)
    store = PrefixStore(PLENTY)
    engine = Engine(model, PARTS, store=store)
    known, sizes = (), []
    for _ in range(30):
        prompt = known + random_tokens(rnd, 3)
        generation = engine.submit(Request(prompt=prompt, sampler=GREEDY, max_tokens=4), new_sequence(model, Full()))
        finish(engine)
        assert generation.cached_tokens >= len(known) - 1
        known = tuple(generation.known)
        sizes.append(store.nbytes)
    assert len(store) == 1
    assert sizes[-1] - sizes[-8] == pytest.approx(sizes[-8] - sizes[-15], abs=sizes[-1] * 0.1)


def test_marks_are_few_and_the_newest_stays(model):
    sequence = new_sequence(model, Full())
    rnd = random.Random(8)
    for total in range(2, 60, 3):
        while len(sequence.tokens) < total:
            stop = sequence.next_stop(total, rnd.choice([1, 5, 9]))
            model(mx.array([[1] * (stop - len(sequence.tokens))]), sequence.caches)
            sequence.tokens = [1] * stop
            if stop < total:
                sequence.mark_if_due(total)
    assert len(sequence.marks) == (0 if sequence.trims_freely else 8)
    assert sequence.reach(len(sequence.tokens) - 1) == len(sequence.tokens) - 1

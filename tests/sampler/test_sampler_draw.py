"""The pick: the right distribution, seeds, and logits that can't be sampled from."""

import mlx.core as mx
import numpy as np
import pytest
import sampler_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracles import draws

from mlxgen.sampler import Sampler, sample
from mlxgen.sampler.draw import derived_seed, uniform
from mlxgen.sampler.select import draw_token

nan, inf = float("nan"), float("inf")


def assert_chi_square(tokens, probabilities, groups):
    """Counts of `groups` (an array: token -> group) agree with the probabilities, at 5 sigma."""
    observed = np.bincount(groups[tokens], minlength=groups.max() + 1)
    expected = np.bincount(groups, weights=probabilities) * len(tokens)
    freedom = len(observed) - 1
    assert expected.min() >= 5
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


# ---- the distribution


@pytest.mark.parametrize("size", [2, 20, 127, 128, 129, 300])
def test_draws_follow_the_softmax(size):
    rng = np.random.default_rng(size)
    logits = rng.normal(size=size)
    tokens = draws(logits, {}, 20_000, seed=size)
    assert_chi_square(tokens, oracle.softmax(logits), np.arange(size) if size < 200 else np.arange(size) // 3)


def test_draws_follow_the_softmax_over_a_large_vocabulary():
    size = 151_936
    logits = np.random.default_rng(0).normal(size=size).astype(np.float32)
    groups = np.arange(size) * 20 // size
    tokens = np.concatenate([draws(logits, {}, 100, seed=seed) for seed in range(3)])
    assert_chi_square(tokens, oracle.softmax(logits.astype(np.float64)), groups)
    likely = np.zeros(size, dtype=int)  # and a few tokens that hold half of the mass, at the very ends too
    places = [0, 1, 77_777, size - 2, size - 1]
    logits[:] = 0
    logits[places] = np.log(size / 5)
    likely[places] = np.arange(1, 6)
    tokens = np.concatenate([draws(logits, {}, 100, seed=seed) for seed in range(3)])
    assert_chi_square(tokens, oracle.softmax(logits.astype(np.float64)), likely)


def test_draws_follow_the_temperature_and_the_truncation():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    tokens = draws(logits, {"top_p": 0.8, "temperature": 2.0}, 20_000)
    assert_chi_square(tokens, oracle.softmax(logits[:3] / 2), np.arange(3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([-inf, -200.0, -30.0, 0.0, 1.0]), min_size=1, max_size=300),
    st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-24]),
    st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-24]),
)
def test_no_dropped_token_is_ever_drawn(logits, block, token):
    logits[len(logits) // 2] = 2.0
    drawn = draw_token(mx.array([logits]), mx.array([[block, token]])).item()
    assert 0 <= drawn < len(logits) and logits[drawn] > -inf


def test_uniform_numbers_are_below_one_in_float32():
    numbers = np.array([uniform(7, step, "pick", 2) for step in range(20_000)]).ravel()
    assert numbers.min() >= 0 and numbers.astype(np.float32).max() < 1
    assert (numbers * 2**24 % 1 == 0).all()  # exact in float32
    counts = np.histogram(numbers, bins=40, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 39 + 5 * np.sqrt(78)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


# ---- greedy


def rows_of(*rows, dtype=mx.float32):
    return mx.array(rows, dtype=mx.float32).astype(dtype)


def pick(rows, config, seed=0):
    sampler = Sampler.from_config(config)
    count = rows.shape[0]
    return sample(rows, [sampler] * count, [sampler.start(seed=seed) for _ in range(count)])[0].tolist()


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-40, 1e-6])
def test_temperature_zero_and_near_zero_take_the_first_of_the_largest(temperature):
    rows = rows_of([1, 3, 3, 2], [-1, -2, -1, -5])
    assert pick(rows, {"temperature": temperature}) == [1, 0]
    assert pick(rows[:1], {"temperature": temperature}) == [1]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("temperature", [0, 1e-4, 0.1])
def test_large_logits_do_not_overflow(dtype, temperature):
    for seed in range(10):
        assert pick(rows_of([1e4, 9.9e3, 0], dtype=dtype), {"temperature": temperature}, seed) == [0]


def test_greedy_is_the_default_and_leaves_out_what_cannot_matter():
    sampler = Sampler.from_config({"top_p": 0.5, "top_k": 3, "logit_bias": {0: 1}})
    assert sampler.greedy
    assert [stage.name for stage in sampler.chain] == ["logit_bias"]
    assert sampler.unused == ("top_k", "top_p")


def test_greedy_with_excluded_top_choices_keeps_the_stages_before():
    config = {"temperature": 0, "top_k": 1, "xtc": {"probability": 1, "threshold": 0.1}}
    assert pick(rows_of([3, 2.9, 2.8]), config) == [0]
    assert pick(rows_of([3, 2.9, 2.8]), {**config, "top_k": 0}) == [2]


# ---- logits that can't be sampled from


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"temperature": 1},
        {"temperature": 1, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "typical_p": 0.5, "top_n_sigma": 1},
        {"temperature": 1, "xtc": 1, "mirostat": 3},
        {"logit_bias": {0: 1}},
    ],
)
def test_broken_rows_get_minus_one_and_the_others_go_on(config):
    good = [1.0, 50.0, 2.0]
    bad = [[1, nan, 2], [nan, 1, 2], [1, 2, nan], [nan] * 3, [-inf] * 3, [inf, 1, 2]]
    tokens = pick(rows_of(good, *bad, good), {**config})
    assert tokens[1:-1] == [-1] * len(bad)
    assert tokens[0] == tokens[-1] != -1
    for row in bad:
        assert pick(rows_of(row), config) == [-1]


def test_a_row_that_the_chain_empties_gets_minus_one():
    ban_all = {"logit_bias": {0: -inf, 1: -inf}}
    assert pick(rows_of([1, 2]), ban_all) == [-1]
    assert pick(rows_of([1, 2]), {**ban_all, "temperature": 1}) == [-1]


# ---- seeds

FLAT = np.zeros(1000)


def answer(seed, count=12, config=None):
    sampler = Sampler.from_config({"temperature": 1, **(config or {})})
    state, row, tokens = sampler.start(seed=seed), mx.zeros((1, 1000)), []
    for _ in range(count):
        token, (state,) = sample(row, [sampler], [state])
        tokens.append(token.item())
    return tokens


def test_a_seed_repeats_and_another_differs():
    assert answer(1) == answer(1)
    assert answer(1) != answer(2)
    assert len(set(answer(1, count=50))) > 40  # a step is not like the one before


@pytest.mark.parametrize("seed", [0, -1, 1715852364, 2**40, -(2**70)])
def test_any_integer_is_a_seed(seed):
    assert answer(seed) == answer(seed) != answer(seed + 1)


def test_seeds_are_the_same_on_every_machine_and_after_a_restart():
    # The first three bytes of `printf 1/0/pick | b2sum -l 32`, little-endian.
    assert uniform(1, 0, "pick") == [0x14D6B2 / 2**24]
    assert uniform(-1, 3, "xtc") == [0x2360BA / 2**24]


def test_requests_without_a_seed_differ():
    assert len({tuple(answer(None)) for _ in range(5)}) == 5


def test_no_global_random_state_is_read_or_written():
    mx.random.seed(0)
    first = answer(3)
    before = [np.array(key).tolist() for key in mx.random.state]
    mx.random.seed(1)
    assert answer(3) == first
    mx.random.seed(0)
    assert [np.array(key).tolist() for key in mx.random.state] == before


def test_forks_have_other_numbers_but_repeat():
    sampler = Sampler.from_config({"temperature": 1})
    states = [sampler.start(seed=5).fork(i) for i in range(8)]
    tokens = sample(mx.zeros((8, 1000)), [sampler] * 8, states)[0].tolist()
    assert len(set(tokens)) > 5
    assert states[3] == sampler.start(seed=5).fork(3)
    assert derived_seed(5, 0) != derived_seed(5, 1) != derived_seed(6, 1)

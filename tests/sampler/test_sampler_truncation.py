"""Stages that drop tokens: the boundary tables, and random logits against plain NumPy."""

import numpy as np
import pytest
import sampler_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sampler_oracles import draws, kept, processed

from mlxgen.sampler import select

few = settings(max_examples=40, deadline=None)
logit_rows = (
    st.integers(1, 60)
    .flatmap(
        lambda size: arrays(
            np.float32,
            size,
            elements=st.one_of(st.floats(-30, 30, width=16), st.sampled_from([0.0, -0.0, 1.0, -np.inf])),
        )
    )
    .filter(lambda row: row.max() > -np.inf)
)


def log(*probabilities):
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, dtype=np.float32))


# ---- what is kept at the boundaries


@pytest.mark.parametrize("size", [4, 5, 128, 129, 4097, 50257, 151936])
@pytest.mark.parametrize(
    "probabilities, p, expected",
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, {0, 1}),
        ([0.5, 0.3, 0.15, 0.05], 0.85, {0, 1, 2}),
        ([0.5, 0.35, 0.10, 0.05], 0.9, {0, 1, 2}),
        ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2}),
        ([0.3, 0.1, 0.1, 0.5], 0.8, {0, 3}),  # the sum equals p: no further token
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1}),  # of equal tokens as few as needed
        ([0.2, 0.4, 0.2, 0.2], 0.61, {0, 1, 2}),
        ([0.5, 0.3, 0.15, 0.05], 0, {0}),
        ([0.1, 0.3, 0.3, 0.3], 1e-9, {1}),
    ],
)
def test_top_p_boundaries(probabilities, p, expected, size):
    places = np.linspace(0, size - 1, 4).astype(int)  # the first and the last index are among them
    row = np.full(size, -np.inf, dtype=np.float32)
    row[places] = log(*probabilities)
    assert kept(row, {"top_p": p}) == {places[i] for i in expected}


def test_top_p_one_keeps_all():
    assert kept(log(0.5, 0.3, 0.15, 0.05), {"top_p": 1.0}) == {0, 1, 2, 3}


def test_top_p_zero_is_greedy_not_off():
    assert set(draws(log(0.4, 0.3, 0.2, 0.1), {"top_p": 0}, 100)) == {0}


@pytest.mark.parametrize(
    "logits, k, expected",
    [
        ([3, 1, 2, 5], 2, {0, 3}),
        (log(0.4, 0.2, 0.2, 0.2), 2, {0, 1}),
        ([0, 0, 0, 0], 3, {0, 1, 2}),
        ([-0.0, 0.0, 0.0], 1, {0}),
        ([1, 2, 3], 3, {0, 1, 2}),
        ([1, 2, 3], 1000, {0, 1, 2}),
        ([1, 2, 3], 0, {0, 1, 2}),
        ([1, 2, 3], 2**40, {0, 1, 2}),
    ],
)
def test_top_k_boundaries(logits, k, expected):
    assert kept(logits, {"top_k": k}) == expected


@pytest.mark.parametrize("p, expected", [(1.0, {0, 2}), (0.5, {0, 1, 2}), (0.1, {0, 1, 2, 3})])
def test_min_p_boundaries(p, expected):
    assert kept(np.log2(np.array([8, 4, 8, 1])) * np.log(2), {"min_p": p - 1e-6 if p < 1 else p}) == expected


def test_top_k_then_top_p_keeps_the_best_token():
    config = {"top_k": 1, "top_p": 0.8, "temperature": 0.01}
    assert set(draws(log(0.4, 0.3, 0.2, 0.1), config, 200)) == {0}


def test_temperature_comes_after_truncation_by_default_and_can_come_before():
    config = {"top_p": 0.8, "temperature": 0.5}
    assert kept([3, 2, 1], config) == {0, 1}
    assert kept([3, 2, 1], {**config, "order": ["temperature", "top_p"]}) == {0}


# ---- exclude top choices


@pytest.mark.parametrize(
    "threshold, expected", [(0.1, {2, 3}), (0.0, {3}), (0.6, {0, 1, 2, 3}), (0.4, {0, 1, 2, 3})]
)
def test_xtc(threshold, expected):
    config = {"xtc": {"probability": 1, "threshold": threshold}}
    assert kept(log(0.5, 0.3, 0.15, 0.05), config) == expected


def test_xtc_never_removes_the_end_of_the_sequence_nor_what_must_stay():
    row, config = log(0.5, 0.3, 0.15, 0.05), {"probability": 1, "threshold": 0.1}
    assert kept(row, {"xtc": config}, eos_ids=[0]) == {0, 2, 3}
    assert kept(row, {"xtc": config}, eos_ids=frozenset([1, 0])) == {0, 1, 2, 3}
    assert kept(row, {"xtc": {**config, "keep": [1]}}, eos_ids=[]) == {1, 2, 3}


def test_xtc_happens_as_often_as_asked():
    drawn = draws(log(0.5, 0.3, 0.2), {"xtc": {"probability": 0.25, "threshold": 0.1}}, 4000)
    share = (drawn == 0).mean()  # token 0 can only come when it was not excluded: 0.75 * 0.5
    assert abs(share - 0.375) < 4 * (0.375 * 0.625 / 4000) ** 0.5


# ---- random logits


@few
@given(logit_rows, st.integers(1, 70))
def test_top_k_equals_numpy(row, k):
    assert kept(row, {"top_k": k}) == oracle.top_k(row, k)


@few
@given(logit_rows, st.floats(0, 1))
def test_top_p_equals_numpy(row, p):
    got, probabilities = kept(row, {"top_p": p}), oracle.softmax(row.astype(np.float64))
    order = [i for i in oracle.by_probability(row) if row[i] > -np.inf]
    assert got == set(order[: len(got)])  # the most likely ones, of equals the lowest first
    mass = probabilities[list(got)].sum()
    assert mass >= p - 3e-6
    assert len(got) == 1 or mass - probabilities[order[len(got) - 1]] < p + 1e-6  # and no more than needed


@few
@given(logit_rows, st.floats(0.01, 0.99))
def test_typical_p_keeps_what_is_nearest_to_the_entropy(row, p):
    got = sorted(kept(row, {"typical_p": p}))
    probabilities, distance = oracle.distance_to_entropy(row.astype(np.float64))
    dropped = [i for i in range(len(row)) if i not in got and row[i] > -np.inf]
    assert got and max(distance[got]) <= min(distance[dropped], default=np.inf) + 1e-4
    mass = probabilities[got].sum()
    assert mass >= p - 1e-5  # enough, and no more than needed: the last one may be any of the most distant
    last = min(probabilities[i] for i in got if distance[i] >= max(distance[got]) - 1e-4)
    assert len(got) == 1 or mass - last < p + 1e-5


@pytest.mark.parametrize(
    "probabilities, p, expected",
    [
        # Entropy 1.142, so the distances of the surprises are .449 .062 .755 1.854.
        ([0.5, 0.3, 0.15, 0.05], 0.2, {1}),
        ([0.5, 0.3, 0.15, 0.05], 0.5, {0, 1}),
        ([0.5, 0.3, 0.15, 0.05], 0.8, {0, 1}),
        ([0.5, 0.3, 0.15, 0.05], 0.9, {0, 1, 2}),
        ([0.5, 0.3, 0.15, 0.05], 0.96, {0, 1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], 0, {1}),
        # Entropy 1.221: .527 .389 .389 1.082.
        ([0.5, 0.2, 0.2, 0.1], 0.2, {1}),
        ([0.5, 0.2, 0.2, 0.1], 0.3, {1, 2}),
    ],
)
def test_typical_p_boundaries(probabilities, p, expected):
    assert kept(log(*probabilities), {"typical_p": p}) == expected


@few
@given(logit_rows, st.floats(0.001, 0.999))
def test_min_p_equals_numpy(row, p):
    x = row.astype(np.float64)
    sure = {i for i in range(len(x)) if abs(x[i] - x.max() - np.log(p)) > 1e-4}
    assert kept(row, {"min_p": p}) & sure == oracle.min_p(x, p) & sure


@few
@given(logit_rows, st.floats(0.01, 4))
def test_top_n_sigma_equals_numpy(row, n):
    x = row.astype(np.float64)
    limit = x.max() - n * x[x > -np.inf].std()
    sure = {i for i in range(len(x)) if abs(x[i] - limit) > 1e-4}
    assert kept(row, {"top_n_sigma": n}) & sure == oracle.top_n_sigma(x, n) & sure


@few
@given(logit_rows, st.floats(0, 0.5))
def test_xtc_equals_numpy(row, threshold):
    x = row.astype(np.float64)
    probabilities = oracle.softmax(x)
    if np.abs(probabilities - threshold).min() < 1e-6 and threshold > 0:
        return
    visible = {i for i in range(len(x)) if probabilities[i] > 1e-30}
    config = {"xtc": {"probability": 1, "threshold": threshold}}
    assert kept(row, config) & visible == oracle.xtc(x, max(threshold, 1e-37)) & visible


truncations = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(0, 80),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "top_n_sigma": st.floats(0, 3),
        "temperature": st.floats(0, 5),
    },
)


@few
@given(logit_rows, truncations, st.permutations(["top_k", "top_p", "min_p", "top_n_sigma", "temperature"]))
def test_any_chain_of_truncations_keeps_the_best_token(row, config, order):
    out = processed(row, {**config, "order": order})
    assert out.argmax() == row.argmax() and out.max() > -np.inf and not np.isnan(out).any()


@few
@given(logit_rows, st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_any_chain_at_all_keeps_a_token(row, typical, top, threshold):
    config = {"typical_p": typical, "top_p": top, "xtc": {"probability": 1, "threshold": threshold}}
    assert kept(row, config)


# ---- large vocabularies: the search by halves against a sort


@pytest.mark.parametrize("size", [4097, 8192, 10007, 50257])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_halving_equals_sorting(size, scale, monkeypatch):
    rng = np.random.default_rng(size)
    row = (rng.normal(size=size) * scale).astype(np.float16).astype(np.float32)  # float16: plenty of ties
    configs = [{"top_p": p} for p in (0.0, 0.3, 0.9, 0.999)] + [{"typical_p": 0.4}]
    halved = [kept(row, config) for config in configs]
    monkeypatch.setattr(select, "_halvings", lambda size: 0)
    for config, got in zip(configs, halved, strict=True):
        differ = list(got ^ kept(row, config))  # a running sum over all rounds worse than sums of halves
        assert oracle.softmax(row.astype(np.float64))[differ].sum() < 5e-5


@pytest.mark.parametrize("size", [5000, 151936])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_top_p_of_large_vocabularies_equals_numpy(size, p):
    row = np.random.default_rng(1).normal(size=size).astype(np.float32) * 2
    got, expected = kept(row, {"top_p": p}), oracle.top_p(row.astype(np.float64), p)
    probabilities = oracle.softmax(row.astype(np.float64))
    assert probabilities[list(got ^ expected)].sum() < 3e-6


def test_equal_tokens_are_cut_exactly_in_large_vocabularies():
    assert kept(np.zeros(100_000), {"top_p": 0.25}) == set(range(25_000))
    assert kept(np.zeros(100_000), {"top_k": 777}) == set(range(777))

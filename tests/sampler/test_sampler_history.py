"""Stages that look back: penalties, DRY, mirostat; and those that only change numbers: bias, temperature."""

import numpy as np
import pytest
import sampler_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracles import processed

few = settings(max_examples=50, deadline=None)
V = 12
rows = st.lists(st.floats(-10, 10, width=16), min_size=V, max_size=V).map(
    lambda x: np.array(x, dtype=np.float64)
)
histories = st.lists(st.integers(0, V - 1), max_size=40)


# ---- penalties


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    out = processed([2, -2, 1], {"repetition_penalty": 2}, prompt=[0, 1], answer=[0, 0])
    assert out.tolist() == [1, -4, 1]


def test_repetition_penalty_sees_the_whole_context_unless_a_window_is_set():
    long_ago = [0] + [1] * 25
    penalty = {"penalty": 1.5}
    assert processed([-2, 1], {"repetition_penalty": penalty}, prompt=long_ago)[0] == -3
    assert processed([-2, 1], {"repetition_penalty": {**penalty, "window": 20}}, prompt=long_ago)[0] == -2
    assert processed([-2, 1], {"repetition_penalty": {**penalty, "window": 26}}, prompt=long_ago)[0] == -3


@pytest.mark.parametrize(
    "name, expected", [("frequency_penalty", [0.5, 1.5, 2]), ("presence_penalty", [1.5, 1.5, 2])]
)
def test_frequency_and_presence_penalties(name, expected):
    assert processed([2, 2, 2], {name: 0.5}, prompt=[], answer=[0, 0, 0, 1]).tolist() == expected


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_penalties_do_not_count_the_prompt(name):
    assert processed([2, 2, 2], {name: 0.5}, prompt=[0, 1, 2], answer=[1]).tolist() == [2, 1.5, 2]
    assert processed([2, 2, 2], {name: 0.5}, prompt=[0, 1, 2]).tolist() == [2, 2, 2]


def test_no_token_is_penalized_before_any_token_is_there():
    config = {"repetition_penalty": 2, "frequency_penalty": 1, "presence_penalty": 1, "dry": 1}
    assert processed([1, 2, 3], config).tolist() == [1, 2, 3]


@few
@given(rows, histories, histories, st.floats(0.25, 4), st.integers(0, 20))
def test_repetition_penalty_equals_numpy(row, prompt, answer, penalty, window):
    config = {"repetition_penalty": {"penalty": penalty, "window": window}}
    expected = oracle.repetition_penalty(row, prompt + answer, penalty, window)
    np.testing.assert_allclose(processed(row, config, prompt, answer), expected, rtol=1e-5)


@few
@given(rows, histories, histories, st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_penalties_equal_numpy(row, prompt, answer, frequency, presence):
    counts = np.bincount(answer, minlength=V)
    config = {"frequency_penalty": frequency, "presence_penalty": presence}
    expected = row - frequency * counts - presence * (counts > 0)
    np.testing.assert_allclose(processed(row, config, prompt, answer), expected, rtol=1e-4, atol=1e-4)


# ---- DRY


def test_dry_penalizes_what_would_continue_a_repetition():
    # "0 1 2" came before, followed by 3: the match of 3 tokens exceeds the allowed 2 by one.
    out = processed(np.zeros(5), {"dry": {"multiplier": 1, "base": 1.75}}, prompt=[0, 1, 2, 3, 0, 1, 2])
    assert out.tolist() == [0, 0, 0, -1.75, 0]


def test_dry_stops_at_sequence_breakers_and_outside_its_window():
    prompt, dry = [0, 1, 2, 3, 0, 1, 2], {"multiplier": 1, "base": 2, "allowed_length": 1}
    assert processed(np.zeros(5), {"dry": dry}, prompt=prompt)[3] == -4
    assert processed(np.zeros(5), {"dry": {**dry, "sequence_breakers": [0]}}, prompt=prompt)[3] == -2
    assert processed(np.zeros(5), {"dry": {**dry, "sequence_breakers": [1]}}, prompt=prompt)[3] == -1
    assert processed(np.zeros(5), {"dry": {**dry, "sequence_breakers": [2]}}, prompt=prompt)[3] == 0
    assert processed(np.zeros(5), {"dry": {**dry, "sequence_breakers": [3]}}, prompt=prompt)[3] == 0
    assert processed(np.zeros(5), {"dry": {**dry, "window": 6}}, prompt=prompt)[3] == -2
    assert processed(np.zeros(5), {"dry": {**dry, "window": 4}}, prompt=prompt)[3] == 0


def test_dry_counts_matches_up_to_fifty_tokens():
    out = processed(np.zeros(2), {"dry": {"multiplier": 1, "base": 1.5}}, prompt=[0] * 200)
    assert out[0] == pytest.approx(-(1.5**48), rel=1e-4)


@few
@given(
    rows,
    st.lists(st.integers(0, 3), max_size=60),
    st.floats(1, 2),
    st.integers(1, 4),
    st.integers(0, 30),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_dry_equals_its_description(row, tokens, base, allowed_length, window, breakers):
    settings = {"multiplier": 0.8, "base": base, "allowed_length": allowed_length, "window": window}
    expected = oracle.dry(row, tokens, 0.8, base, allowed_length, window, breakers)
    out = processed(row, {"dry": {**settings, "sequence_breakers": sorted(breakers)}}, prompt=tokens)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


# ---- mirostat


def test_mirostat_drops_surprising_tokens_and_steers():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    sampler, state = oracle.started({"mirostat": {"tau": 1.0, "eta": 0.5}}, seed=4)
    mu = 2.0  # 2 tau: tokens of 1 and 2 bits stay, tokens of 3 bits don't
    for _ in range(20):
        row = oracle.mx.array(logits.astype(np.float32))[None]
        out = np.array(oracle.process(row, [sampler], [state])[0], dtype=np.float64)
        stay = {i for i in range(4) if -np.log2(np.exp(logits[i])) <= mu + 1e-5} | {0}
        assert set(np.flatnonzero(out > -np.inf).tolist()) == stay
        tokens, (state,) = oracle.sample(row, [sampler], [state])
        mu -= 0.5 * (oracle.surprise_bits(out, tokens.item()) - 1.0)
        assert state.memory[0].item() == pytest.approx(mu, abs=1e-4)


def test_mirostat_reaches_the_surprise_asked_for():
    logits = -1.1 * np.log(np.arange(1, 2001))
    for tau in (2.0, 4.0):
        sampler, state = oracle.started({"mirostat": {"tau": tau}}, seed=1)
        row, bits = oracle.mx.array(logits.astype(np.float32))[None], []
        for _ in range(160):
            out = np.array(oracle.process(row, [sampler], [state])[0], dtype=np.float64)
            tokens, (state,) = oracle.sample(row, [sampler], [state])
            bits.append(oracle.surprise_bits(out, tokens.item()))
        assert abs(np.mean(bits[60:]) - tau) < 0.35


# ---- bias and temperature


def test_logit_bias_adds_and_bans():
    assert processed([1, 2, 3], {"logit_bias": {"0": 2.5, 2: -1}}).tolist() == [3.5, 2, 2]
    assert processed([1, 2, 3], {"logit_bias": {1: -np.inf}}).tolist() == [1, -np.inf, 3]
    assert set(oracle.draws(np.zeros(60), {"logit_bias": {"50": 100}}, 50)) == {50}


@few
@given(rows, st.floats(0.1, 2), st.floats(0.01, 2), st.floats(0, 3), st.integers(1, V))
def test_dynamic_temperature_equals_numpy(row, temperature, span, exponent, left):
    row[left:] = -np.inf
    config = {"temperature": temperature, "dynamic_temperature": {"range": span, "exponent": exponent}}
    expected = oracle.softmax(oracle.dynamic_temperature(row, temperature, span, exponent))
    got = oracle.softmax(processed(row, config).astype(np.float64))
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-4)


def test_dynamic_temperature_runs_in_the_place_of_temperature():
    flat, sure = np.zeros(4), np.array([100.0, 0, 0, 0])
    config = {"temperature": 0.8, "dynamic_temperature": 0.5}
    sampler, _ = oracle.started(config)
    assert [stage.name for stage in sampler.chain] == ["dynamic_temperature"]
    flat[:2] = 1e-3
    ratio = np.ptp(processed(flat, config)) / np.ptp(flat)
    assert ratio == pytest.approx(1 / 1.3, rel=1e-3)  # all is open: T + range
    assert np.ptp(processed(sure, config)) == pytest.approx(100 / 0.3, rel=1e-3)  # nothing is: T - range

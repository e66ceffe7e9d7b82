"""Rope frequencies, against values worked out by hand from the papers' formulas."""

import pytest

from mlxgen.blueprint.rope import RopeSpec
from mlxgen.errors import ConfigError

LLAMA3 = dict(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def rope(dims, **settings):
    return RopeSpec.from_settings(settings, dims=dims, interleaved=False)


def test_llama3_stretches_only_long_wavelengths():
    short = rope(8, theta=500000.0, original_max_position_embeddings=8192, **LLAMA3).frequencies()[0]
    assert short == pytest.approx([1, 0.037606, 0.000524846, 6.64787e-06], rel=1e-5)
    long = rope(16, theta=1e4, original_max_position_embeddings=64, **LLAMA3).frequencies()[0]
    expected = [1, 0.244385, 0.0130423, 0.00395285, 0.00125, 0.000395285, 0.000125, 3.95285e-05]
    assert long == pytest.approx(expected, rel=1e-5)


def test_default_and_linear():
    plain, scale = rope(8, theta=500000.0).frequencies()
    assert plain == pytest.approx([1, 0.037606, 0.00141421, 5.3183e-05], rel=1e-5) and scale == 1
    halved, _ = rope(8, theta=500000.0, kind="linear", factor=2.0).frequencies()
    assert halved == pytest.approx([f / 2 for f in plain])


def test_longrope_changes_beyond_the_original_context():
    settings = dict(kind="longrope", short_factor=[1.0, 2.0], long_factor=[4.0, 5.0], context=128)
    spec = rope(4, theta=1e4, original_max_position_embeddings=32, **settings)
    assert spec.changes_at == 32
    assert spec.frequencies(32)[0] == pytest.approx([1.0, 0.01 / 2])
    assert spec.frequencies(33)[0] == pytest.approx([1 / 4, 0.01 / 5])
    assert spec.frequencies(1)[1] == pytest.approx((1 + 1.3862944 / 3.4657359) ** 0.5)  # sqrt(1 + ln 4 / ln 32)


def test_gpt_oss_yarn_does_not_round_its_ramp():
    settings = dict(kind="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096)
    floored = rope(64, theta=150000.0, **settings).frequencies()[0]
    exact = rope(64, theta=150000.0, truncate=False, **settings).frequencies()[0]
    # The ramp runs from pair 8.09 to 17.40, by hand; floored and ceiled from 8 to 18.
    keep = 1 - (10 - 8.0928) / (17.3980 - 8.0928)
    plain = 150000.0 ** (-20 / 64)
    assert exact[10] == pytest.approx(plain * keep + plain / 32 * (1 - keep), rel=1e-4)
    assert floored[10] != pytest.approx(exact[10], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(kind="llama4ish"), "`rope.kind` must be one of"),
        (dict(kind="linear"), "`rope.factor` must be given"),
        (
            dict(kind="longrope", short_factor=[1.0], long_factor=[1.0, 1.0], context=8),
            "`rope.short_factor` must be a list of 2",
        ),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        rope(4, **settings)


def test_odd_dims_are_refused():
    with pytest.raises(ConfigError, match=r"`rope.dims` must be even"):
        rope(5)

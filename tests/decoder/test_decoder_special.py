"""Blocks of single families, against plain NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.blueprint.norms import NormSpec
from mlxgen.blueprint.special import DifferentialAttentionSpec, DynamicMaskAttentionSpec
from mlxgen.decoder.bitnet import RoundedLinear, ternary
from mlxgen.decoder.differential_attention import DifferentialAttention
from mlxgen.decoder.dynamic_mask_attention import DynamicMaskAttention

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 999)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def heads(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


@given(seed=seeds)
@few
def test_inputs_are_rounded_to_8_bits_of_their_largest(seed):
    rng = np.random.default_rng(seed)
    linear, x = RoundedLinear(5, 3, bias=True, weights=False), heads(rng, 4, 5)
    step = np.abs(x).max(-1, keepdims=True) / 127
    want = np.round(x / step) * step @ np.array(linear.weight).T + np.array(linear.bias)
    np.testing.assert_allclose(np.array(linear(mx.array(x))), want, atol=1e-5)


def test_a_row_of_zeros_stays_one():
    linear = RoundedLinear(5, 3, bias=False, weights=False)
    assert mx.array_equal(linear(mx.zeros((2, 5))), mx.zeros((2, 3)))


@given(seed=seeds)
@few
def test_ternary_weights_are_the_nearest_of_three(seed):
    weight = heads(np.random.default_rng(seed), 4, 6)
    mean = np.abs(weight).mean()
    choices = np.array([-mean, 0, mean])
    want = choices[np.abs(weight[..., None] - choices).argmin(-1)]
    np.testing.assert_allclose(np.array(ternary(mx.array(weight))), want, rtol=1e-5)


@pytest.mark.parametrize(("keep", "mask"), [(3, "causal"), (99, "causal"), (3, None), (2, "array")])
def test_only_the_keys_that_want_it_most_are_seen(keep, mask):
    """The oracle goes through the queries one by one and sorts their keys."""
    B, H, K, L, S, D = 2, 4, 2, (1 if mask is None else 5), 7, 4
    spec = DynamicMaskAttentionSpec(num_heads=H, num_kv_heads=K, head_dim=D, scale=0.5, keep=keep)
    block, rng = DynamicMaskAttention(spec, 8), np.random.default_rng(0)
    block.A = mx.array(heads(rng, K))
    q, k, v = heads(rng, B, H, L, D), heads(rng, B, K, S, D), heads(rng, B, K, S, D)
    visible = np.arange(S - L, S)[:, None] >= np.arange(S)
    given_mask = mx.array(visible) if mask == "array" else mask
    got = np.array(block.attend(mx.array(q), mx.array(k), mx.array(v), given_mask))
    rows = v.transpose(0, 2, 1, 3).reshape(B, S, K * D) @ np.array(block.dt_proj.weight).T
    wish = np.exp(np.array(block.A) * np.log1p(np.exp(rows)))  # [B, S, K]
    for b, h, i in np.ndindex(B, H, L):
        g = h // (H // K)
        seen = np.flatnonzero(visible[i])
        seen = seen[np.argsort(-wish[b, seen, g])][:keep]
        scores = k[b, g, seen] @ q[b, h, i] * 0.5 + wish[b, seen, g]
        np.testing.assert_allclose(got[b, h, i], softmax(scores) @ v[b, g, seen], atol=1e-5)


@given(seed=seeds)
@few
def test_the_second_half_of_the_heads_is_taken_from_the_first(seed):
    B, H, K, L, D = 1, 4, 2, 3, 4
    norm = NormSpec(kind="rms", eps=1e-5, weight=False)
    spec = DifferentialAttentionSpec(
        num_heads=H, num_kv_heads=K, head_dim=D, scale=0.5, norm=norm, lambda_init=0.3
    )
    block, rng = DifferentialAttention(spec, 8), np.random.default_rng(seed)
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    q1, k1, q2, k2 = (heads(rng, D) * 0.3 for _ in names)
    block.update({name: mx.array(value) for name, value in zip(names, (q1, k1, q2, k2), strict=True)})
    q, k, v = heads(rng, B, H, L, D), heads(rng, B, K, L, D), heads(rng, B, K, L, D)
    got = np.array(block.attend(mx.array(q), mx.array(k), mx.array(v), "causal"))
    factor = np.exp(q1 @ k1) - np.exp(q2 @ k2) + 0.3
    both = np.concatenate([v[:, 0], v[:, 1]], axis=-1)[0]  # one pair of value heads: [L, 2 D]
    outs = []
    for h in range(H):
        scores = np.where(np.tri(L, dtype=bool), q[0, h] @ k[0, h // 2].T * 0.5, -np.inf)
        outs.append(softmax(scores) @ both)
    for h in range(H // 2):
        want = outs[h] - factor * outs[h + H // 2]
        want = want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-5) * (1 - 0.3)
        np.testing.assert_allclose(got[0, h], want, atol=1e-4)

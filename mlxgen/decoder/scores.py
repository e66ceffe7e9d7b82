"""Attention with its scores written out, for what MLX's fused attention has no step for.

Shapes: B batch, L new tokens, S tokens seen, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx


def scored_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any,
    *,
    softcap: float | None = None,
    slopes: mx.array | None = None,
) -> mx.array:
    """softmax(cap(q k^T * scale) + slopes * position + mask) v, q [B, H, L, D], keys and values [B, K, S, D].

    softcap: scores are bent into (-cap, cap) by cap * tanh(score / cap), arXiv:2408.00118.
    slopes [H]: scores grow linearly with the key's position, arXiv:2108.12409.
    """
    B, H, L, D = q.shape
    K, S = keys.shape[1], keys.shape[2]
    scores = (q * scale).reshape(B, K, H // K, L, D) @ keys[:, :, None].swapaxes(-1, -2)  # [B, K, H / K, L, S]
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    if slopes is not None:  # by the distance to the newest key: what is added to a whole row does not matter
        scores = scores + slopes.reshape(K, H // K, 1, 1).astype(scores.dtype) * mx.arange(1 - S, 1)
    if isinstance(mask, str):  # "causal": the new tokens are the last L of S
        mask = mx.arange(S - L, S)[:, None] >= mx.arange(S)
    if mask is not None:
        mask = mask if mask.ndim == 2 else mask[:, :, None]
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(B, H, L, values.shape[-1])


def alibi_slopes(heads: int) -> mx.array:
    """The slope of each head [H]: a geometric sequence, arXiv:2108.12409 section 3; the reference code's rule where
    the number of heads is no power of two.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return mx.array(slopes, mx.float32)

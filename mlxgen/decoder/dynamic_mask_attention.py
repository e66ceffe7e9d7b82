"""Attention with a dynamic mask (Doge): every value says how much it wants to be seen, and only the best may be.

Shapes: B batch, L new tokens, S tokens seen, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.special import DynamicMaskAttentionSpec
from mlxgen.decoder.attention import Attention


class DynamicMaskAttention(Attention):
    """Scores plus a number for each key, from the values of all its heads. Reference: transformers models/doge."""

    def __init__(self, spec: DynamicMaskAttentionSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        K = spec.num_kv_heads
        self.dt_proj = nn.Linear(K * spec.head_dim, K, bias=spec.qkv_bias)
        self.A = mx.zeros((K,))
        self.keep = spec.keep

    def attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        """q [B, H, L, D], keys and values [B, K, S, D] -> [B, H, L, D]."""
        B, K, S, _ = values.shape
        H, L = q.shape[1], q.shape[2]
        rows = self["dt_proj"](values.swapaxes(1, 2).reshape(B, S, -1))  # [B, S, K]
        bias = mx.exp(self["A"] * nn.softplus(rows)).swapaxes(1, 2)[:, :, None]  # [B, K, 1, S]
        if isinstance(mask, str):  # "causal": the new tokens are the last L of S
            mask = mx.arange(S - L, S)[:, None] >= mx.arange(S)
        bias = mx.broadcast_to(bias, (B, K, L, S)) if mask is None else mx.where(mask, bias, -mx.inf)
        if self.keep < S:
            least = mx.topk(bias, self.keep, axis=-1).min(axis=-1, keepdims=True)
            bias = mx.where(bias >= least, bias, -mx.inf)
        bias = mx.repeat(bias, H // K, axis=1).astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=bias)

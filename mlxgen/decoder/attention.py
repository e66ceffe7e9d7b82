"""Grouped-query attention (arXiv:1706.03762, arXiv:2305.13245).

Shapes: B batch, L new tokens, S tokens seen, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import AttentionSpec
from mlxgen.decoder.norm import build_norm
from mlxgen.decoder.rope import Rope
from mlxgen.protocols import LayerCache


class Attention(nn.Module):
    """project -> norm -> rope -> attend over the cache -> project.

    `passes.fuse_projections` may replace q_proj, k_proj and v_proj by one qkv_proj with the rows of all three.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden_size, q_width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(q_width, hidden_size, bias=spec.o_bias)
        if spec.qk_norm is not None:
            per_head = spec.qk_norm.scope == "head"
            self.q_norm = build_norm(spec.qk_norm.norm, spec.head_dim if per_head else q_width)
            self.k_norm = build_norm(spec.qk_norm.norm, spec.head_dim if per_head else kv_width)
        if spec.sinks:
            self.sinks = mx.zeros((spec.num_heads,))
        self.rope = Rope(spec.rope, spec.head_dim) if spec.rope else None
        self.scale = spec.scale * (self.rope.attention_scale if self.rope else 1.0)
        self.fused = False

    def __call__(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [B * L, hidden] -> [B * L, hidden]; `length` is the whole sequence's, for ropes that depend on it."""
        spec, H, K = self.spec, self.spec.num_heads, self.spec.num_kv_heads
        L, D = x.shape[0] // batch, spec.head_dim
        heads = self._project(x)  # [B * L, (H + K + K) * D]
        if L == 1:  # one token needs no transpose
            heads = heads.reshape(batch, H + K + K, 1, D)
        else:
            heads = heads.reshape(batch, L, H + K + K, D).swapaxes(1, 2)
        qk, v = heads[:, : H + K], heads[:, H + K :]
        norm_heads = spec.qk_norm.when if spec.qk_norm and spec.qk_norm.scope == "head" else None
        if norm_heads == "before":
            qk = self._norm_heads(qk)
        if self.rope is not None:  # one call for the heads of both
            qk = self.rope(qk, cache.offset, length)
        if norm_heads == "after":
            qk = self._norm_heads(qk)
        out = cache.attend(qk[:, :H], qk[:, H:], v, mask, self.attend)  # [B, H, L, D]
        return self["o_proj"]((out if L == 1 else out.swapaxes(1, 2)).reshape(batch * L, H * D))

    def attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        """softmax(q k^T * scale + mask) v: q [B, H, L, D], keys and values [B, K, S, D] -> [B, H, L, D]."""
        if self.spec.softcap is not None:
            return soft_capped_attention(q, keys, values, self.scale, self.spec.softcap, mask)
        sinks = self.sinks if self.spec.sinks else None
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=mask, sinks=sinks)

    def _project(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> queries, keys and values side by side [T, (H + K + K) * D]."""
        norm = self.spec.qk_norm
        over_width = norm is not None and norm.scope == "width"
        if self.fused:
            qkv = self["qkv_proj"](x)
            if not over_width:
                return qkv
            q_width = self.spec.num_heads * self.spec.head_dim
            kv_width = self.spec.num_kv_heads * self.spec.head_dim
            q, k, v = mx.split(qkv, [q_width, q_width + kv_width], axis=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if over_width:
            q, k = self.q_norm(q), self.k_norm(k)
        return mx.concatenate([q, k, v], axis=-1)

    def _norm_heads(self, qk: mx.array) -> mx.array:
        H = self.spec.num_heads
        return mx.concatenate([self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])], axis=1)


def soft_capped_attention(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, cap: float, mask: Any
) -> mx.array:
    """Attention whose scores are bent into (-cap, cap) by cap * tanh(score / cap), arXiv:2408.00118.

    MLX's fused attention has no such step, so the scores are written out: [B, K, H/K, L, S].
    """
    B, H, L, D = q.shape
    K, S = keys.shape[1], keys.shape[2]
    grouped = (q * scale).reshape(B, K, H // K, L, D)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2)
    scores = mx.tanh(scores / cap) * cap
    if isinstance(mask, str):  # "causal": the new tokens are the last L of S
        mask = mx.arange(S - L, S)[:, None] >= mx.arange(S)
    if mask is not None:
        mask = mask if mask.ndim == 2 else mask[:, :, None]
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(B, H, L, D)

"""Grouped-query attention (arXiv:1706.03762, arXiv:2305.13245).

Shapes: B batch, L new tokens, S tokens seen, H query heads, K key/value heads, D head_dim, T = B * L rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import AttentionSpec, GateSpec, TemperatureSpec
from mlxgen.decoder.activation import softplus
from mlxgen.decoder.norm import PerHeadNorm, build_norm
from mlxgen.decoder.rope import Rope
from mlxgen.decoder.scores import alibi_slopes, scored_attention
from mlxgen.protocols import LayerCache


class Attention(nn.Module):
    """project -> norm -> rope -> attend over the cache -> gate -> project; most stages are optional.

    `passes.fuse_projections` may replace q_proj, k_proj and v_proj by one qkv_proj with the rows of all three.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.q_width, self.k_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        v_width, out_width = spec.num_kv_heads * spec.value_dim, spec.num_heads * spec.value_dim
        self.q_proj = nn.Linear(hidden_size, self.q_width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.k_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, v_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(out_width, hidden_size, bias=spec.o_bias)
        if spec.qk_norm is not None:
            self.q_norm, self.k_norm = (self._qk_norm(n) for n in (spec.num_heads, spec.num_kv_heads))
        if spec.sinks:
            self.sinks = mx.zeros((spec.num_heads,))
        if spec.gate is not None:
            gate_width = _gate_width(spec.gate, spec.num_heads, out_width)
            self.gate_proj = nn.Linear(hidden_size, gate_width, bias=spec.gate.bias)
        normed_after = spec.qk_norm is not None and spec.qk_norm.when == "after"  # which undoes what rope scales
        self.rope = Rope(spec.rope, spec.head_dim, scaled=normed_after) if spec.rope else None
        self.scale = spec.scale * (self.rope.attention_scale if self.rope else 1.0)
        self._slopes = alibi_slopes(spec.num_heads) * spec.alibi if spec.alibi else None
        self.head_norm = spec.qk_norm.when if spec.qk_norm and spec.qk_norm.scope != "width" else None
        self.fused = False

    def _qk_norm(self, heads: int) -> nn.Module:
        assert self.spec.qk_norm is not None
        norm, scope, D = self.spec.qk_norm.norm, self.spec.qk_norm.scope, self.spec.head_dim
        return (
            PerHeadNorm(norm, heads, D)
            if scope == "per_head"
            else build_norm(norm, D if scope == "head" else heads * D)
        )

    def __call__(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]; `length` is the whole sequence's, for ropes that depend on it."""
        spec, H = self.spec, self.spec.num_heads
        qk, v = self._project(x)  # [T, (H + K) * D], [T, K * Dv]
        qk, v = split_heads(qk, batch, spec.head_dim), split_heads(v, batch, spec.value_dim)
        if self.head_norm == "before":
            qk = self._norm_heads(qk)
        if self.rope is not None:  # one call for the heads of both
            qk = self.rope(qk, cache.offset, length)
        if self.head_norm == "after":
            qk = self._norm_heads(qk)
        q, k = mx.split(qk, [H], axis=1)  # [B, H, L, D], [B, K, L, D]
        if spec.temperature is not None:
            q = q * query_temperature(spec.temperature, cache.offset, q.shape[2]).astype(q.dtype)
        out = merge_heads(cache.attend(q, k, v, mask, self.attend))  # [T, H * Dv]
        if spec.gate is not None:
            out = self._gated(out, x)
        return self.project_out(out)

    def project_out(self, out: mx.array) -> mx.array:
        """The results of all heads [T, H * Dv] -> [T, hidden]."""
        return self["o_proj"](out)

    def attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        """softmax(q k^T * scale + mask) v: q [B, H, L, D], keys and values [B, K, S, D] -> [B, H, L, D]."""
        spec = self.spec
        if spec.softcap is not None or self._slopes is not None:
            return scored_attention(q, keys, values, self.scale, mask, softcap=spec.softcap, slopes=self._slopes)
        sinks = self.sinks if spec.sinks else None
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=mask, sinks=sinks)

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, hidden] -> queries and keys side by side, and values."""
        if self.fused:
            qk, v = self["qkv_proj"].parts(x)
        else:
            qk, v = mx.concatenate([self["q_proj"](x), self["k_proj"](x)], axis=-1), self["v_proj"](x)
        if self.spec.qk_norm is not None and self.spec.qk_norm.scope == "width":
            q, k = qk[:, : self.q_width], qk[:, self.q_width :]
            qk = mx.concatenate([self["q_norm"](q), self["k_norm"](k)], axis=-1)
        if self.spec.clip is not None:
            qk, v = (mx.clip(a, -self.spec.clip, self.spec.clip) for a in (qk, v))
        return qk, v

    def _norm_heads(self, qk: mx.array) -> mx.array:
        H = self.spec.num_heads
        return mx.concatenate([self["q_norm"](qk[:, :H]), self["k_norm"](qk[:, H:])], axis=1)

    def _gated(self, out: mx.array, x: mx.array) -> mx.array:
        """out [T, H * Dv] times a gate that the layer's input decides."""
        assert self.spec.gate is not None
        gate = self["gate_proj"](x)
        if self.spec.gate.activation == "softplus":
            gate = softplus(gate.astype(mx.float32)).astype(out.dtype)
        else:
            gate = mx.sigmoid(gate)
        if self.spec.gate.scope == "element":
            return out * gate
        T, H = gate.shape
        return (out.reshape(T, H, -1) * gate[:, :, None]).reshape(T, -1)


def _gate_width(gate: GateSpec, heads: int, out_width: int) -> int:
    return heads if gate.scope == "head" else out_width


def query_temperature(spec: TemperatureSpec, offset: int | mx.array, length: int) -> mx.array:
    """The factor of the queries at the next `length` positions, [L, 1]."""
    positions = mx.arange(length) + (offset if isinstance(offset, int) else offset[:, None, None])
    steps = mx.floor((positions + spec.shift) / spec.length)
    return (1 + spec.beta * mx.log1p(steps))[..., None]


def split_heads(x: mx.array, batch: int, dims: int) -> mx.array:
    """[T, N * D] -> [B, N, L, D]. One token needs no transpose."""
    rows, width = x.shape
    if rows == batch:
        return x.reshape(batch, width // dims, 1, dims)
    return x.reshape(batch, rows // batch, width // dims, dims).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """[B, N, L, D] -> [T, N * D]."""
    B, N, L, D = x.shape
    return (x if L == 1 else x.swapaxes(1, 2)).reshape(B * L, N * D)

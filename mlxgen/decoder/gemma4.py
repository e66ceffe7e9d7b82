"""The blocks of Gemma 4 that no other family has. Reference: transformers models/gemma4.

Shapes: B batch, L new tokens, S tokens seen, H query heads, K key/value heads, D head_dim, T = B * L rows, k = top_k.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.special import Gemma4AttentionSpec, Gemma4MoeSpec
from mlxgen.decoder.attention import merge_heads, split_heads
from mlxgen.decoder.mlp import MLP
from mlxgen.decoder.moe import Experts
from mlxgen.decoder.norm import WeightlessRMSNorm, build_norm
from mlxgen.decoder.rope import Rope
from mlxgen.decoder.router import Router
from mlxgen.protocols import LayerCache


class Gemma4Attention(nn.Module):
    """Attention with normalized values, which may be made from the keys, or be those of an earlier layer."""

    def __init__(self, spec: Gemma4AttentionSpec, hidden_size: int):
        super().__init__()
        assert spec.qk_norm is not None and spec.rope is not None
        D = spec.head_dim
        self.spec = spec
        self.q_proj = nn.Linear(hidden_size, spec.num_heads * D, bias=spec.qkv_bias)
        self.q_norm = build_norm(spec.qk_norm.norm, D)
        if spec.keys_of is None:
            self.k_proj = nn.Linear(hidden_size, spec.num_kv_heads * D, bias=spec.qkv_bias)
            self.k_norm = build_norm(spec.qk_norm.norm, D)
            self.v_norm = WeightlessRMSNorm(spec.norm.eps)
            if not spec.values_from_keys:
                self.v_proj = nn.Linear(hidden_size, spec.num_kv_heads * D, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * D, hidden_size, bias=spec.o_bias)
        self.rope = Rope(spec.rope, D)
        self.scale = spec.scale * self.rope.attention_scale

    def __call__(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        offset = cache.offset
        q = self.q_norm(split_heads(self.q_proj(x), batch, self.spec.head_dim))
        q = self.rope(q, offset, length)  # [B, H, L, D]
        k, v = (None, None) if self.spec.keys_of is not None else self._keys_and_values(x, batch, offset, length)
        return self.o_proj(merge_heads(cache.attend(q, k, v, mask, self.attend)))

    def _keys_and_values(
        self, x: mx.array, batch: int, offset: int | mx.array, length: int
    ) -> tuple[mx.array, mx.array]:
        """x [T, hidden] -> [B, K, L, D] twice."""
        k = split_heads(self.k_proj(x), batch, self.spec.head_dim)
        v = k if self.spec.values_from_keys else split_heads(self.v_proj(x), batch, self.spec.head_dim)
        return self.rope(self.k_norm(k), offset, length), self.v_norm(v)

    def attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        """q [B, H, L, D], keys and values [B, K, S, D] -> [B, H, L, D]."""
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=mask)


class Gemma4Router(nn.Module):
    """A router that normalizes its input, and weighs each expert by a learned number too."""

    def __init__(self, spec: Gemma4MoeSpec, hidden_size: int):
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=spec.norm.eps)
        self.choice = Router(spec.router, spec.num_experts, spec.top_k, hidden_size)
        self.expert_scale = mx.ones((spec.num_experts,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, hidden] -> (experts [T, k], weights [T, k])."""
        experts, weights = self.choice(self.norm(x))
        return experts, weights * self.expert_scale[experts]


class Gemma4MoE(nn.Module):
    """A dense block and a mixture of experts side by side, each with norms before and after."""

    def __init__(self, spec: Gemma4MoeSpec, hidden_size: int):
        super().__init__()
        self.dense = MLP(spec.dense, hidden_size)
        self.router = Gemma4Router(spec, hidden_size)
        self.experts = Experts(spec.expert, spec.num_experts, hidden_size)
        for name in ("dense_in_norm", "dense_out_norm", "expert_in_norm", "expert_out_norm"):
            self[name] = build_norm(spec.norm, hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, hidden], not yet normalized -> [T, hidden]."""
        dense = self["dense_out_norm"](self.dense(self["dense_in_norm"](x)))
        experts, weights = self.router(x)
        each = self.experts(self["expert_in_norm"](x)[:, None], experts)  # [T, k, hidden]
        routed = (each * weights[..., None].astype(x.dtype)).sum(axis=1)
        return dense + self["expert_out_norm"](routed)

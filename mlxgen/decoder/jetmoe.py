"""The blocks of JetMoE (arXiv:2404.07413): experts that make queries, and a bias behind each mixture.

Reference: transformers models/jetmoe. Shapes: B batch, L new tokens, K key/value heads, D head_dim, T = B * L rows,
k = top_k.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import MoeSpec
from mlxgen.blueprint.special import ExpertAttentionSpec
from mlxgen.decoder.attention import split_heads
from mlxgen.decoder.moe import ExpertLinear, MoE
from mlxgen.decoder.rope import Rope
from mlxgen.decoder.router import Router
from mlxgen.protocols import LayerCache


class ExpertAttention(nn.Module):
    """Each chosen expert has K query heads, one for each key head, and its own output projection."""

    def __init__(self, spec: ExpertAttentionSpec, hidden_size: int):
        super().__init__()
        assert spec.rope is not None
        self.spec = spec
        width = spec.num_kv_heads * spec.head_dim
        self.router = Router(spec.router, spec.num_experts, spec.top_k, hidden_size)
        self.input_linear = ExpertLinear(spec.num_experts, hidden_size, width, bias=False)
        self.output_linear = ExpertLinear(spec.num_experts, width, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.bias = mx.zeros((hidden_size,))
        self.rope = Rope(spec.rope, spec.head_dim)
        self.scale = spec.scale * self.rope.attention_scale

    def __call__(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        spec, K, D, rows = self.spec, self.spec.num_kv_heads, self.spec.head_dim, x.shape[0]
        experts, weights = self.router(x)
        q = self.input_linear(x[:, None, None], experts)  # [T, k, 1, K * D]
        q = q.reshape(rows, spec.top_k, K, D).swapaxes(1, 2).reshape(rows, -1)  # the heads of one key side by side
        q, k, v = (split_heads(y, batch, D) for y in (q, self.k_proj(x), self.v_proj(x)))
        q, k = self.rope(q, cache.offset, length), self.rope(k, cache.offset, length)
        out = cache.attend(q, k, v, mask, self.attend)  # [B, K * k, L, D]
        out = out.swapaxes(1, 2).reshape(rows, K, spec.top_k, D).swapaxes(1, 2).reshape(rows, spec.top_k, 1, K * D)
        out = self.output_linear(out, experts)[:, :, 0]  # [T, k, hidden]
        return (out * weights[..., None].astype(x.dtype)).sum(axis=1) + self.bias

    def attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        """q [B, K * k, L, D], keys and values [B, K, S, D] -> [B, K * k, L, D]."""
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=mask)


class BiasedMoE(MoE):
    """A mixture of experts with a bias that is added to its sum."""

    def __init__(self, spec: MoeSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        self.bias = mx.zeros((hidden_size,))

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) + self.bias

"""Lightning attention (arXiv:2401.04658): linear attention in which each head forgets at a fixed rate.

Shapes: B batch, L new tokens, T = B * L rows, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import LightningAttentionSpec
from mlxgen.decoder.activation import silu
from mlxgen.decoder.recurrent.decaying_attention import decaying_attention
from mlxgen.decoder.recurrent.gated_norm import GatedNorm
from mlxgen.decoder.recurrent.mixer import RecurrentMixer
from mlxgen.protocols import StateCache


class LightningAttention(RecurrentMixer):
    """project -> attend with decay -> norm and gate -> project. Rows of qkv_proj: q, k, v head by head."""

    def __init__(self, spec: LightningAttentionSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        width = spec.num_heads * spec.head_dim
        self.qkv_proj = nn.Linear(hidden_size, 3 * width, bias=False)
        self.output_gate = nn.Linear(hidden_size, width, bias=False)
        self.norm = GatedNorm(spec.norm, width, activation="sigmoid")
        self.out_proj = nn.Linear(width, hidden_size, bias=False)

    def mix(self, x: mx.array, batch: int, cache: StateCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        spec, T = self.spec, x.shape[0]
        H, D, L = spec.num_heads, spec.head_dim, T // batch
        qkv = silu(self["qkv_proj"](x)).astype(mx.float32).reshape(batch, L, H, 1, 3, D)
        q, k, v = (mx.moveaxis(qkv[..., i, :], 1, 3) for i in range(3))  # [B, H, 1, L, D]
        (state,) = cache.read() or (mx.zeros((batch, H, 1, D, D)),)
        decay = mx.power(2.0, mx.arange(1, H + 1) * (-8 / H)) * -spec.decay_scale
        y, state = decaying_attention(q, k, v, mx.broadcast_to(decay[:, None, None], (batch, H, 1, L)), state)
        cache.write((state,), L)
        y = mx.moveaxis(y[:, :, 0], 2, 1).reshape(T, H * D)
        return self["out_proj"](self["norm"](y, self["output_gate"](x)))

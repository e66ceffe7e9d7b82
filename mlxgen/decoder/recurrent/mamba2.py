"""Mamba-2 (arXiv:2405.21060): linear attention with a decay for each head, in the notation of state spaces.

Shapes: B batch, L new tokens, T = B * L rows, G groups, R heads of a group, N state dim, P head dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import Mamba2Spec
from mlxgen.decoder.activation import silu, softplus
from mlxgen.decoder.recurrent.causal_conv import CausalConv
from mlxgen.decoder.recurrent.decaying_attention import decaying_attention
from mlxgen.decoder.recurrent.gated_norm import GatedNorm
from mlxgen.decoder.recurrent.mixer import RecurrentMixer
from mlxgen.protocols import StateCache


class Mamba2(RecurrentMixer):
    """project -> convolve -> recurrence -> gate and norm -> project."""

    def __init__(self, spec: Mamba2Spec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.width, self.group_width = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_dim
        channels = self.width + 2 * self.group_width
        self.in_proj = nn.Linear(hidden_size, self.width + channels + spec.num_heads, bias=spec.bias)
        self.conv1d = CausalConv(channels, spec.conv_width, spec.conv_bias)
        self.A_log, self.D, self.dt_bias = (mx.zeros((spec.num_heads,)) for _ in range(3))
        if spec.norm is not None:
            self.norm = GatedNorm(spec.norm, self.width, groups=spec.num_groups, gate_first=spec.gate_first)
        self.out_proj = nn.Linear(self.width, hidden_size, bias=spec.out_bias)

    def mix(self, x: mx.array, batch: int, cache: StateCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        spec, T = self.spec, x.shape[0]
        G, R = spec.num_groups, spec.num_heads // spec.num_groups
        gate, xBC, steps = mx.split(self["in_proj"](x), [self.width, -spec.num_heads], axis=-1)
        tail, state = cache.read() or (None, mx.zeros((batch, G, R, spec.state_dim, spec.head_dim)))
        xBC, tail = self["conv1d"](xBC.reshape(batch, T // batch, -1), tail)
        inputs, k, q = mx.split(silu(xBC).astype(mx.float32), [self.width, -self.group_width], axis=-1)
        inputs = self._by_group(inputs, (G, R, spec.head_dim))
        k, q = (self._by_group(a, (G, 1, spec.state_dim)) for a in (k, q))
        steps = softplus(steps.astype(mx.float32) + self.dt_bias)
        if spec.step_limits != (0.0, float("inf")):
            steps = mx.clip(steps, *spec.step_limits)
        steps = self._by_group(steps.reshape(batch, T // batch, -1), (G, R, 1))  # [B, G, R, L, 1]
        rate = mx.exp(self.A_log.astype(mx.float32)).reshape(G, R, 1)
        y, state = decaying_attention(q, k, inputs * steps, -rate * steps[..., 0], state)
        cache.write((tail, state), T // batch)
        y = y + inputs * self.D.reshape(G, R, 1, 1)
        y = mx.moveaxis(y, 3, 1).reshape(T, self.width)
        y = self["norm"](y, gate) if "norm" in self else y.astype(gate.dtype) * silu(gate)
        return self["out_proj"](y)

    @staticmethod
    def _by_group(x: mx.array, shape: tuple[int, int, int]) -> mx.array:
        """[B, L, G * R * D] -> [B, G, R, L, D]."""
        return mx.moveaxis(x.reshape(*x.shape[:2], *shape), 1, 3)

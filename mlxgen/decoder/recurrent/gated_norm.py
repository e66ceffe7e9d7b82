"""A norm together with a gate, in float32."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import NormSpec
from mlxgen.decoder.activation import silu


class GatedNorm(nn.Module):
    """norm(x) * act(gate), or norm(x * act(gate)) with `gate_first`; the norm runs over groups of the last axis."""

    def __init__(
        self, spec: NormSpec, dims: int, *, groups: int = 1, gate_first: bool = False, activation: str = "silu"
    ):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps, self.groups, self.gate_first = spec.eps, groups, gate_first
        self.activation = silu if activation == "silu" else mx.sigmoid

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        """x and gate [..., dims] -> [..., dims], of the gate's dtype."""
        dtype = gate.dtype
        x, gate = x.astype(mx.float32), self.activation(gate.astype(mx.float32))
        if self.gate_first:
            x = x * gate
        if self.groups == 1:
            y = mx.fast.rms_norm(x, self.weight.astype(mx.float32), self.eps)
        else:
            grouped = x.reshape(*x.shape[:-1], self.groups, -1)
            y = mx.fast.rms_norm(grouped, None, self.eps).reshape(x.shape) * self.weight
        return (y if self.gate_first else y * gate).astype(dtype)

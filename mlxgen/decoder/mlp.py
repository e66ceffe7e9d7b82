"""The feed-forward block of a layer."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import MlpSpec
from mlxgen.decoder.activation import ACTIVATIONS


class MLP(nn.Module):
    """down(act(gate x) * up x) when gated (arXiv:2002.05202), else down(act(up x)).

    `passes.fuse_projections` may replace gate_proj and up_proj by one gate_up_proj with the rows of both.
    """

    def __init__(self, spec: MlpSpec, hidden_size: int):
        super().__init__()
        if spec.gated:
            self.gate_proj = nn.Linear(hidden_size, spec.width, bias=spec.bias)
        self.up_proj = nn.Linear(hidden_size, spec.width, bias=spec.bias)
        self.down_proj = nn.Linear(spec.width, hidden_size, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]
        self.gated = spec.gated
        self.fused = False

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        if not self.gated:
            return self.down_proj(self.activation(self.up_proj(x)))
        if self.fused:
            gate, up = mx.split(self["gate_up_proj"](x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self["down_proj"](self.activation(gate) * up)

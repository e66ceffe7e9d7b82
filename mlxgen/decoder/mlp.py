"""The feed-forward block of a layer."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import MlpSpec
from mlxgen.decoder.activation import build_activation


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
        self.activation = build_activation(spec.activation)
        self.spec = spec
        self.fused = False

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        gate = None
        if self.fused:
            gate, up = self["gate_up_proj"].parts(x)
        else:
            up = self["up_proj"](x)
            if self.spec.gated:
                gate = self["gate_proj"](x)
        return self.project_down(combine(self.spec, self.activation, gate, up))

    def project_down(self, x: mx.array) -> mx.array:
        """[T, width] -> [T, hidden]."""
        return self["down_proj"](x)


def combine(
    spec: MlpSpec, activation: Callable[[mx.array], mx.array], gate: mx.array | None, up: mx.array
) -> mx.array:
    """What goes into the down projection."""
    if gate is None:
        return activation(up)
    if spec.clamp is None:
        return activation(gate) * up
    gate, up = mx.minimum(gate, spec.clamp.limit), mx.clip(up, -spec.clamp.limit, spec.clamp.limit)
    return gate * mx.sigmoid(spec.clamp.alpha * gate) * (up + 1)

"""Mamba (arXiv:2312.00752): a selective state space for each channel.

Shapes: B batch, L new tokens, T = B * L rows, W channels, N state dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import MambaSpec
from mlxgen.decoder.activation import silu, softplus
from mlxgen.decoder.norm import build_norm
from mlxgen.decoder.recurrent.causal_conv import CausalConv
from mlxgen.decoder.recurrent.linear_scan import CHUNK, linear_scan
from mlxgen.decoder.recurrent.mixer import RecurrentMixer
from mlxgen.protocols import StateCache


class Mamba(RecurrentMixer):
    """project -> convolve -> selective scan -> gate -> project."""

    def __init__(self, spec: MambaSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        self.in_proj = nn.Linear(hidden_size, 2 * spec.width, bias=spec.bias)
        self.conv1d = CausalConv(spec.width, spec.conv_width, spec.conv_bias)
        self.x_proj = nn.Linear(spec.width, spec.rank + 2 * spec.state_dim, bias=False)
        self.dt_proj = nn.Linear(spec.rank, spec.width, bias=True)
        if spec.norm is not None:
            self.dt_norm = build_norm(spec.norm, spec.rank)
            self.b_norm, self.c_norm = (build_norm(spec.norm, spec.state_dim) for _ in range(2))
        self.A_log = mx.zeros((spec.width, spec.state_dim))
        self.D = mx.zeros((spec.width,))
        self.out_proj = nn.Linear(spec.width, hidden_size, bias=spec.bias)

    def mix(self, x: mx.array, batch: int, cache: StateCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        spec, T = self.spec, x.shape[0]
        inputs, gate = mx.split(self["in_proj"](x), 2, axis=-1)
        tail, state = cache.read() or (None, mx.zeros((batch, spec.width, spec.state_dim)))
        inputs, tail = self["conv1d"](inputs.reshape(batch, T // batch, -1), tail)
        inputs = silu(inputs)
        steps, B, C = mx.split(self["x_proj"](inputs), [spec.rank, -spec.state_dim], axis=-1)
        if spec.norm is not None:
            steps, B, C = self["dt_norm"](steps), self["b_norm"](B), self["c_norm"](C)
        steps = softplus(self["dt_proj"](steps).astype(mx.float32))
        y, state = self._scan(inputs, steps, B, C, state)
        cache.write((tail, state), T // batch)
        y = (y + inputs * self.D).astype(gate.dtype).reshape(T, -1)
        return self["out_proj"](y * silu(gate))

    def _scan(
        self, x: mx.array, steps: mx.array, B: mx.array, C: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """x and steps [B, L, W], B and C [B, L, N], state [B, W, N] -> (y [B, L, W], state), float32.

        A chunk at a time, as the states of all tokens are N times as large as x.
        """
        rate = -mx.exp(self.A_log.astype(mx.float32))
        outputs = []
        for start in range(0, x.shape[1], CHUNK):
            x_, d, b, c = (a[:, start : start + CHUNK].astype(mx.float32) for a in (x, steps, B, C))
            added = (d * x_)[..., None] * b[:, :, None, :]
            states, state = linear_scan(mx.exp(d[..., None] * rate), added, state)
            outputs.append((states @ c[..., None])[..., 0])
        return mx.concatenate(outputs, axis=1), state

"""The recurrent block of Griffin (arXiv:2402.19427): a real-gated linear recurrent unit.

Shapes: B batch, L new tokens, T = B * L rows, W channels.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import RgLruSpec
from mlxgen.decoder.activation import build_activation, softplus
from mlxgen.decoder.recurrent.causal_conv import CausalConv
from mlxgen.decoder.recurrent.linear_scan import linear_scan
from mlxgen.decoder.recurrent.mixer import RecurrentMixer
from mlxgen.protocols import StateCache

_SHARPNESS = 8.0  # the paper's constant c


class RgLru(RecurrentMixer):
    """out(act(y) * recurrence(conv(x))), with x and y projected from the layer's input."""

    def __init__(self, spec: RgLruSpec, hidden_size: int):
        super().__init__()
        self.linear_x = nn.Linear(hidden_size, spec.width)
        self.linear_y = nn.Linear(hidden_size, spec.width)
        self.conv1d = CausalConv(spec.width, spec.conv_width, bias=True)
        self.rg_lru = Recurrence(spec.width, spec.num_blocks)
        self.linear_out = nn.Linear(spec.width, hidden_size)
        self.activation = build_activation(spec.activation)

    def mix(self, x: mx.array, batch: int, cache: StateCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        T = x.shape[0]
        beside = self.activation(self["linear_y"](x))
        tail, state = cache.read() or (None, None)
        inputs, tail = self["conv1d"](self["linear_x"](x).reshape(batch, T // batch, -1), tail)
        y, state = self["rg_lru"](inputs, state)
        cache.write((tail, state), T // batch)
        return self["linear_out"](y.astype(x.dtype).reshape(T, -1) * beside)


class Recurrence(nn.Module):
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t * x_t), with a_t = exp(-c softplus(p) r_t); i and r are gates of x."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        dims = width // blocks
        self.input_gate_weight = mx.zeros((blocks, dims, dims))  # [block, in, out]
        self.input_gate_bias = mx.zeros((blocks, dims))
        self.recurrent_gate_weight = mx.zeros((blocks, dims, dims))
        self.recurrent_gate_bias = mx.zeros((blocks, dims))
        self.recurrent_param = mx.zeros((width,))

    def __call__(self, x: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
        """x [B, L, W], state [B, W] (None at the beginning) -> (h [B, L, W], state), float32."""
        B, L, W = x.shape
        blocks = x.reshape(B, L, self.input_gate_weight.shape[0], 1, -1)
        input_gate = mx.sigmoid((blocks @ self.input_gate_weight)[..., 0, :] + self.input_gate_bias)
        recurrent_gate = mx.sigmoid((blocks @ self.recurrent_gate_weight)[..., 0, :] + self.recurrent_gate_bias)
        rate = softplus(self.recurrent_param.astype(mx.float32)) * -_SHARPNESS
        log_a = recurrent_gate.reshape(B, L, W).astype(mx.float32) * rate
        scale = mx.sqrt(-mx.expm1(2 * log_a))
        if state is None:  # the very first input enters as it is
            state = mx.zeros((B, W))
            scale = mx.concatenate([mx.ones((B, 1, W)), scale[:, 1:]], axis=1)
        inputs = (x * input_gate.reshape(B, L, W)).astype(mx.float32) * scale
        return linear_scan(mx.exp(log_a), inputs, state)

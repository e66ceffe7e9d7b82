"""LFM2's short convolution: no memory but the last tokens themselves.

Shapes: B batch, L new tokens, T = B * L rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import ShortConvSpec
from mlxgen.decoder.recurrent.causal_conv import CausalConv
from mlxgen.decoder.recurrent.mixer import RecurrentMixer
from mlxgen.protocols import StateCache


class ShortConv(RecurrentMixer):
    """out(C * conv(B * x)), with B, C and x projected from the layer's input."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int):
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=spec.bias)
        self.conv1d = CausalConv(hidden_size, spec.conv_width, spec.bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=spec.bias)

    def mix(self, x: mx.array, batch: int, cache: StateCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        T = x.shape[0]
        B, C, inputs = mx.split(self["in_proj"](x), 3, axis=-1)
        (tail,) = cache.read() or (None,)
        y, tail = self["conv1d"]((B * inputs).reshape(batch, T // batch, -1), tail)
        cache.write((tail,), T // batch)
        return self["out_proj"](C * y.reshape(T, -1))

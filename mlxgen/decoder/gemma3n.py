"""The layers of Gemma 3n: alternating updates of several streams (AltUp, arXiv:2301.13310) and residual branches of low
rank (LAuReL, arXiv:2411.07501). Reference: transformers models/gemma3n.

Shapes: B batch, L tokens, T = B * L rows, N streams.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import AltUpSpec, LayerSpec
from mlxgen.decoder.layer import DecoderLayer
from mlxgen.decoder.norm import build_norm
from mlxgen.protocols import LayerCache


class Streams(nn.Module):
    """The way from one stream to N, and back: each of the others is a map of the first one, of the same magnitude."""

    def __init__(self, spec: AltUpSpec, hidden_size: int):
        super().__init__()
        self.into = [nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(spec.streams - 1)]
        self.out = [nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(spec.streams - 1)]

    def split(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, N, hidden]."""
        return mx.stack([x, *(_as_large_as(x, project(x)) for project in self.into)], axis=1)

    def merge(self, x: mx.array) -> mx.array:
        """x [T, N, hidden] -> [T, hidden]."""
        first = x[:, 0]
        others = [_as_large_as(first, project(x[:, i])) for i, project in enumerate(self.out, 1)]
        return mx.stack([first, *others], axis=1).mean(axis=1)


def _as_large_as(x: mx.array, y: mx.array) -> mx.array:
    """y with the root mean square of x."""
    target = mx.sqrt(mx.square(x).mean(axis=-1, keepdims=True))
    return y * target / mx.sqrt(mx.maximum(mx.square(y).mean(axis=-1, keepdims=True), 1e-5))


class AltUp(nn.Module):
    """What a layer makes of the streams that it does not compute: a prediction before, a correction after."""

    def __init__(self, spec: AltUpSpec, hidden_size: int):
        super().__init__()
        N = spec.streams
        self.active = spec.active
        self.router_norm = build_norm(spec.norm, hidden_size)
        self.modality_router = nn.Linear(hidden_size, N, bias=False)
        self.prediction_coefs = nn.Linear(N, N * N, bias=False)
        self.correction_coefs = nn.Linear(N, N, bias=False)
        self.correct_output_scale = mx.zeros((hidden_size,))

    def predict(self, x: mx.array) -> mx.array:
        """x [T, N, hidden] -> the streams as mixtures of each other."""
        T, N, _ = x.shape
        coefficients = self.prediction_coefs(self._modalities(x[:, self.active])).reshape(T, N, N)
        return x + coefficients @ x

    def correct(self, predicted: mx.array, computed: mx.array) -> mx.array:
        """predicted [T, N, hidden], the active stream as the layer computed it [T, hidden] -> [T, N, hidden]."""
        coefficients = self.correction_coefs(self._modalities(computed)) + 1
        return predicted + coefficients[..., None] * (computed - predicted[:, self.active])[:, None]

    def _modalities(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, N]."""
        routed = self.modality_router(self.router_norm(x) * (1 / x.shape[-1]))
        return mx.tanh(routed.astype(mx.float32)).astype(x.dtype)


class Laurel(nn.Module):
    """x + norm(R L x), a residual branch of low rank."""

    def __init__(self, spec: AltUpSpec, hidden_size: int):
        super().__init__()
        self.linear_left = nn.Linear(hidden_size, spec.laurel_rank, bias=False)
        self.linear_right = nn.Linear(spec.laurel_rank, hidden_size, bias=False)
        self.norm = build_norm(spec.norm, hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.norm(self.linear_right(self.linear_left(x)))


class AltUpLayer(DecoderLayer):
    """A layer that computes one of N streams and corrects the others by it."""

    def __init__(self, spec: LayerSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        assert spec.altup is not None
        self.altup = AltUp(spec.altup, hidden_size)
        self.laurel = Laurel(spec.altup, hidden_size)
        self.active, self.scales_output = spec.altup.active, spec.altup.scaled

    def __call__(
        self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int, layer_input: mx.array | None = None
    ) -> mx.array:
        """x [T, N, hidden] -> [T, N, hidden]."""
        predicted = self.altup.predict(x)
        active = predicted[:, self.active]
        h = self["attn_in_norm"](active)
        attended = self._add(active, h, self._mixed(h, batch, cache, mask, length), "attn")
        y = (attended + self.laurel(h)) * math.sqrt(0.5)
        h = self["mlp_in_norm"](y)
        y = self.altup.correct(predicted, self._add(y, h, self["mlp"](h), "mlp"))
        if layer_input is None:
            return y
        first = y[:, self.active]
        first = first * self.altup.correct_output_scale if self.scales_output else first
        extra = self["layer_input"](first, layer_input)[:, None]
        return mx.concatenate([y[:, :1], y[:, 1:] + extra], axis=1)

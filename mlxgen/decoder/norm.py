"""Normalization of hidden states: root mean square (arXiv:1910.07467) and layer norm (arXiv:1607.06450)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import NormSpec


class WeightlessRMSNorm(nn.Module):
    """x / rms(x), without a learned weight."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, self.eps)


class PerHeadNorm(nn.Module):
    """A norm over each head with a weight of its own for each: x [B, N, L, D]."""

    def __init__(self, spec: NormSpec, heads: int, dims: int):
        super().__init__()
        self.spec = spec
        self.weight = mx.ones((heads, dims))

    def __call__(self, x: mx.array) -> mx.array:
        if self.spec.kind == "layer":
            y = mx.fast.layer_norm(x, None, None, self.spec.eps)
        else:
            y = mx.fast.rms_norm(x, None, self.spec.eps)
        return y * self.weight[:, None]


def build_norm(spec: NormSpec | None, dims: int) -> nn.Module:
    """The norm over the last axis of `dims` elements; no spec is the identity."""
    if spec is None:
        return nn.Identity()
    if spec.kind == "layer":
        return nn.LayerNorm(dims, eps=spec.eps, affine=spec.weight, bias=spec.bias)
    return nn.RMSNorm(dims, eps=spec.eps) if spec.weight else WeightlessRMSNorm(spec.eps)

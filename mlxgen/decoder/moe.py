"""Mixture of experts: a router picks `top_k` feed-forward blocks for each token (arXiv:1701.06538).

Shapes: T tokens, E experts, k = top_k.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import MlpSpec, MoeSpec
from mlxgen.decoder.activation import build_activation
from mlxgen.decoder.mlp import MLP, combine
from mlxgen.decoder.router import Router

# From this many rows on, tokens are sorted by expert: each expert's weights are then read once.
_SORT_FROM = 64


class ExpertLinear(nn.Module):
    """E linear maps in one array: row i of the input goes through map `experts[i]`."""

    def __init__(self, num_experts: int, input_dims: int, output_dims: int, bias: bool):
        super().__init__()
        bound = math.sqrt(1 / input_dims)
        self.weight = mx.random.uniform(-bound, bound, (num_experts, output_dims, input_dims))
        if bias:
            self.bias = mx.zeros((num_experts, output_dims))

    def __call__(self, x: mx.array, experts: mx.array, rows: mx.array | None = None) -> mx.array:
        """x [..., 1, in], experts [...] -> [..., 1, out]. rows: if sorted by expert, the tokens they are of."""
        y = mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=rows is not None)
        return y + self.bias[experts][..., None, :] if "bias" in self else y

    def to_quantized(self, group_size: int = 64, bits: int = 4, mode: str = "affine") -> QuantizedExpertLinear:
        return QuantizedExpertLinear.from_linear(self, group_size, bits, mode)


class QuantizedExpertLinear(nn.Module):
    """ExpertLinear with weights in MLX's quantized form."""

    def __init__(self, group_size: int, bits: int, mode: str):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode

    @classmethod
    def from_linear(cls, linear: ExpertLinear, group_size: int, bits: int, mode: str) -> QuantizedExpertLinear:
        self = cls(group_size, bits, mode)
        self.weight, self.scales, *biases = mx.quantize(linear.weight, group_size, bits, mode=mode)
        if biases:
            self.biases = biases[0]
        if "bias" in linear:
            self.bias = linear.bias
        return self

    def __call__(self, x: mx.array, experts: mx.array, rows: mx.array | None = None) -> mx.array:
        y = mx.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            rhs_indices=experts,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=rows is not None,
        )
        return y + self["bias"][experts][..., None, :] if "bias" in self else y


class Experts(nn.Module):
    """The feed-forward blocks of all experts."""

    def __init__(self, spec: MlpSpec, num_experts: int, hidden_size: int):
        super().__init__()
        if spec.gated:
            self.gate_proj = ExpertLinear(num_experts, hidden_size, spec.width, spec.bias)
        self.up_proj = ExpertLinear(num_experts, hidden_size, spec.width, spec.bias)
        self.down_proj = ExpertLinear(num_experts, spec.width, hidden_size, spec.bias)
        self.activation = build_activation(spec.activation)
        self.spec = spec

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [T, 1 or k, hidden], experts [T, k] -> each token through each of its experts [T, k, hidden].

        With k inputs per token, each expert gets its own.
        """
        T, k = experts.shape
        if T * k < _SORT_FROM:
            return self._forward(x[:, :, None], experts, None)[:, :, 0]
        order = mx.argsort(experts.flatten())
        rows = x.reshape(-1, x.shape[-1])[order * x.shape[1] // k][:, None]  # [T * k, 1, hidden], by expert
        y = self._forward(rows, experts.flatten()[order], order // k)[:, 0]
        return y[mx.argsort(order)].reshape(T, k, -1)

    def _forward(self, x: mx.array, experts: mx.array, rows: mx.array | None = None) -> mx.array:
        up = self.up_proj(x, experts, rows)
        gate = self.gate_proj(x, experts, rows) if self.spec.gated else None
        return self.down_proj(combine(self.spec, self.activation, gate, up), experts, rows)


class MoE(nn.Module):
    """The weighted sum of the chosen experts, plus an expert that every token passes through, where there is one."""

    def __init__(self, spec: MoeSpec, hidden_size: int):
        super().__init__()
        self.router = Router(spec.router, spec.num_experts, spec.top_k, hidden_size)
        self.experts = Experts(spec.expert, spec.num_experts, hidden_size)
        if spec.shared is not None:
            self.shared_expert = MLP(spec.shared, hidden_size)
        if spec.shared_gate:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)
        self.spec = spec

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        experts, weights = self.router(x)
        weights = weights[..., None].astype(x.dtype)
        if self.spec.router.on_input:
            y = self.experts(x[:, None] * weights, experts).sum(axis=1)
        else:
            y = (self.experts(x[:, None], experts) * weights).sum(axis=1)
        if self.spec.shared is not None:
            shared = self.shared_expert(x)
            y = y + (mx.sigmoid(self.shared_expert_gate(x)) * shared if self.spec.shared_gate else shared)
        return y

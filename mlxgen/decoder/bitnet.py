"""BitNet b1.58 (arXiv:2402.17764): weights of -1, 0 and 1 times a scale, and norms before the last projections.

Reference: transformers models/bitnet and integrations/bitnet.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.special import BitNetAttentionSpec, BitNetMlpSpec
from mlxgen.decoder.attention import Attention
from mlxgen.decoder.mlp import MLP
from mlxgen.decoder.norm import build_norm


class RoundedLinear(nn.Linear):
    """A linear map of what is left of its input in 8 bits: whole multiples of the row's largest element / 127.

    weights: what is left of the weights, too, is -1, 0 or 1 times their mean magnitude.
    """

    def __init__(self, input_dims: int, output_dims: int, bias: bool, weights: bool):
        super().__init__(input_dims, output_dims, bias)
        self.weights = weights

    def __call__(self, x: mx.array) -> mx.array:
        scale = 127 / mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), 1e-5).astype(mx.float32)
        x = (mx.clip(mx.round(x * scale), -128, 127) / scale).astype(x.dtype)
        y = x @ (ternary(self["weight"]) if self.weights else self["weight"]).T
        return y + self["bias"] if "bias" in self else y


def ternary(weight: mx.array) -> mx.array:
    """The nearest of -1, 0 and 1 times the mean magnitude, for each weight."""
    scale = mx.maximum(mx.abs(weight.astype(mx.float32)).mean(), 1e-5)
    return (mx.clip(mx.round(weight / scale), -1, 1) * scale).astype(weight.dtype)


class BitNetAttention(Attention):
    """Attention whose heads' results are normalized together before the output projection."""

    def __init__(self, spec: BitNetAttentionSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        self.out_norm = build_norm(spec.norm, spec.num_heads * spec.value_dim)
        _round(self, spec.rounding)

    def project_out(self, out: mx.array) -> mx.array:
        return super().project_out(self["out_norm"](out))


class BitNetMLP(MLP):
    """A feed-forward block that is normalized before the down projection."""

    def __init__(self, spec: BitNetMlpSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        self.down_norm = build_norm(spec.norm, spec.width)
        _round(self, spec.rounding)

    def project_down(self, x: mx.array) -> mx.array:
        return super().project_down(self["down_norm"](x))


def _round(block: nn.Module, rounding: str) -> None:
    for name, module in list(block.items()):
        if isinstance(module, nn.Linear) and rounding != "none":
            out, into = module.weight.shape
            block[name] = RoundedLinear(into, out, bias="bias" in module, weights=rounding == "weights")

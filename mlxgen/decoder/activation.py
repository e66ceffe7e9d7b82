"""Activation functions, under the names of the specs."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

# Plain operations, not mlx.nn's compiled ones: on a CPU mx.compile calls the system's C++ compiler while it runs.


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x), arXiv:1606.08415."""
    return x * mx.sigmoid(x)


def gelu(x: mx.array) -> mx.array:
    """x times the normal distribution's cumulative function, arXiv:1606.08415."""
    return x * (1 + mx.erf(x * (1 / math.sqrt(2)))) * 0.5


def gelu_tanh(x: mx.array) -> mx.array:
    """The tanh approximation of GELU, arXiv:1606.08415 section 2."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def softplus(x: mx.array) -> mx.array:
    """ln(1 + e^x)."""
    return mx.logaddexp(x, 0.0)


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def relu2(x: mx.array) -> mx.array:
    """relu squared, arXiv:2109.08668."""
    return mx.square(mx.maximum(x, 0))


class XIELU(nn.Module):
    """A learned activation, arXiv:2411.13010: quadratic above 0, exponential below. Reference: Apertus."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = mx.zeros((1,)), mx.zeros((1,))
        self.beta, self.eps = mx.array(0.5), mx.array(-1e-6)

    def __call__(self, x: mx.array) -> mx.array:
        a_p = mx.logaddexp(self.alpha_p, 0.0)  # softplus
        a_n = self.beta + mx.logaddexp(self.alpha_n, 0.0)
        below = (mx.expm1(mx.minimum(x, self.eps)) - x) * a_n
        return mx.where(x > 0, a_p * x * x, below) + self.beta * x


def build_activation(name: str) -> Callable[[mx.array], mx.array]:
    """The function of this name; a learned one is a new module."""
    return XIELU() if name == "xielu" else ACTIVATIONS[name]


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}

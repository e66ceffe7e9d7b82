"""Activation functions, under the names of the specs."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

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


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def relu2(x: mx.array) -> mx.array:
    """relu squared, arXiv:2109.08668."""
    return mx.square(mx.maximum(x, 0))


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}

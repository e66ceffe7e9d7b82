"""Stages that sharpen or flatten the distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxgen.errors import require
from mlxgen.sampler.select import row_sum, weights
from mlxgen.sampler.stage import Context, Stage

# Below this a draw is the most likely token for any logits that differ; dividing by it would only overflow.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True)
class Temperature(Stage):
    """Logits divided by the temperature. 0 (in fact all below 1e-5): the most likely token, no draw."""

    temperature: float

    name: ClassVar[str] = "temperature"
    main: ClassVar[str] = "temperature"
    rank: ClassVar[int] = 110
    keeps_argmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.temperature < math.inf, "temperature", "a finite number >= 0", self.temperature)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.temperature == 1

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        return logits / self.temperature


@dataclass(frozen=True, kw_only=True)
class DynamicTemperature(Stage):
    """A temperature that grows with the entropy H of the tokens left, from T - range (>= 0) to T + range:

        low + (high - low) * (H / log(number of tokens left)) ** exponent

    It runs in the place of `temperature`, whose value is T; T = 0 is greedy. As in llama.cpp.
    """

    range: float
    exponent: float = 1.0
    temperature: float = 1.0

    name: ClassVar[str] = "dynamic_temperature"
    main: ClassVar[str] = "range"
    rank: ClassVar[int] = 100
    absorbs: ClassVar[str] = "temperature"
    keeps_argmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.range < math.inf, "range", "a finite number >= 0", self.range)
        require(0 <= self.exponent < math.inf, "exponent", "a finite number >= 0", self.exponent)
        require(0 <= self.temperature < math.inf, "temperature", "a finite number >= 0", self.temperature)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.range == 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        mass = weights(logits)
        total = row_sum(mass)
        top = logits.max(axis=-1, keepdims=True)
        entropy = mx.log(total) + row_sum(mx.where(mass > 0, mass * (top - logits), 0)) / total
        left = (logits > -mx.inf).sum(axis=-1, keepdims=True).astype(mx.float32)
        # One token left: H and log(left) are 0, and any temperature will do.
        disorder = mx.clip(entropy / mx.log(mx.maximum(left, 2.0)), 0.0, 1.0)
        low = mx.maximum(mx.array(self.temperature) - self.range, GREEDY_BELOW)
        high = mx.array(self.temperature) + self.range
        return (logits - top) / (low + (high - low) * disorder**self.exponent)

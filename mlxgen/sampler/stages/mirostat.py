"""Mirostat 2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxgen.errors import require
from mlxgen.sampler.select import LOG2_E, drop, row_sum, weights
from mlxgen.sampler.stage import Context, Stage


@dataclass(frozen=True, kw_only=True)
class Mirostat(Stage):
    """Keeps the surprise of drawn tokens near tau bits: drops tokens above mu bits, moves mu at rate eta.

    Memory: mu, 2 tau at first. The surprise is measured in the distribution that the token was drawn from.
    The most likely token always stays. Version 2 of Basu et al. 2020, arXiv 2007.14966. tau = 0: off.
    """

    tau: float
    eta: float = 0.1

    name: ClassVar[str] = "mirostat"
    main: ClassVar[str] = "tau"
    rank: ClassVar[int] = 120
    keeps_argmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.tau < math.inf, "tau", "a finite number >= 0 (0: off)", self.tau)
        require(0 <= self.eta <= 1, "eta", "in [0, 1]", self.eta)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.tau == 0

    def start(self) -> tuple[float, ...]:
        return (2 * self.tau,)

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        surprise = _bits(logits, logits)
        return drop(logits, (surprise <= context.memory) | (logits >= logits.max(axis=-1, keepdims=True)))

    def update(self, memory: mx.array, logits: mx.array, tokens: mx.array) -> mx.array:
        drawn = mx.take_along_axis(logits, tokens[:, None], axis=-1)
        return memory - self.eta * (_bits(drawn, logits) - self.tau)


def _bits(some: mx.array, logits: mx.array) -> mx.array:
    """The surprise -log2 p of `some` of the logits, in the softmax of all."""
    return mx.log2(row_sum(weights(logits))) + (logits.max(axis=-1, keepdims=True) - some) * LOG2_E

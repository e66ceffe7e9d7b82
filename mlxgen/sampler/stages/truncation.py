"""Stages that drop unlikely tokens. All keep the most likely token, but for typical sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxgen.errors import require
from mlxgen.sampler.select import SHARE, drop, largest, leading, row_sum, weights
from mlxgen.sampler.stage import Context, Stage


@dataclass(frozen=True, kw_only=True)
class TopK(Stage):
    """The k most likely tokens; of equal ones the lowest ids. 0, or the vocabulary size and more: all.

    Fan et al. 2018, arXiv 1805.04833.
    """

    k: int

    name: ClassVar[str] = "top_k"
    main: ClassVar[str] = "k"
    rank: ClassVar[int] = 50
    keeps_argmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.k >= 0, "k", ">= 0 (0: off)", self.k)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.k == 0 or (vocab_size is not None and self.k >= vocab_size)

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        size = logits.shape[-1]
        if isinstance(self.k, mx.array):
            count = mx.where(self.k > 0, self.k, size)
            return drop(logits, leading(mx.ones_like(logits), count, score=logits))
        return drop(logits, largest(logits, self.k)) if 0 < self.k < size else logits


@dataclass(frozen=True, kw_only=True)
class TopP(Stage):
    """The fewest most likely tokens whose probabilities sum to p; of equal ones the lowest ids.

    p = 0 keeps one token. Nucleus sampling: Holtzman et al. 2019, arXiv 1904.09751.
    """

    p: float

    name: ClassVar[str] = "top_p"
    main: ClassVar[str] = "p"
    rank: ClassVar[int] = 70
    keeps_argmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.p <= 1, "p", "in [0, 1]", self.p)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.p == 1

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        mass = weights(logits)
        return drop(logits, leading(mass, _share(mass, self.p)))


@dataclass(frozen=True, kw_only=True)
class MinP(Stage):
    """Tokens with at least p times the probability of the most likely one. p = 1 keeps only its equals.

    Nguyen et al. 2024, arXiv 2407.01082.
    """

    p: float

    name: ClassVar[str] = "min_p"
    main: ClassVar[str] = "p"
    rank: ClassVar[int] = 80
    keeps_argmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.p <= 1, "p", "in [0, 1]", self.p)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.p == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        floor = mx.log(mx.array(self.p, dtype=mx.float32))
        return drop(logits, logits >= logits.max(axis=-1, keepdims=True) + floor)


@dataclass(frozen=True, kw_only=True)
class TypicalP(Stage):
    """The fewest tokens whose surprise is nearest to the entropy and whose probabilities sum to p.

    It may drop the most likely token. Meister et al. 2022, arXiv 2202.00666.
    """

    p: float

    name: ClassVar[str] = "typical_p"
    main: ClassVar[str] = "p"
    rank: ClassVar[int] = 60

    def __post_init__(self) -> None:
        require(0 <= self.p <= 1, "p", "in [0, 1]", self.p)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.p == 1

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        mass = weights(logits)
        total = row_sum(mass)
        surprise = logits.max(axis=-1, keepdims=True) + mx.log(total) - logits
        entropy = row_sum(mx.where(mass > 0, mass * surprise, 0)) / total
        return drop(logits, leading(mass, _share(mass, self.p), score=-mx.abs(surprise - entropy)))


@dataclass(frozen=True, kw_only=True)
class TopNSigma(Stage):
    """Tokens whose logit is at most n standard deviations below the largest. Dropped logits don't count.

    The set does not depend on the temperature. Tang et al. 2024, arXiv 2411.07641. 0: off.
    """

    n: float

    name: ClassVar[str] = "top_n_sigma"
    main: ClassVar[str] = "n"
    rank: ClassVar[int] = 40
    keeps_argmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.n < math.inf, "n", ">= 0 (0: off)", self.n)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.n == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        top = logits.max(axis=-1, keepdims=True)
        there = logits > -mx.inf
        count = there.sum(axis=-1, keepdims=True)
        below = mx.where(there, top - logits, 0)
        mean = row_sum(below) / count
        variance = row_sum(mx.where(there, mx.square(below - mean), 0)) / count
        return drop(logits, below <= self.n * mx.sqrt(variance))


def _share(mass: mx.array, p: float) -> mx.array:
    """The mass [B, 1] that makes up a share p, > 0 also for p = 0."""
    return mx.maximum(p * (row_sum(mass) * SHARE), 1e-30)

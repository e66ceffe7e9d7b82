"""Learning rates over a run: a factor of the peak for each update, plain numbers.

Steps count optimizer updates from 0. A warm-up rises from 0 at step 0 to the peak at step `warmup`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxgen.errors import require


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """warmup: updates; below 1 a share of all. end: what is left at the end, as a share of the peak."""

    warmup: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        require(self.warmup >= 0, "warmup", "at least 0", self.warmup)
        require(self.end >= 0, "end", "at least 0", self.end)

    def __call__(self, step: int, total: int) -> float:
        """The factor at update `step` of `total`."""
        warmup = round(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        if step < warmup:
            return step / warmup
        return self.after(min((step - warmup) / max(total - warmup, 1), 1.0))

    def after(self, progress: float) -> float:
        """The factor after the warm-up; progress goes from 0 to 1."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    def after(self, progress: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    def after(self, progress: float) -> float:
        return 1 + (self.end - 1) * progress


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine (arXiv:1608.03983)."""

    def after(self, progress: float) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Schedule):
    """The peak, then a straight line down over the last `decay` of the run (arXiv:2404.06395 section 4)."""

    decay: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.decay <= 1, "decay", "in (0, 1]", self.decay)

    def after(self, progress: float) -> float:
        return 1 + (self.end - 1) * max(progress - (1 - self.decay), 0.0) / self.decay

"""Exclude top choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxgen.errors import require
from mlxgen.sampler.select import row_sum, weights
from mlxgen.sampler.stage import Context, Stage


@dataclass(frozen=True, kw_only=True)
class Xtc(Stage):
    """With the given probability per step, of the tokens with p >= threshold only the least likely stays.

    Equally unlikely ones all stay; end-of-sequence tokens and those in `keep` (such as the newline) always
    do. A threshold above 0.5 can't be met twice, so it is off. As in text-generation-webui and llama.cpp.
    """

    probability: float
    threshold: float = 0.1
    keep: tuple[int, ...] = ()

    name: ClassVar[str] = "xtc"
    main: ClassVar[str] = "probability"
    rank: ClassVar[int] = 90

    def __post_init__(self) -> None:
        require(0 <= self.probability <= 1, "probability", "in [0, 1]", self.probability)
        require(0 <= self.threshold <= 1, "threshold", "in [0, 1]", self.threshold)
        require(all(token >= 0 for token in self.keep), "keep", "token ids", self.keep)

    def check_vocabulary(self, vocab_size: int, path: str) -> None:
        inside = all(token < vocab_size for token in self.keep)
        require(inside, f"{path}.keep", f"token ids below {vocab_size}", self.keep)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.probability == 0 or self.threshold > 0.5

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        mass = weights(logits)
        top_choices = (mass >= self.threshold * row_sum(mass)) & (mass > 0)
        least = mx.where(top_choices, logits, mx.inf).min(axis=-1, keepdims=True)
        out = (logits > least) & (context.uniform("xtc") < self.probability)
        if stay := [token for token in (*context.eos_ids, *self.keep) if token < logits.shape[-1]]:
            out[:, mx.array(stay)] = False
        return mx.where(out, -mx.inf, logits)

"""DRY: don't repeat yourself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxgen.errors import require
from mlxgen.sampler.stage import Context, Stage
from mlxgen.sampler.stages.penalties import within

_LONGEST = 50  # matches are counted up to this length, as its author does: longer ones only overflow


@dataclass(frozen=True, kw_only=True)
class Dry(Stage):
    """Penalizes tokens that would continue a repetition of what the context holds already.

    If the newest n >= allowed_length tokens have occurred before, the token that followed them there loses
    multiplier * base ** (n - allowed_length); the longest such n counts. A match does not reach over a
    sequence breaker (token ids, such as those of newline, colon, quote, asterisk), and a breaker is never
    penalized. `window` takes only the last so many tokens, 0: all. multiplier = 0: off.
    Source: text-generation-webui, pull request #5677.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = 0
    sequence_breakers: tuple[int, ...] = ()

    name: ClassVar[str] = "dry"
    main: ClassVar[str] = "multiplier"
    rank: ClassVar[int] = 30
    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.multiplier < math.inf, "multiplier", "finite and >= 0 (0: off)", self.multiplier)
        require(1 <= self.base <= 16, "base", "in [1, 16]", self.base)
        require(self.allowed_length >= 1, "allowed_length", ">= 1", self.allowed_length)
        require(self.window >= 0, "window", ">= 0 (0: the whole context)", self.window)
        breakers = self.sequence_breakers
        require(all(token >= 0 for token in breakers), "sequence_breakers", "token ids", breakers)

    def check_vocabulary(self, vocab_size: int, path: str) -> None:
        inside = all(token < vocab_size for token in self.sequence_breakers)
        require(inside, f"{path}.sequence_breakers", f"token ids below {vocab_size}", self.sequence_breakers)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.multiplier == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        history = within(context.history, self.window)
        if history.shape[-1] < 2:
            return logits
        breaker = mx.zeros(history.shape, dtype=mx.bool_)
        for token in self.sequence_breakers:
            breaker = breaker | (history == token)
        lengths = _match_lengths(history, breaker)  # [B, N-1]
        follower = history[:, 1:]
        excess = lengths - mx.array(self.allowed_length)
        hit = (excess >= 0) & (follower >= 0) & ~breaker[:, 1:]
        loss = mx.where(hit, self.multiplier * mx.power(mx.array(self.base), mx.maximum(excess, 0)), 0.0)
        rows = mx.arange(logits.shape[0])[:, None]
        return logits - mx.zeros_like(logits).at[rows, mx.maximum(follower, 0)].maximum(loss)


def _match_lengths(history: mx.array, breaker: mx.array) -> mx.array:
    """For every token but the last: how many tokens up to it equal the newest ones, [B, N-1], <= _LONGEST."""
    rows, size = history.shape
    width = size + _LONGEST
    in_front = [(0, 0), (_LONGEST, 0)]
    padded = mx.pad(history, in_front, constant_values=-1)
    # -2 equals nothing: breakers among the newest tokens, and what lies before the history.
    newest = mx.pad(mx.where(breaker | (history < 0), -2, history), in_front, constant_values=-2)
    newest = newest[:, None, -_LONGEST:]
    windows = mx.as_strided(padded, (rows, size - 1, _LONGEST), (width, 1, 1), offset=1)
    mismatch = mx.where(windows == newest, 0, mx.arange(1, _LONGEST + 1))
    return _LONGEST - mismatch.max(axis=-1)

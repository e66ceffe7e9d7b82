"""Penalties on tokens that have occurred. Shapes: history [B, N], left-padded with -1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxgen.errors import require
from mlxgen.sampler.stage import Context, Stage


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(Stage):
    """Divides positive logits and multiplies the others by the penalty, once per token that has occurred.

    Counts prompt and answer, as transformers and vLLM do; `window` takes only the last so many tokens,
    0: all. penalty = 1: off. Keskar et al. 2019, arXiv 1909.05858.
    """

    penalty: float
    window: int = 0

    name: ClassVar[str] = "repetition_penalty"
    main: ClassVar[str] = "penalty"
    rank: ClassVar[int] = 10
    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 < self.penalty < math.inf, "penalty", "a finite number > 0 (1: off)", self.penalty)
        require(self.window >= 0, "window", ">= 0 (0: the whole context)", self.window)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.penalty == 1

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        def penalize(x: mx.array) -> mx.array:
            return mx.where(x > 0, x / self.penalty, x * self.penalty)

        return _change_once(logits, within(context.history, self.window), penalize)


@dataclass(frozen=True, kw_only=True)
class PresencePenalty(Stage):
    """Subtracts the penalty from the logit of every token generated so far; the prompt does not count.

    As in OpenAI's API and vLLM.
    """

    penalty: float

    name: ClassVar[str] = "presence_penalty"
    main: ClassVar[str] = "penalty"
    rank: ClassVar[int] = 14
    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(math.isfinite(self.penalty), "penalty", "a finite number", self.penalty)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.penalty == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        return _change_once(logits, _generated(context), lambda x: x - self.penalty)


@dataclass(frozen=True, kw_only=True)
class FrequencyPenalty(Stage):
    """Subtracts the penalty once for every time the token was generated; the prompt does not count.

    As in OpenAI's API and vLLM.
    """

    penalty: float

    name: ClassVar[str] = "frequency_penalty"
    main: ClassVar[str] = "penalty"
    rank: ClassVar[int] = 12
    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(math.isfinite(self.penalty), "penalty", "a finite number", self.penalty)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return self.penalty == 0

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        tokens = _generated(context)
        rows = mx.arange(logits.shape[0])[:, None]
        counts = mx.zeros_like(logits).at[rows, mx.maximum(tokens, 0)].add((tokens >= 0).astype(logits.dtype))
        return logits - self.penalty * counts


def within(history: mx.array, window: int | mx.array) -> mx.array:
    """The history with all but the last `window` tokens replaced by -1; window 0: unchanged."""
    size = history.shape[-1]
    if not isinstance(window, mx.array) and (window == 0 or window >= size):
        return history
    return mx.where((mx.arange(size) >= size - window) | (mx.array(window) == 0), history, -1)


def _generated(context: Context) -> mx.array:
    """The history with the prompt replaced by -1."""
    size = context.history.shape[-1]
    return mx.where(mx.arange(size) >= size - mx.array(context.steps)[:, None], context.history, -1)


def _change_once(logits: mx.array, tokens: mx.array, change: Callable[[mx.array], mx.array]) -> mx.array:
    """Apply `change` to the logit of every distinct token in `tokens` [B, N] (-1: none)."""
    # Padding repeats the newest token: to write one value twice is harmless. Without any token, index -1 is
    # the last one of the vocabulary, and its logit is written back unchanged.
    newest = tokens[:, -1:]
    tokens = mx.where(tokens < 0, newest, tokens)
    values = mx.take_along_axis(logits, tokens, axis=-1)
    return mx.put_along_axis(logits, tokens, mx.where(newest < 0, values, change(values)), axis=-1)

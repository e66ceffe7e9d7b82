"""What a generation gives: chunks while it runs, a completion at its end."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, Literal

from mlxgen.device import peak_memory_bytes

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """What became of guessed tokens. `skipped`: guesses that were not tried, as they would not have paid.

    note: why there were no more guesses, if so.
    """

    checks: int  # forward passes that checked guesses
    drafted: int  # tokens that were guessed
    accepted: int  # of these, that were right
    acceptance: float  # accepted / drafted
    skipped: int
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Speed and memory of one answer; times in seconds of wall clock. A rate of 0 means too few tokens to measure."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, that a cache held already
    completion_tokens: int
    ttft_s: float  # time to first token
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    peak_memory_bytes: int
    speculation: SpeculationStats | None = None  # where the configuration asks for it


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The model's own log-probability of a token (natural logarithm, before any sampler stage), and the best ones'."""

    token: int
    piece: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer. The end-of-sequence token counts neither in `tokens` nor in `completion_tokens`.

    finish_reason: "stop" at an end-of-sequence token or a stop text, "length" at max_tokens or the end of the
    context, "interrupted" when the caller stopped it.
    complete: of an answer that must follow a rule (`json_schema`, `regex`, ...), whether the text, with the prefill in
    front, is a whole one; always so where the answer ended by itself. None without a rule.
    seed: with it and `n=1` the same answer comes again, also one of several.
    prompt_logprobs: of the prompt's tokens but for the first, which nothing comes before.
    score: of an answer of a beam search: log-probabilities divided by length ** length_penalty.
    others: the further answers that `n` asked for; of a beam search, the next best.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seed: int
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    complete: bool | None = None
    score: float | None = None
    others: tuple[Completion, ...] = ()

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `output=json` prints it; what must be asked for only where it was."""
        data = dataclasses.asdict(dataclasses.replace(self, others=()))
        data["others"] = [other.as_dict() for other in self.others] or None
        data["stats"] = {name: value for name, value in data["stats"].items() if value is not None}
        return {name: value for name, value in data.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of an answer as it comes: of the `index`-th, where there are several.

    The last piece of an answer, and only that, has a finish reason; the very last one has the completion.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


class Clock:
    """Takes the time of an answer."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._first: float | None = None
        self._count = 0

    def start(self) -> None:
        """The prompt is computed; the first token counts from now on at the latest."""
        self._first = self._first or time.perf_counter()

    def again(self) -> Clock:
        """For another answer that was computed at the same time."""
        other = Clock()
        other._started, other._first = self._started, self._first
        return other

    def tick(self) -> None:
        """A token has come, the end-of-sequence token included."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._count += 1

    def stats(
        self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, speculation: SpeculationStats | None
    ) -> Stats:
        ttft = (self._first or self._last) - self._started
        decode = self._last - (self._first or self._last)
        return Stats(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            ttft_s=ttft,
            prefill_tokens_per_s=(prompt_tokens - cached_tokens) / ttft if ttft else 0.0,
            decode_tokens_per_s=(self._count - 1) / decode if decode else 0.0,
            peak_memory_bytes=peak_memory_bytes(),
            speculation=speculation,
        )

"""What the engine is asked, and what it gives back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxgen.engine.sequence import TokenSequence
from mlxgen.protocols import Guide


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate. `eos_ids` end the answer.

    top_logprobs, prompt_logprobs: how many of the likeliest tokens are given beside each token of the answer, and of
        the prompt; below 0: nothing, not even the token's own log-probability.
    sampler: has `start(prompt) -> state`; the engine hands sampler and state to its `sample`.
    guide: has `start() -> protocols.Guide`, which says what the answer may be.
    speculation: has `start(generation) -> mlxgen.engine.speculation.Speculator`; used while the request runs alone.
    priority: the higher goes first.
    beams: more than 1 for a beam search, which takes that many rows and gives the `best` answers when it is over; see
        mlxgen.engine.beam.
    """

    prompt: tuple[int, ...]
    sampler: Any
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    top_logprobs: int = -1
    prompt_logprobs: int = -1
    prefill_chunk: int = 256
    priority: int = 0
    guide: Any = None
    speculation: Any = None
    beams: int = 1
    best: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Token:
    """One generated token. `ends`: it is an end-of-sequence token."""

    id: int
    ends: bool
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(eq=False, kw_only=True)
class Generation:
    """A request on its way. `take()` hands out the tokens that have come since."""

    request: Request
    sequence: TokenSequence
    arrival: int
    state: Any = None  # of the sampler
    guide: Guide | None = None
    speculator: Any = None
    search: Any = None  # mlxgen.engine.beam.BeamSearch
    cached_tokens: int = 0  # of the prompt, that the sequence held already
    produced: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    waiting: deque[Token] = field(default_factory=deque)
    prompt_scores: list[Token] = field(default_factory=list)  # the prompt but for its first token, if asked for
    score: float | None = None  # of an answer of a beam search
    others: list[Generation] = field(default_factory=list)  # the next best answers of a beam search

    @property
    def lacks_scores(self) -> bool:
        """Whether its prompt must be computed to be scored, whoever else has computed it."""
        request = self.request
        return request.prompt_logprobs >= 0 and len(self.prompt_scores) < len(request.prompt) - 1

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def owner(self) -> Generation:
        """The request's own generation, if this is one of its beams."""
        return self if self.search is None else self.search.owner

    @property
    def known(self) -> list[int]:
        """The prompt and what has been produced."""
        return [*self.request.prompt, *self.produced]

    def begin(self, cached_tokens: int) -> None:
        """Its prompt is about to be computed, but for what is cached."""
        self.cached_tokens = cached_tokens
        request = self.request
        self.guide = request.guide.start() if request.guide is not None else None
        self.speculator = request.speculation.start(self) if request.speculation is not None else None
        self.state = request.sampler.start(request.prompt)  # last: it says that nothing is missing

    def follow(self, token: int) -> bool:
        """Tell the guide of a token that was handed out. True if the answer is whole, or its guide has failed."""
        if self.guide is None:
            return False
        try:
            self.guide.advance(token)
        except Exception as error:
            self.error = error
            return True
        return self.guide.ended

    def take(self) -> list[Token]:
        tokens = list(self.waiting)
        self.waiting.clear()
        return tokens

"""Speculation: guess the next tokens, let the model check all of them in one forward pass, and keep those that it would
have picked itself (arXiv:2211.17192). The answer is the same as without, as every token is picked by the request's own
sampler with its own random numbers; only the time changes.

Checking L tokens costs more than computing one, by a factor that depends on the machine: it is measured, and so is how
often guesses are right. Guesses that would not pay are not tried.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxgen.engine.request import Generation
from mlxgen.protocols import LayerCache

_FIRST_RATIO = 1.5  # what a check is believed to cost, in plain steps, before one was measured
_MARGIN = 1.05  # guesses must promise this much more than they cost
_WEIGHT = 2.0  # of what is believed of guesses at first, in guesses
_HALF_LIFE = 64  # tokens after which what was seen of guesses counts half, so that they are tried again
CANNOT = "off: the caches can't forget single tokens (recurrent layers, or a window that has just moved)"
TOO_LITTLE_SLACK = "off: the caches can't forget as many tokens as were guessed"
_SHARE = 0.2  # of a new measurement in the running mean


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Tokens that may come next. `odds`: the chance of each to be right, as far as one knows for this `kind`."""

    tokens: list[int]
    kind: Hashable
    odds: float

    def first(self, count: int) -> Guess:
        return Guess(tokens=self.tokens[:count], kind=self.kind, odds=self.odds)


class Drafter(Protocol):
    """Where guesses come from, for one request."""

    def guess(self, generation: Generation, limit: int) -> Guess | None:
        """At most `limit` tokens that may follow the known ones; None for no idea."""
        ...

    def hopes(self, generation: Generation) -> Guess | None:
        """What `guess` may say once one more token is known, found without much work."""
        ...


@dataclass
class Costs:
    """Seconds of a plain step, and of checks in plain steps, by how many tokens they check."""

    plain_s: float | None = None
    ratios: dict[int, float] = field(default_factory=dict)

    def plain(self, seconds: float) -> None:
        known = self.plain_s or seconds
        self.plain_s = known + _SHARE * (min(seconds, 2 * known) - known)  # one hiccup must not count for much

    def check(self, count: int, seconds: float) -> None:
        if self.plain_s is None:
            return
        size, ratio = count.bit_length(), seconds / self.plain_s
        known = self.ratios.get(size, ratio)
        self.ratios[size] = known + _SHARE * (min(ratio, 2 * known) - known)

    def ratio(self, count: int) -> float:
        return self.ratios.get(count.bit_length(), _FIRST_RATIO)


@dataclass
class _Record:
    right: float = 0.0
    wrong: float = 0.0
    at: int = 0  # tokens that were produced then

    def age(self, now: int) -> None:
        keep = 0.5 ** ((now - self.at) / _HALF_LIFE)
        self.right, self.wrong, self.at = self.right * keep, self.wrong * keep, now


@dataclass
class Speculator:
    """Guesses for one request, and what became of them.

    always: try guesses that do not pay, too. off: why there are no more guesses, if so.
    """

    drafter: Drafter
    costs: Costs
    always: bool = False
    checks: int = 0
    drafted: int = 0
    accepted: int = 0
    skipped: int = 0  # times that a guess was not tried, as it would not have paid
    off: str | None = None
    _records: dict[Hashable, _Record] = field(default_factory=dict)

    def ready(self, caches: Sequence[LayerCache]) -> bool:
        """Whether guesses can be checked now: the caches must forget those that are wrong."""
        if self.off in (None, CANNOT):
            can = all(cache.trims_freely or cache.can_trim(1) for cache in caches)
            self.off = None if can else CANNOT
        return self.off is None

    def hopeful(self, generation: Generation) -> bool:
        """Whether it is worth waiting for the next token before going on, as there may be a guess then."""
        if generation.guide is not None:
            return True  # what it forces is known only then
        guess = self.drafter.hopes(generation)
        return guess is not None and self.pays(guess, generation)

    def guess(self, generation: Generation, limit: int) -> Guess | None:
        """At most `limit` tokens that are worth checking."""
        if limit < 1:
            return None
        try:
            guess = _forced(generation) or self.drafter.guess(generation, limit)
        except Exception as error:  # guesses are a help; without them the answer is the same
            self.off = f"off: {error}"
            return None
        if guess is None or not guess.tokens:
            return None
        guess = guess.first(limit)
        if not self.pays(guess, generation):
            self.skipped += 1
            return None
        return guess

    def pays(self, guess: Guess, generation: Generation) -> bool:
        if self.always:
            return True
        record = self._records.get(guess.kind, _Record())
        record.age(len(generation.produced))
        p = (record.right + _WEIGHT * guess.odds) / (record.right + record.wrong + _WEIGHT)
        count = len(guess.tokens)
        gain = count if p == 1 else p * (1 - p**count) / (1 - p)
        return 1 + gain >= _MARGIN * self.costs.ratio(count)

    def checked(self, guess: Guess, right: int, seconds: float, generation: Generation) -> None:
        """The first `right` of the guessed tokens were so."""
        record = self._records.setdefault(guess.kind, _Record())
        record.age(len(generation.produced))
        record.right += right
        record.wrong += right < len(guess.tokens)
        self.costs.check(len(guess.tokens), seconds)
        self.checks += 1
        self.drafted += len(guess.tokens)
        self.accepted += right


def _forced(generation: Generation) -> Guess | None:
    """What a guide leaves no choice about."""
    tokens = generation.guide.forced() if generation.guide is not None else []
    return Guess(tokens=tokens, kind="forced", odds=0.98) if tokens else None


class Speculation(Protocol):
    """A way to speculate, for all requests of a run."""

    def start(self, generation: Any) -> Speculator: ...

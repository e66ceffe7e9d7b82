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

_FIRST_SLOPE = 0.15  # what a guess is believed to add to a check, in plain steps, before it was measured
_MARGIN = 1.2  # guesses must promise this much more than they cost
_WEIGHT = 2.0  # of what is believed of guesses at first, in guesses
_HALF_LIFE = 64  # tokens after which what was seen of guesses counts half, so that they are tried again
PAUSED = "off at the end: guesses did not pay"
CANNOT = "off: the caches can't forget single tokens (recurrent layers, or a window that has just moved)"
TOO_LITTLE_SLACK = "off: the caches can't forget as many tokens as were guessed"
_SHARE = 0.2  # of a new measurement in the running mean

Kind = tuple[Hashable, float]
"""A kind of guess, and the chance of such a guess to be right before one has seen any."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Tokens that may come next, and the kind of each."""

    tokens: list[int]
    kinds: list[Kind]

    def first(self, count: int) -> Guess:
        return Guess(tokens=self.tokens[:count], kinds=self.kinds[:count])


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
    """Seconds of a plain step, and what each guess adds to a check, in plain steps, by the size of the guess.

    Sizes are powers of two. Those that were not measured yet are believed to be cheap, so they will be.
    """

    plain_s: float | None = None
    slopes: dict[int, float] = field(default_factory=dict)

    def plain(self, seconds: float) -> None:
        known = self.plain_s or seconds
        self.plain_s = known + _SHARE * (min(seconds, 2 * known) - known)  # one hiccup must not count for much

    def check(self, count: int, seconds: float) -> None:
        if self.plain_s is None:
            return
        size, slope = count.bit_length(), max(seconds / self.plain_s - 1, 0.0) / count
        known = self.slopes.get(size)
        if known is None:  # one hiccup must not rule out a size
            self.slopes[size] = min(slope, 3 * _FIRST_SLOPE)
        else:
            self.slopes[size] = known + _SHARE * (min(slope, 2 * known + 0.01) - known)

    def ratio(self, count: int) -> float:
        """What a check of so many guesses costs, in plain steps."""
        return 1 + count * self.slopes.get(count.bit_length(), min([_FIRST_SLOPE, *self.slopes.values()]))


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

    always: try guesses that do not pay, too. off: why there are no more guesses, if so. paused: the last one that there
    was would not have paid.
    """

    drafter: Drafter
    costs: Costs
    always: bool = False
    checks: int = 0
    drafted: int = 0
    accepted: int = 0
    skipped: int = 0  # times that a guess was not tried, as it would not have paid
    off: str | None = None
    paused: bool = False
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
        return guess is not None and bool(self._worth(guess, generation))

    def guess(self, generation: Generation, limit: int) -> Guess | None:
        """At most `limit` tokens that are worth checking."""
        if limit < 1:
            return None
        try:
            guess = _forced(generation) or self.drafter.guess(generation, limit)
        except Exception as error:  # guesses are a help; without them the answer is the same
            self.off = f"off: {error}"
            return None
        count = self._worth(guess.first(limit), generation) if guess is not None else 0
        return guess.first(count) if guess is not None and count else None

    def _worth(self, guess: Guess, generation: Generation) -> int:
        """How many of the guessed tokens to check, for the most tokens in the least time; 0 if that does not pay."""
        if self.always or not guess.tokens:
            return len(guess.tokens)
        gain, chance, best, count = 1.0, 1.0, _MARGIN, 0
        for place, kind in enumerate(guess.kinds, 1):
            chance *= self._chance(kind, generation)
            gain += chance
            if gain / self.costs.ratio(place) > best:
                best, count = gain / self.costs.ratio(place), place
        self.paused = not count
        self.skipped += self.paused
        return count

    def _chance(self, kind: Kind, generation: Generation) -> float:
        record = self._records.setdefault(kind, _Record())
        record.age(len(generation.produced))
        return (record.right + _WEIGHT * kind[1]) / (record.right + record.wrong + _WEIGHT)

    def checked(self, guess: Guess, right: int, seconds: float, generation: Generation) -> None:
        """The first `right` of the guessed tokens were so."""
        for place, kind in enumerate(guess.kinds[: right + 1]):
            record = self._records.setdefault(kind, _Record())
            record.age(len(generation.produced))
            record.right += place < right
            record.wrong += place == right
        self.costs.check(len(guess.tokens), seconds)
        self.checks += 1
        self.drafted += len(guess.tokens)
        self.accepted += right


def _forced(generation: Generation) -> Guess | None:
    """What a guide leaves no choice about."""
    tokens = generation.guide.forced() if generation.guide is not None else []
    return Guess(tokens=tokens, kinds=[("forced", 0.98)] * len(tokens)) if tokens else None


class Speculation(Protocol):
    """A way to speculate, for all requests of a run."""

    def start(self, generation: Any) -> Speculator: ...

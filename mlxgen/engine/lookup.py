"""Prompt lookup: what followed the last tokens when they came before, in the prompt or in the answer, may follow again.

It costs nothing to guess, and is right where text is copied: edits of a file, quotations, lists, loops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlxgen.engine.request import Generation
from mlxgen.engine.speculation import Costs, Guess, Kind, Speculator
from mlxgen.errors import require

# (tokens that agree, chance that the next one does too): the longer the match, the surer the guess.
_LEVELS = ((8, 0.9), (5, 0.8), (3, 0.6), (0, 0.4))
_MOST_PLACES = 16  # that are compared
_LONGEST = 32  # match that makes a difference


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Guess up to `tokens` tokens where at least `ngram` tokens agree. `always`: also where that does not pay."""

    tokens: int = 16
    ngram: int = 2
    always: bool = False
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "speculation.tokens", "at least 1", self.tokens)
        require(self.ngram >= 1, "speculation.ngram", "at least 1", self.ngram)

    def start(self, generation: Any) -> Speculator:
        return Speculator(_Drafter(self.tokens, self.ngram), self.costs, self.always)


def _kind(length: int) -> Kind:
    return next(kind for kind in _LEVELS if length >= kind[0])


class _Drafter:
    def __init__(self, tokens: int, ngram: int):
        self._count, self._ngram = tokens, ngram
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its newest occurrence
        self._earlier: dict[int, int] = {}  # such a place -> that of the occurrence before
        self._read = 0

    def hopes(self, generation: Generation) -> Guess | None:
        return self.guess(generation, self._count)

    def guess(self, generation: Generation, limit: int) -> Guess | None:
        known = generation.known
        place, length = self._best(known)
        if not length:
            return None
        tokens = list(known[place : place + min(self._count, limit)])
        while len(tokens) < min(self._count, limit):  # the text repeats itself, and so does the guess
            tokens.append(tokens[len(tokens) - (len(known) - place)])
        return Guess(tokens=tokens, kinds=[_kind(length + place) for place in range(len(tokens))])

    def _best(self, known: list[int]) -> tuple[int, int]:
        """(the place behind the longest match with the end of `known`, its length); of equals the newest."""
        self._learn(known)
        place, best = self._places.get(tuple(known[-self._ngram :])), (0, 0)
        for _ in range(_MOST_PLACES):
            if place is None:
                break
            length = self._ngram
            while length < _LONGEST and length < place and known[place - length - 1] == known[-length - 1]:
                length += 1
            if length > best[1]:
                best = (place, length)
            place = self._earlier.get(place)
        return best

    def _learn(self, known: list[int]) -> None:
        """Remember all n-grams but the last one, which is what is looked for."""
        n = self._ngram
        for place in range(max(self._read, n), len(known)):
            gram = tuple(known[place - n : place])
            if (before := self._places.get(gram)) is not None:
                self._earlier[place] = before
            self._places[gram] = place
        self._read = max(len(known), n)

"""The tokens that a set of caches has seen, so that another prompt can go on from there.

Caches that keep everything can go back to any of their tokens. Windows and recurrent memories can't: for them, copies
made on the way (marks) are the points to go back to, and there are no others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.protocols import LayerCache

_MAX_MARKS = 8  # of one sequence

Mark = tuple[LayerCache | None, ...]
"""The caches of a point on the way, None for layers that can go back by themselves."""


class TokenSequence:
    """Caches and the token ids they hold, kept in step.

    kind: those of the same kind (cache policy, adapter, ...) may go on from each other's caches; None: from nobody's.
    variant: how the model computes it (with which adapter), if there are several ways.
    stride: marks are made at its multiples and before the last token of a prompt; 0: none.
    """

    def __init__(
        self, new_caches: Callable[[], list[LayerCache]], *, kind: Hashable = None, stride: int = 0, variant: Any = None
    ):
        self._new_caches = new_caches
        self.kind, self.stride, self.variant = kind, stride, variant
        self.disposable = False  # whether nobody goes on from it, so that it need not outlive its request
        self.ended = False
        self.long = False  # whether it was computed as a sequence beyond its rope's change of regime
        self.caches = new_caches()
        self.tokens: list[int] = []
        self.marks: dict[int, Mark] = {}
        self.trims_freely = all(cache.trims_freely for cache in self.caches)

    @property
    def key(self) -> tuple[Hashable, bool]:
        """Sequences with equal keys hold the same for the same tokens."""
        return (self.kind, self.long)

    @property
    def nbytes(self) -> int:
        """Of the caches; marks come on top."""
        return sum(cache.nbytes for cache in self.caches)

    def reach(self, count: int) -> int:
        """The most tokens, of the first `count` that it holds, from which another sequence can go on exactly."""
        surplus = self.caches[0].offset - count
        if all(cache.can_trim(surplus) for cache in self.caches):
            return count
        return max((place for place in self.marks if place <= count), default=0)

    def rewind(self, tokens: Sequence[int], *, long: bool = False) -> None:
        """Keep what the caches share with `tokens`."""
        if long != self.long:
            self.reset()
            self.long = long
        self.keep(common_length(self.tokens, tokens))

    def keep(self, count: int) -> None:
        """Forget all but the first `count` tokens, or as many of these as the caches can go back to."""
        count = self.reach(count)
        if count == 0:
            self.reset()
        elif count != self.caches[0].offset:
            self.caches = self._copies(count)
        self.tokens = self.tokens[:count]
        self.marks = {place: mark for place, mark in self.marks.items() if place <= count}

    def reset(self) -> None:
        self.caches = self._new_caches()
        self.tokens, self.marks = [], {}

    def empty(self) -> TokenSequence:
        """Another one of the same kind without tokens."""
        other = TokenSequence(self._new_caches, kind=self.kind, stride=self.stride, variant=self.variant)
        other.long = self.long
        return other

    def fork(self, count: int) -> TokenSequence:
        """Another sequence of the first `count` tokens, which must be in `reach`."""
        other = self.empty()
        other.caches, other.tokens = self._copies(count), self.tokens[:count]
        other.marks = {place: mark for place, mark in self.marks.items() if place <= count}
        return other

    def adopt(self, other: TokenSequence) -> None:
        """Go on from a fork of another sequence."""
        assert other.key == self.key
        self.caches, self.tokens, self.marks = other.caches, other.tokens, other.marks
        self.mark()

    def mark(self) -> None:
        """Make this a point to go back to, where that needs a copy."""
        if self.trims_freely or not self.stride:
            return
        copies = [None if cache.trims_freely else cache.copy() for cache in self.caches]
        _compact([cache for cache in copies if cache is not None])
        self.marks[len(self.tokens)] = tuple(copies)
        places = sorted(self.marks)
        if len(places) > _MAX_MARKS:  # the newest stays; of the others goes the one that saves least
            gaps = {place: place - before for before, place in zip([0, *places], places[:-1], strict=False)}
            del self.marks[min(gaps, key=lambda place: gaps[place])]

    def next_stop(self, total: int, chunk: int) -> int:
        """Where the next chunk of a prompt of `total` tokens ends: where a mark is due, if one is near."""
        start = len(self.tokens)
        stop = min(start + chunk, total)
        if self.trims_freely or not self.stride:
            return stop
        if stop == total:
            return total - 1 if start < total - 1 else total
        aligned = stop // self.stride * self.stride
        return aligned if aligned > start else stop

    def mark_if_due(self, total: int) -> None:
        """After a chunk of a prompt of `total` tokens."""
        if self.stride and (len(self.tokens) % self.stride == 0 or len(self.tokens) == total - 1):
            self.mark()

    def end(self) -> None:
        """Its request is over. What a batch holds of it need not be copied out, if it is disposable."""
        self.ended = self.disposable

    def compact(self) -> None:
        """Hold the caches in arrays of their own that are just as large as needed."""
        _compact(self.caches)

    def _copies(self, count: int) -> list[LayerCache]:
        """The caches as they were after `count` tokens."""
        surplus = self.caches[0].offset - count
        if all(cache.can_trim(surplus) for cache in self.caches):
            copies = [cache.copy() for cache in self.caches]
        else:
            pairs = zip(self.caches, self.marks[count], strict=True)
            copies = [(cache if mark is None else mark).copy() for cache, mark in pairs]
        for cache in copies:
            cache.trim(cache.offset - count)
        return copies


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


def _compact(caches: Sequence[LayerCache]) -> None:
    for cache in caches:
        counters, state = cache.counters, [mx.contiguous(array) for array in cache.state]
        cache.counters = counters  # type: ignore[misc]
        cache.state = state  # type: ignore[misc]
    mx.eval([cache.state for cache in caches])

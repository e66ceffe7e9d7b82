"""Sequences that are decoded together, one token each per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.engine.sequence import TokenSequence
from mlxgen.protocols import LanguageModel

Merge = Callable[[Sequence[Any], Any], Any]


class Batch:
    """Some sequences whose caches are merged while they decode together, and given back when one leaves.

    A sequence alone keeps its own caches: nothing is merged, and nothing costs more than without a batch. Who joins or
    leaves is copied, and nobody else; so the order of rows in the merged caches is another than that of `sequences`.
    """

    def __init__(
        self,
        merge: Merge,
        new_rows: Callable[[Sequence[int]], Any],
        select: Callable[[Sequence[Any]], None] | None = None,
    ):
        """select: is told before each forward pass how each row is to be computed (TokenSequence.variant)."""
        self._merge, self._new_rows, self._select = merge, new_rows, select
        self.sequences: list[TokenSequence] = []
        self._order: list[TokenSequence] = []  # of the rows of the caches
        self._caches: list[Any] = []
        self._rows: Any = None

    def change(self, sequences: Sequence[TokenSequence]) -> None:
        """From now on, these sequences decode. Those that leave have their own caches again."""
        stay = [s for s in self._order if s in sequences]
        if self._rows is None or len(sequences) < 2 or not stay:
            self._give_back()
            self._take(sequences)
        else:
            for sequence in [s for s in self._order if s not in sequences]:
                self._remove(sequence)
            self._add([s for s in sequences if s not in stay])
        self.sequences = list(sequences)

    def step(self, model: LanguageModel, tokens: mx.array, length: int | None = None) -> mx.array:
        """The next logits [B, V] after one more token of each sequence, tokens [B]."""
        self._choose()
        if self._rows is None or self._order == self.sequences:
            logits = model(tokens[:, None], self._caches, length=length)[:, -1]
        else:
            there = mx.array([self.sequences.index(sequence) for sequence in self._order])
            back = mx.array([self._order.index(sequence) for sequence in self.sequences])
            logits = model(tokens[there][:, None], self._caches, length=length)[:, -1][back]
        if self._rows is not None:
            self._rows.advance()
        return logits

    def several(self, model: LanguageModel, tokens: Sequence[int], length: int | None = None) -> mx.array:
        """The logits [L, V] after each of several tokens of the one sequence that there is."""
        assert self._rows is None
        self._choose()
        return model(mx.array([tokens]), self._caches, length=length)[0]

    @property
    def state(self) -> list[Any]:
        return [cache.state for cache in self._caches]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def _choose(self) -> None:
        if self._select is not None:
            self._select([sequence.variant for sequence in self._order])

    def _take(self, sequences: Sequence[TokenSequence]) -> None:
        """Begin anew with these."""
        self._order = list(sequences)
        if len(sequences) < 2:
            self._caches, self._rows = (sequences[0].caches if sequences else []), None
            return
        self._rows = self._new_rows([sequence.caches[0].offset for sequence in sequences])
        layers = zip(*(sequence.caches for sequence in sequences), strict=True)
        self._caches = [self._merge(caches, self._rows) for caches in layers]
        for sequence in sequences:
            sequence.caches = []

    def _give_back(self) -> None:
        if self._rows is not None:
            for row, sequence in enumerate(self._order):
                sequence.caches = [] if sequence.ended else [cache.take(row) for cache in self._caches]
            mx.eval([cache.state for sequence in self._order for cache in sequence.caches])
        self._caches, self._rows, self._order = [], None, []

    def _add(self, sequences: Sequence[TokenSequence]) -> None:
        if not sequences:
            return
        layers = list(zip(self._caches, *(sequence.caches for sequence in sequences), strict=True))
        if any(layer.stale or not all(map(layer.accepts, caches)) for layer, *caches in layers):
            everybody = [*self._order, *sequences]
            self._give_back()
            self._take(everybody)
            return
        for sequence in sequences:
            for cache, own in zip(self._caches, sequence.caches, strict=True):
                cache.put(len(self._order), own)
            self._rows.add(sequence.caches[0].offset)
            self._order.append(sequence)
            sequence.caches = []

    def _remove(self, sequence: TokenSequence) -> None:
        """The last row takes the place of the one that leaves."""
        row, last = self._order.index(sequence), len(self._order) - 1
        sequence.caches = [] if sequence.ended else [cache.take(row) for cache in self._caches]
        moved = [cache.take(last) for cache in self._caches] if row != last else []
        # Nobody may be reading the rows any more when one is written in place.
        mx.eval([cache.state for cache in [*sequence.caches, *moved]])
        if moved:
            self._rows.move(row)
        for cache, own in zip(self._caches, moved, strict=False):
            cache.put(row, own)
        for cache in self._caches:
            cache.drop()
        self._rows.drop()
        self._order[row] = self._order[last]
        self._order.pop()
        for cache in self._caches:
            cache.fit()

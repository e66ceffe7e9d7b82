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

    A sequence alone keeps its own caches: nothing is merged, and nothing costs more than without a batch.
    """

    def __init__(self, merge: Merge, new_rows: Callable[[Sequence[int]], Any]):
        self._merge, self._new_rows = merge, new_rows
        self.sequences: list[TokenSequence] = []
        self._caches: list[Any] = []
        self._rows: Any = None

    def change(self, sequences: Sequence[TokenSequence]) -> None:
        """From now on, these sequences decode. Those that leave have their own caches again."""
        self._give_back()
        self.sequences = list(sequences)
        self._take()

    def step(self, model: LanguageModel, tokens: mx.array, length: int | None = None) -> mx.array:
        """The next logits [B, V] after one more token of each sequence, tokens [B]."""
        logits = model(tokens[:, None], self._caches, length=length)[:, -1]
        if self._rows is not None:
            self._rows.advance()
            if any(cache.outgrown for cache in self._caches):
                self.change(self.sequences)
        return logits

    def several(self, model: LanguageModel, tokens: Sequence[int], length: int | None = None) -> mx.array:
        """The logits [L, V] after each of several tokens of the one sequence that there is."""
        assert self._rows is None
        return model(mx.array([tokens]), self._caches, length=length)[0]

    @property
    def state(self) -> list[Any]:
        return [cache.state for cache in self._caches]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def _take(self) -> None:
        if len(self.sequences) < 2:
            self._caches, self._rows = (self.sequences[0].caches if self.sequences else []), None
            return
        self._rows = self._new_rows([sequence.caches[0].offset for sequence in self.sequences])
        layers = zip(*(sequence.caches for sequence in self.sequences), strict=True)
        self._caches = [self._merge(caches, self._rows) for caches in layers]
        for sequence in self.sequences:
            sequence.caches = []

    def _give_back(self) -> None:
        if self._rows is not None:
            rows = zip(*(cache.split() for cache in self._caches), strict=True)
            for sequence, caches in zip(self.sequences, rows, strict=True):
                sequence.caches = list(caches)
        self._caches, self._rows = [], None

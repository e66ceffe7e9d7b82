"""Where the rows of a batch stand."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Rows:
    """Where the rows of a batch stand. One object for all layers, so positions go to the device once a step."""

    def __init__(self, offsets: Sequence[int]):
        self.offsets = list(offsets)
        self._array: mx.array | None = None

    @property
    def array(self) -> mx.array:
        """Tokens that each row has seen [B]."""
        if self._array is None:
            self._array = mx.array(self.offsets)
        return self._array

    def advance(self) -> None:
        """Every row has one more token. A new array, as graphs that are still to run hold the old one."""
        self.offsets = [offset + 1 for offset in self.offsets]
        self._array = None

    def part(self, members: Sequence[int]) -> Rows:
        """Some of the rows; they advance with all."""
        return _Part(self, members)


class _Part(Rows):
    def __init__(self, whole: Rows, members: Sequence[int]):
        self._whole, self._members, self._index = whole, list(members), mx.array(list(members))

    @property
    def offsets(self) -> list[int]:  # type: ignore[override]
        return [self._whole.offsets[m] for m in self._members]

    @property
    def array(self) -> mx.array:
        return self._whole.array[self._index]

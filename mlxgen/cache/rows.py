"""Where the rows of a batch stand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx


class Rows:
    """Where the rows of a batch stand. One object for all layers, so positions go to the device once a step."""

    def __init__(self, offsets: Sequence[int]):
        self.offsets = list(offsets)  # tokens that each row has seen
        self._made: dict[Hashable, Any] = {}

    @property
    def array(self) -> mx.array:
        """The offsets [B]."""
        return self.once("array", lambda: mx.array(self.offsets))

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives; made once as long as the rows stand where they stand."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def advance(self) -> None:
        """Every row has one more token. New arrays from now on, as graphs that are still to run hold the old ones."""
        self._set([offset + 1 for offset in self.offsets])

    def add(self, offset: int) -> None:
        """Another row, behind the others."""
        self._set([*self.offsets, offset])

    def move(self, row: int) -> None:
        """The last row takes the place of another that leaves, and stands in both until `drop`."""
        self._set([*self.offsets[:row], self.offsets[-1], *self.offsets[row + 1 :]])

    def drop(self) -> None:
        """The last row leaves."""
        self._set(self.offsets[:-1])

    def _set(self, offsets: list[int]) -> None:
        self.offsets, self._made = offsets, {}


class SomeRows(Rows):
    """Some of the rows of a batch: `members` are their places in it."""

    def __init__(self, whole: Rows, members: list[int]):
        self._whole, self.members = whole, members

    @property
    def offsets(self) -> list[int]:  # type: ignore[override]
        return [self._whole.offsets[member] for member in self.members]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        return self._whole.once((key, *self.members), make)

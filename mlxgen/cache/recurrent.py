"""The memory of a recurrent layer: a few arrays of fixed size, replaced as tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.cache.layer_cache import FullCache


class RecurrentCache:
    """Keeps what a recurrent mixer gives it. A layer without a mixer gives nothing, and its cache just counts.

    Such a memory cannot forget its newest tokens, only all of them. To go back to some point, keep a `copy` made there:
    it shares the arrays, which are never written to.
    """

    kind = "recurrent"
    trims_freely = False

    def __init__(self) -> None:
        self.offset = 0
        self.state: list[mx.array] = []

    def make_mask(self, length: int) -> None:
        return None

    def read(self) -> tuple[mx.array, ...]:
        """What was written last, nothing at the beginning."""
        return tuple(self.state)

    def write(self, state: Sequence[mx.array], length: int) -> None:
        """The memory after `length` more tokens."""
        self.state = list(state)
        self.offset += length

    def can_trim(self, count: int) -> bool:
        return count in (0, self.offset) or (not self.state and 0 <= count <= self.offset)

    def trim(self, count: int) -> int:
        if not self.can_trim(count):
            return 0
        self.offset -= count
        if self.offset == 0:
            self.state = []
        return count

    @property
    def counters(self) -> dict[str, int]:
        return {"offset": self.offset}

    @counters.setter
    def counters(self, values: dict[str, int]) -> None:
        self.offset = values["offset"]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def batch_key(self) -> tuple[Any, ...]:
        return ("recurrent", len(self.state))

    def copy(self) -> RecurrentCache:
        other = RecurrentCache()
        other.offset, other.state = self.offset, list(self.state)
        return other


class HybridCache:
    """The memory of a layer in which attention and a recurrent mixer stand side by side."""

    trims_freely = False

    def __init__(self, attention: FullCache, recurrent: RecurrentCache | None = None):
        self.attention, self.recurrent = attention, recurrent or RecurrentCache()
        self.kind = f"{self.attention.kind}+{self.recurrent.kind}"
        self.read, self.write = self.recurrent.read, self.recurrent.write
        self.make_mask = self.attention.make_mask

    @property
    def offset(self) -> int:
        return self.attention.offset

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array | None, mask: Any, attention: Callable[..., mx.array]
    ) -> mx.array:
        return self.attention.attend(q, k, v, mask, attention)

    def can_trim(self, count: int) -> bool:
        return self.attention.can_trim(count) and self.recurrent.can_trim(count)

    def trim(self, count: int) -> int:
        if not self.can_trim(count):
            return 0
        self.attention.trim(count)
        return self.recurrent.trim(count)

    @property
    def state(self) -> list[mx.array]:
        return [*self.recurrent.state, *self.attention.state]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        split = self._recurrent_arrays
        self.recurrent.state, self.attention.state = list(arrays[:split]), arrays[split:]

    @property
    def counters(self) -> dict[str, int]:
        """Set before `state`: they tell which arrays are whose."""
        return {**self.attention.counters, "recurrent_arrays": len(self.recurrent.state)}

    @counters.setter
    def counters(self, values: dict[str, int]) -> None:
        self.attention.counters = values
        self.recurrent.offset, self._recurrent_arrays = values["offset"], values["recurrent_arrays"]

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + self.recurrent.nbytes

    @property
    def batch_key(self) -> tuple[Any, ...]:
        return ("hybrid", self.recurrent.batch_key)

    def copy(self) -> HybridCache:
        return HybridCache(self.attention.copy(), self.recurrent.copy())

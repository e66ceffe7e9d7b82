"""Keys and values of several sequences as one, for decoding them together.

What a row's layer remembers never depends on its neighbours. The slots of a row begin with its first token, so those
that a token sees are the first ones, for every kind of cache: windows are rings.

Shapes: B rows, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.cache.layer_cache import FullCache, WindowCache
from mlxgen.cache.rows import Rows
from mlxgen.cache.slots import rows_like

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class Ring:
    """Where a token's keys and values are: slots 0, 1, 2, ...; with a window the newest take the oldest's place, but
    for the first `sinks`.
    """

    window: int | None = None
    sinks: int = 0
    chunked: bool = False

    def slot(self, position: int) -> int:
        if self.window is None or position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % self.window

    def fill(self, count: int) -> int:
        """Slots that `count` tokens take."""
        return count if self.window is None else min(count, self.sinks + self.window)

    def visible(self, position: int) -> int:
        """How many slots the token at a position sees, its own included."""
        if self.chunked and self.window is not None:
            return position % self.window + 1
        return self.fill(position + 1)

    def newest(self, count: int) -> tuple[int, list[int]]:
        """(tokens between the sinks and the oldest that is kept, the slots of all that are kept in their order)."""
        fill = self.fill(count)
        dropped = count - fill
        return dropped, [*range(self.sinks), *(self.slot(p) for p in range(self.sinks + dropped, count))]


class BatchedKV:
    """Keys and values of one layer, of rows whose caches have the same batch key. Takes one token a row."""

    stale = False

    def __init__(self, caches: Sequence[FullCache], rows: Rows):
        first = caches[0]
        self.rows, self._key = rows, first.batch_key
        self._ring = Ring(first.window, first.sinks, first.chunked) if isinstance(first, WindowCache) else Ring()
        self.keys, self.values = rows_like(first.keys), rows_like(first.values)
        for row, cache in enumerate(caches):
            self.put(row, cache)
            if row == 0:
                self.reserve(caches)

    @property
    def offset(self) -> mx.array:
        return self.rows.array

    def make_mask(self, length: int) -> mx.array | None:
        """Visible slots [B, 1, 1, S] for one new token a row."""
        assert length == 1
        counts = [self._ring.visible(offset) for offset in self.rows.offsets]
        size = self._size(1)
        if min(counts) == size:
            return None
        return self.rows.once(("mask", self._ring), lambda: _first(counts, size))

    def attend(self, q: mx.array, k: mx.array, v: mx.array | None, mask: Any, attention: Attention) -> mx.array:
        slots, size, count = [self._ring.slot(offset) for offset in self.rows.offsets], self._size(1), q.shape[0]
        self.keys.write(k, slots, self.rows)
        self.values.write(v, slots, self.rows)
        return attention(q, self.keys.read(count, size), self.values.read(count, size), mask)

    def accepts(self, cache: FullCache) -> bool:
        return cache.batch_key == self._key

    def reserve(self, caches: Sequence[FullCache]) -> None:
        """Make room for all of these rows at once."""
        size = max(self._ring.fill(cache.offset + 1) for cache in caches)
        self._resize(len(caches), size)

    def put(self, row: int, cache: FullCache) -> None:
        """Write what a row's own cache holds; the one behind the last is a new row."""
        keys, values = cache.keys.state, cache.values.state
        if isinstance(cache, WindowCache) and cache.offset > self._ring.fill(cache.offset):
            order = self._ring_order(cache)
            keys, values = ([mx.take(x, order, axis=2) for x in arrays] for arrays in (keys, values))
        self.keys.put(row, keys)
        self.values.put(row, values)

    def take(self, row: int) -> FullCache:
        """A copy of a row as a cache of its own."""
        offset, ring = self.rows.offsets[row], self._ring
        dropped, slots = ring.newest(offset)
        order = mx.array(slots) if dropped else None
        keys, values = (buffers.take(row, ring.fill(offset), order) for buffers in (self.keys, self.values))
        if ring.window is None:
            cache = FullCache(keys, values)
        else:
            cache = WindowCache(ring.window, ring.sinks, keys, values, chunked=ring.chunked)
            cache.dropped = dropped
        cache.offset = offset
        return cache

    def drop(self) -> None:
        """The last row leaves: nothing is read beyond the rows that there are."""

    def fit(self) -> None:
        """Give back memory that is too much by far."""
        self._resize(len(self.rows.offsets), self._size(1))

    @property
    def state(self) -> list[mx.array]:
        return [*self.keys.state, *self.values.state]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def _size(self, more: int) -> int:
        """Slots that all rows together need after so many more tokens."""
        return max(self._ring.fill(offset + more) for offset in self.rows.offsets)

    def _resize(self, rows: int, size: int) -> None:
        self.keys.resize(rows, size)
        self.values.resize(rows, size)

    def _ring_order(self, cache: WindowCache) -> mx.array:
        """Which of a window cache's slots goes into each slot of the ring.

        The cache may lack the oldest token of the ring, whose place the next token takes: anything will do there.
        """
        places = [0] * self._ring.fill(cache.offset)
        kept = range(cache.sinks + cache.dropped, cache.offset)
        for position in [*range(cache.sinks), *kept[-self._ring.window :]]:  # type: ignore[operator]
            slot = position if position < cache.sinks else position - cache.dropped
            places[self._ring.slot(position)] = slot
        return mx.array(places)


def _first(counts: Sequence[int], size: int) -> mx.array:
    return (mx.arange(size) < mx.array(counts)[:, None])[:, None, None]

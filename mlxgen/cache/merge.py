"""The caches of one layer, one for each sequence, as one: rows of any length and kind, joining and leaving at any step.

Each kind promises what a layer's cache does (protocols.LayerCache), and besides:

    accepts(cache)     whether a row with this cache could join
    reserve(caches)    there will be as many rows, of that length
    put(row, cache)    what a row holds is written; the row behind the last is a new one
    take(row)          a copy of a row, as a cache of its own
    drop()             the last row leaves; `rows` still counts it
    fit()              memory that is too much by far is given back
    stale              whether it would be better to merge anew
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.cache.batched import Attention, BatchedKV
from mlxgen.cache.recurrent import HybridCache, RecurrentCache
from mlxgen.cache.rows import Rows, SomeRows


class BatchedRecurrent:
    """The memories of recurrent layers, row below row."""

    stale = False

    def __init__(self, caches: Sequence[RecurrentCache], rows: Rows):
        self.rows, self._key = rows, caches[0].batch_key
        self.state = [mx.concatenate(arrays) for arrays in zip(*(c.state for c in caches), strict=True)]

    @property
    def offset(self) -> mx.array:
        return self.rows.array

    def make_mask(self, length: int) -> None:
        return None

    def read(self) -> tuple[mx.array, ...]:
        return tuple(self.state)

    def write(self, state: Sequence[mx.array], length: int) -> None:
        self.state = list(state)

    def accepts(self, cache: Any) -> bool:
        return cache.batch_key == self._key

    def reserve(self, caches: Sequence[Any]) -> None:
        pass

    def put(self, row: int, cache: RecurrentCache) -> None:
        parts = zip(self.state, cache.state, strict=True)
        self.state = [mx.concatenate([array[:row], own, array[row + 1 :]]) for array, own in parts]

    def take(self, row: int) -> RecurrentCache:
        cache = RecurrentCache()
        cache.offset = self.rows.offsets[row]
        cache.state = [mx.take(array, mx.array([row]), axis=0) for array in self.state]
        return cache

    def drop(self) -> None:
        self.state = [array[:-1] for array in self.state]

    def fit(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


class BatchedHybrid:
    """Attention and a recurrent mixer side by side."""

    def __init__(self, caches: Sequence[HybridCache], rows: Rows):
        self.rows, self._key = rows, caches[0].batch_key
        self._attention = merge([c.attention for c in caches], rows)
        self._recurrent = BatchedRecurrent([c.recurrent for c in caches], rows)
        self.make_mask, self.attend = self._attention.make_mask, self._attention.attend
        self.read, self.write = self._recurrent.read, self._recurrent.write

    @property
    def offset(self) -> mx.array:
        return self.rows.array

    def accepts(self, cache: Any) -> bool:
        return cache.batch_key == self._key and self._attention.accepts(cache.attention)

    def reserve(self, caches: Sequence[HybridCache]) -> None:
        self._attention.reserve([c.attention for c in caches])

    def put(self, row: int, cache: HybridCache) -> None:
        self._attention.put(row, cache.attention)
        self._recurrent.put(row, cache.recurrent)

    def take(self, row: int) -> HybridCache:
        return HybridCache(self._attention.take(row), self._recurrent.take(row))

    def drop(self) -> None:
        self._attention.drop()
        self._recurrent.drop()

    def fit(self) -> None:
        self._attention.fit()

    @property
    def stale(self) -> bool:
        return self._attention.stale

    @property
    def state(self) -> list[mx.array]:
        return [*self._attention.state, *self._recurrent.state]

    @property
    def nbytes(self) -> int:
        return self._attention.nbytes + self._recurrent.nbytes


def merge(caches: Sequence[Any], rows: Rows) -> Any:
    """The caches of one layer, one for each row, as one."""
    keys = {cache.batch_key for cache in caches}
    return _BATCHED[caches[0].batch_key[0]](caches, rows) if len(keys) == 1 else GroupedCache(caches, rows)


class GroupedCache:
    """One layer of rows whose caches differ in kind: projections see all rows, attention sees each group by itself."""

    def __init__(self, caches: Sequence[Any], rows: Rows):
        self.rows = rows
        self._keys: list[Hashable] = []  # the group of each row
        self._groups: dict[Hashable, Any] = {}
        for row, cache in enumerate(caches):
            self.put(row, cache)

    @property
    def offset(self) -> mx.array:
        return self.rows.array

    def make_mask(self, length: int) -> list[Any]:
        return [group.make_mask(length) for group in self._groups.values()]

    def attend(self, q: mx.array, k: mx.array, v: mx.array | None, mask: Any, attention: Attention) -> mx.array:
        order = [row for group in self._groups.values() for row in group.rows.members]
        outs = []
        for group, part in zip(self._groups.values(), mask, strict=True):
            rows = self.rows.once(("rows", *group.rows.members), lambda group=group: mx.array(group.rows.members))
            outs.append(group.attend(q[rows], k[rows], None if v is None else v[rows], part, attention))
        back = self.rows.once(("back", *order), lambda: mx.array(sorted(range(len(order)), key=order.__getitem__)))
        return mx.concatenate(outs)[back]

    def accepts(self, cache: Any) -> bool:
        return True

    def reserve(self, caches: Sequence[Any]) -> None:
        pass

    def put(self, row: int, cache: Any) -> None:
        if row < len(self._keys):
            self._leave(row)
        key = cache.batch_key
        self._keys[row:] = [key, *self._keys[row + 1 :]]
        if key in self._groups:
            group = self._groups[key]
            group.put(len(group.rows.members), cache)
            group.rows.members.append(row)
        else:
            self._groups[key] = _BATCHED[key[0]]([cache], SomeRows(self.rows, [row]))

    def take(self, row: int) -> Any:
        group = self._groups[self._keys[row]]
        return group.take(group.rows.members.index(row))

    def drop(self) -> None:
        self._leave(len(self._keys) - 1)
        self._keys.pop()

    def fit(self) -> None:
        for group in self._groups.values():
            group.fit()

    def _leave(self, row: int) -> None:
        """A row leaves its group, and the group's last one takes its place there."""
        key = self._keys[row]
        group = self._groups[key]
        members = group.rows.members
        place = members.index(row)
        if place != len(members) - 1:
            group.put(place, group.take(len(members) - 1))
            members[place] = members[-1]
        group.drop()
        members.pop()
        if not members:
            del self._groups[key]

    @property
    def state(self) -> list[mx.array]:
        return [array for group in self._groups.values() for array in group.state]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self._groups.values())

    @property
    def stale(self) -> bool:
        return len(self._groups) == 1


_BATCHED: dict[str, Callable[[Any, Rows], Any]] = {
    "full": BatchedKV,
    "window": BatchedKV,
    "recurrent": BatchedRecurrent,
    "hybrid": BatchedHybrid,
}

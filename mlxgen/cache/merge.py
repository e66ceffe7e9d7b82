"""The caches of one layer, one for each sequence, as one: rows of any length and kind, joining and leaving at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.cache.batched import Attention, BatchedKV
from mlxgen.cache.recurrent import HybridCache, RecurrentCache
from mlxgen.cache.rows import Rows


class BatchedRecurrent:
    """The memories of recurrent layers, row below row."""

    def __init__(self, caches: Sequence[RecurrentCache], rows: Rows):
        self.rows = rows
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

    outgrown = False

    def split(self) -> list[RecurrentCache]:
        return [self._row(i) for i in range(len(self.rows.offsets))]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def _row(self, index: int) -> RecurrentCache:
        cache = RecurrentCache()
        cache.offset = self.rows.offsets[index]
        cache.state = [array[index : index + 1] for array in self.state]
        return cache


class BatchedHybrid:
    """Attention and a recurrent mixer side by side."""

    def __init__(self, caches: Sequence[HybridCache], rows: Rows):
        self.rows = rows
        self._attention = merge([c.attention for c in caches], rows)
        self._recurrent = BatchedRecurrent([c.recurrent for c in caches], rows)
        self.make_mask, self.attend = self._attention.make_mask, self._attention.attend
        self.read, self.write = self._recurrent.read, self._recurrent.write

    @property
    def offset(self) -> mx.array:
        return self.rows.array

    @property
    def state(self) -> list[mx.array]:
        return [*self._attention.state, *self._recurrent.state]

    @property
    def nbytes(self) -> int:
        return self._attention.nbytes + self._recurrent.nbytes

    @property
    def outgrown(self) -> bool:
        return self._attention.outgrown

    def split(self) -> list[HybridCache]:
        parts = zip(self._attention.split(), self._recurrent.split(), strict=True)
        return [HybridCache(attention, recurrent) for attention, recurrent in parts]


def merge(caches: Sequence[Any], rows: Rows) -> Any:
    """The caches of one layer, one for each row, as one. `split` gives them back."""
    groups: dict[Any, list[int]] = {}
    for row, cache in enumerate(caches):
        groups.setdefault(cache.batch_key, []).append(row)
    if len(groups) == 1:
        return _BATCHED[caches[0].batch_key[0]](caches, rows)
    parts = []
    for key, members in groups.items():
        parts.append((members, _BATCHED[key[0]]([caches[m] for m in members], rows.part(members))))
    return GroupedCache(parts, rows)


class GroupedCache:
    """One layer of rows whose caches differ in kind: projections see all rows, attention sees each group by itself."""

    def __init__(self, groups: Sequence[tuple[Sequence[int], Any]], rows: Rows):
        self.rows = rows
        self._groups = [(mx.array(list(members)), list(members), cache) for members, cache in groups]
        order = [row for members, _ in groups for row in members]
        self._back = mx.array([order.index(row) for row in range(len(order))])

    @property
    def offset(self) -> mx.array:
        return self.rows.array

    def make_mask(self, length: int) -> list[Any]:
        return [cache.make_mask(length) for _, _, cache in self._groups]

    def attend(self, q: mx.array, k: mx.array, v: mx.array | None, mask: Any, attention: Attention) -> mx.array:
        outs = [
            cache.attend(q[rows], k[rows], None if v is None else v[rows], part, attention)
            for (rows, _, cache), part in zip(self._groups, mask, strict=True)
        ]
        return mx.concatenate(outs)[self._back]

    def split(self) -> list[Any]:
        caches: dict[int, Any] = {}
        for _, members, cache in self._groups:
            caches |= dict(zip(members, cache.split(), strict=True))
        return [caches[row] for row in range(len(caches))]

    @property
    def state(self) -> list[mx.array]:
        return [array for _, _, cache in self._groups for array in cache.state]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for _, _, cache in self._groups)

    @property
    def outgrown(self) -> bool:
        return any(cache.outgrown for _, _, cache in self._groups)


_BATCHED: dict[str, Callable[[Any, Rows], Any]] = {
    "full": BatchedKV,
    "window": BatchedKV,
    "recurrent": BatchedRecurrent,
    "hybrid": BatchedHybrid,
}

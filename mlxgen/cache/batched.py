"""Caches of several sequences as one, for decoding them together: rows of any length, joining and leaving at any step.

All rows end with the same slot, and shorter ones are padded in front. A batch is built from the rows' own caches and gives
them back; what a row's layer remembers never depends on its neighbours.

Shapes: B rows, K heads, S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.cache.layer_cache import FullCache, WindowCache
from mlxgen.cache.recurrent import HybridCache, RecurrentCache

Attention = Callable[..., mx.array]


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


class BatchedKV:
    """Keys and values of one layer, of rows whose caches have the same batch key. Takes one token a row."""

    def __init__(self, caches: Sequence[FullCache], rows: Rows):
        first = caches[0]
        self.rows = rows
        self.window = first.window if isinstance(first, WindowCache) else None
        self.chunked = isinstance(first, WindowCache) and first.chunked
        self.sinks = first.sinks if isinstance(first, WindowCache) else 0
        self._like = first
        self.keys = type(first.keys).stack([_newest(c, c.keys) for c in caches])
        self.values = type(first.values).stack([_newest(c, c.values) for c in caches])
        self._sinks = [_first_slots([c.keys for c in caches], self.sinks), _first_slots([c.values for c in caches], self.sinks)]

    @property
    def offset(self) -> mx.array:
        return self.rows.array

    def make_mask(self, length: int) -> mx.array | None:
        """Visible slots [B, 1, 1, S] for one new token a row, in the order in which `attend` reads them."""
        assert length == 1
        offsets = self.rows.offsets
        size = self.keys.size + 1
        first = self._first_slot(size)
        plain = _plain_slots(self.keys)
        padded = any(offset + 1 < size for offset in offsets)
        if not padded and not self.sinks and not (self.chunked and self.window):
            return None
        position = self.rows.array[:, None]  # of the new token [B, 1]
        slots = mx.arange(first, size) - (size - 1) + position  # position of each slot, below 0 for padding
        visible = slots >= plain  # a quantized buffer's plain tokens stand in front of the padding, and are all there
        if plain:
            visible = visible | (mx.arange(first, size) < plain)
        if self.window is not None:
            oldest = position // self.window * self.window if self.chunked else position - self.window + 1
            visible = visible & (slots >= oldest)
            if self.sinks:
                sinks = mx.arange(self.sinks)
                visible = mx.concatenate([(sinks < oldest) & (sinks < position), visible], axis=1)
        return visible[:, None, None]

    def attend(self, q: mx.array, k: mx.array, v: mx.array | None, mask: Any, attention: Attention) -> mx.array:
        self.keys.append(k)
        self.values.append(v)
        first = self._first_slot(self.keys.size)
        keys, values = self.keys.read(first), self.values.read(first)
        if self.sinks:
            self._fill_sinks(k, v)
            keys, values = (
                x if sinks is None else mx.concatenate([sinks, x], axis=2)
                for sinks, x in zip(self._sinks, (keys, values), strict=True)
            )
        out = attention(q, keys, values, mask)
        if self.window is not None and self.keys.size >= self.window + WindowCache.slack:
            surplus = self.keys.size - (self.window - 1)
            self.keys.remove(0, surplus)
            self.values.remove(0, surplus)
        return out

    def split(self) -> list[FullCache]:
        """The rows' own caches."""
        return [self._row(i) for i in range(len(self.rows.offsets))]

    @property
    def state(self) -> list[mx.array]:
        return [*self.keys.state, *self.values.state, *(s for s in self._sinks if s is not None)]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + sum(s.nbytes for s in self._sinks if s is not None)

    @property
    def outgrown(self) -> bool:
        """Whether some row now belongs to another group: it has filled the plain tokens of a quantized buffer."""
        key = self.keys.batch_key
        return key[0] == "quantized" and key[4] != self._like.keys.batch_key[4]

    def _first_slot(self, size: int) -> int:
        return 0 if self.window is None else max(size - self.window, 0)

    def _fill_sinks(self, k: mx.array, v: mx.array | None) -> None:
        """Rows that are still shorter than the sinks add their new token to them."""
        if all(offset >= self.sinks for offset in self.rows.offsets):
            return
        here = (mx.arange(self.sinks) == self.rows.array[:, None])[:, None, :, None]
        self._sinks = [s if s is None else mx.where(here, x, s) for s, x in zip(self._sinks, (k, v), strict=True)]

    def _row(self, index: int) -> FullCache:
        offset, size = self.rows.offsets[index], self.keys.size
        padding = max(size - offset, 0)
        keys, values = self.keys.row(index, padding), self.values.row(index, padding)
        if self.window is None:
            cache = FullCache(keys, values)
            cache.offset = offset
            return cache
        missing = offset - keys.size  # tokens before the newest ones
        if self.sinks and missing:
            kept = min(self.sinks, missing)
            keys, values = (
                buffer if sinks is None else _joined(sinks[index : index + 1, :, :kept], buffer)
                for sinks, buffer in zip(self._sinks, (keys, values), strict=True)
            )
        window = WindowCache(self.window, self.sinks, keys, values, chunked=self.chunked)
        window.offset, window.dropped = offset, offset - keys.size
        return window


def _newest(cache: FullCache, buffer: Any) -> Any:
    """The slots of a row that its next tokens may see, besides the sinks."""
    if not isinstance(cache, WindowCache):
        return buffer
    skip = max(cache.sinks if cache.dropped else 0, buffer.size - (cache.window - 1), 0)
    return buffer.row(0, min(skip, buffer.size))


def _first_slots(buffers: Sequence[Any], count: int) -> mx.array | None:
    """The first `count` slots of each row, zeros where there are fewer; None where nothing is kept."""
    if not count or not buffers[0].size:
        return None
    rows = []
    for buffer in buffers:
        found = buffer.read()[:, :, :count]
        gap = count - found.shape[2]
        rows.append(mx.pad(found, [(0, 0), (0, 0), (0, gap), (0, 0)]) if gap else found)
    return mx.concatenate(rows)


def _joined(front: mx.array, buffer: Any) -> Any:
    rest = buffer.read() if buffer.size else front[:, :, :0]
    joined = type(buffer)()
    joined.append(mx.concatenate([front, rest], axis=2))
    return joined


def _plain_slots(buffer: Any) -> int:
    """How many slots stand in front of a quantized buffer's padding."""
    key = buffer.batch_key
    return key[3] if key[0] == "quantized" and key[4] else 0


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

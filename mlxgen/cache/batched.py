"""Keys and values of several sequences as one, for decoding them together.

All rows end with the same slot, and shorter ones are padded in front. A batch is built from the rows' own caches and gives
them back; what a row's layer remembers never depends on its neighbours.

Shapes: B rows, K heads, S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.cache.layer_cache import FullCache, WindowCache
from mlxgen.cache.rows import Rows

Attention = Callable[..., mx.array]


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

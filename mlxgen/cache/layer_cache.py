"""The memory of one attention layer: everything it has seen, or a window of it.

Both implement protocols.LayerCache over a pair of buffers, one for keys and one for values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxgen.cache.buffer import Buffer, DenseBuffer, NoBuffer

Values = mx.array | None  # latent attention has no values besides its keys
Attention = Callable[[mx.array, mx.array, Values, Any], mx.array]


class FullCache:
    """Keeps every token."""

    kind = "full"
    trims_freely = True

    def __init__(self, keys: Buffer | None = None, values: Buffer | None = None):
        self.keys: Buffer = keys or DenseBuffer()
        self.values: Buffer = values or DenseBuffer()
        self.offset = 0

    def make_mask(self, length: int) -> Any:
        return "causal" if length > 1 else None

    def attend(self, q: mx.array, k: mx.array, v: Values, mask: Any, attention: Attention) -> mx.array:
        self._store(k, v)
        return attention(q, self.keys.read(), self.values.read(), mask)

    def _store(self, k: mx.array, v: Values) -> None:
        self.keys.append(k)
        self.values.append(v)
        self.offset += k.shape[2]

    def can_trim(self, count: int) -> bool:
        return 0 <= count <= self.offset

    def trim(self, count: int) -> int:
        if not self.can_trim(count):
            return 0
        for buffer in (self.keys, self.values):
            buffer.remove(buffer.size - count, buffer.size)
        self.offset -= count
        return count

    @property
    def state(self) -> list[mx.array]:
        return [*self.keys.state, *self.values.state]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        self.keys.state, self.values.state = self._halves(arrays)

    def tail(self, start: int) -> list[mx.array]:
        """The part of the state that tokens from `start` on have added."""
        return [*self.keys.tail(start), *self.values.tail(start)]

    def extend(self, arrays: list[mx.array], count: int) -> None:
        """Add a tail of `count` tokens of another cache."""
        keys, values = self._halves(arrays)
        self.keys.extend(keys)
        self.values.extend(values)
        self.offset += count

    def _halves(self, arrays: list[mx.array]) -> tuple[list[mx.array], list[mx.array]]:
        """Those of the keys and those of the values."""
        keys = len(arrays) if isinstance(self.values, NoBuffer) else len(arrays) // 2
        return arrays[:keys], arrays[keys:]

    @property
    def counters(self) -> dict[str, int]:
        """The numbers that belong to the state."""
        return {"offset": self.offset}

    @counters.setter
    def counters(self, values: dict[str, int]) -> None:
        self.offset = values["offset"]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """Caches with equal keys can be batched."""
        return (self.kind, self.keys.batch_key, self.values.batch_key)

    def copy(self) -> FullCache:
        other = FullCache(self.keys.copy(), self.values.copy())
        other.offset = self.offset
        return other


class WindowCache(FullCache):
    """Keeps the first `sinks` tokens and the newest ones; a token sees the sinks, itself and `window` - 1 before it.

    Sinks: arXiv:2309.17453 (positions stay those of the text, as the keys were rotated). `chunked`: a token sees its
    own chunk of `window` tokens instead, up to itself (Llama 4). Dropped tokens are moved out only every `slack`
    tokens, so most steps write in place, and that many of the newest can be taken back.
    """

    kind = "window"
    trims_freely = False
    slack = 256

    def __init__(
        self,
        window: int,
        sinks: int = 0,
        keys: Buffer | None = None,
        values: Buffer | None = None,
        *,
        chunked: bool = False,
    ):
        super().__init__(keys, values)
        self.window, self.sinks, self.chunked = window, sinks, chunked
        self.dropped = 0  # tokens between the sinks and the oldest one that is kept

    def make_mask(self, length: int) -> Any:
        if length == 1:
            return None  # what `attend` reads for one token is just what that token sees
        start = self.offset  # position of the first new token
        if start + length <= self.window:
            return "causal"
        keys = mx.concatenate(
            [mx.arange(a, b) + (0 if b <= self.sinks else self.dropped) for a, b in self._visible_slots(length)]
        )
        queries = mx.arange(start, start + length)[:, None]
        near = queries // self.window == keys // self.window if self.chunked else queries - keys < self.window
        return (queries >= keys) & (near | (keys < self.sinks))

    def attend(self, q: mx.array, k: mx.array, v: Values, mask: Any, attention: Attention) -> mx.array:
        slots = self._visible_slots(k.shape[2])
        self._store(k, v)
        out = attention(q, _read(self.keys, slots), _read(self.values, slots), mask)
        self._forget()
        return out

    def _visible_slots(self, length: int) -> list[tuple[int, int]]:
        """The ranges of slots that the next `length` tokens see, their own included."""
        end = self.keys.size + length
        sinks = min(self.sinks, end)
        oldest = self.offset // self.window * self.window if self.chunked else self.offset - self.window + 1
        first = max(oldest - self.dropped, sinks)  # the first new token's window
        if not sinks:
            return [(first, end)]
        return [(0, sinks), (first, end)] if first < end else [(0, sinks)]

    def _forget(self) -> None:
        kept = self.sinks + self.window - 1 + self.slack
        if self.keys.size < kept + self.slack:
            return
        stop = self.keys.size - (kept - self.sinks)
        for buffer in (self.keys, self.values):
            buffer.remove(self.sinks, stop)
        self.dropped += stop - self.sinks

    @property
    def counters(self) -> dict[str, int]:
        return {"offset": self.offset, "dropped": self.dropped}

    @counters.setter
    def counters(self, values: dict[str, int]) -> None:
        self.offset, self.dropped = values["offset"], values["dropped"]

    def can_trim(self, count: int) -> bool:
        """Only while everything the shorter sequence could see is still there."""
        if not 0 <= count <= self.offset:
            return False
        return self.dropped == 0 or self.keys.size - count - self.sinks >= self.window - 1

    @property
    def batch_key(self) -> tuple[Any, ...]:
        return (*super().batch_key, self.window, self.sinks, self.chunked)

    def copy(self) -> WindowCache:
        keys, values = self.keys.copy(), self.values.copy()
        other = WindowCache(self.window, self.sinks, keys, values, chunked=self.chunked)
        other.offset, other.dropped = self.offset, self.dropped
        return other


def _read(buffer: Buffer, slots: list[tuple[int, int]]) -> Values:
    """The slots of up to two ranges; the last one reaches to the end."""
    (start, stop), *rest = slots
    if not rest:
        return buffer.read(start)
    whole = buffer.read(start)
    if whole is None or rest[0][0] == stop:
        return whole
    return mx.concatenate([whole[:, :, : stop - start], buffer.read(rest[0][0])], axis=2)

"""Keys or values of several rows in one array: each row has slots of its own, counted from its beginning.

A row is written in place, whoever its neighbours are; it joins and leaves without a copy of the others.

Shapes: B rows in use, R rows there is room for, K heads, S slots there is room for, D head_dim, n slots of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlxgen.cache.buffer import STEP, Buffer, DenseBuffer, NoBuffer, QuantizedBuffer
from mlxgen.cache.rows import Rows


class SlotRows(Protocol):
    """The rows' form of a buffer."""

    def put(self, row: int, arrays: Sequence[mx.array]) -> None:
        """Write a row that holds what the state of a buffer is; the one behind the last is a new row."""
        ...

    def take(self, row: int, size: int, order: mx.array | None) -> Buffer:
        """A copy of a row's first `size` slots, or of those of `order` [n], as a buffer of its own."""
        ...

    def write(self, x: mx.array, slots: Sequence[int], rows: Rows) -> None:
        """One new token of each row, x [B, K, 1, D], into these slots."""
        ...

    def read(self, rows: int, size: int) -> mx.array:
        """The first slots of the first rows, as plain arrays [B, K, size, D]."""
        ...

    def resize(self, rows: int, size: int) -> None:
        """Make room for so many rows and slots, or give back what is too much by far."""
        ...

    @property
    def state(self) -> list[mx.array]: ...


class DenseRows:
    """Plain arrays in the model's dtype."""

    def __init__(self) -> None:
        self._data: mx.array | None = None  # [R, K, S, D]

    def put(self, row: int, arrays: Sequence[mx.array]) -> None:
        for x in arrays:
            self._put(row, x)
        used = sum(x.shape[2] for x in arrays)
        # A sick row may have left NaN behind these, which no mask takes out.
        if self._data is not None and row < self._data.shape[0] and used < self._data.shape[2]:
            self._data[row : row + 1, :, used:] = 0

    def _put(self, row: int, x: mx.array) -> None:
        if self._data is None:
            _, K, n, D = x.shape
            self._data = mx.zeros((row + 1, K, _rounded(n), D), x.dtype)
        self._grow(row + 1, x.shape[2])
        self._data[row : row + 1, :, : x.shape[2]] = x

    def take(self, row: int, size: int, order: mx.array | None) -> DenseBuffer:
        buffer = DenseBuffer()
        if self._data is not None and size:
            buffer.state = [self.copy(row, size, order)]
        return buffer

    def copy(self, row: int, size: int, order: mx.array | None) -> mx.array:
        """Gathered, so that it holds nothing of the others' memory [1, K, n, D]."""
        assert self._data is not None
        found = mx.take(self._data[:, :, :size], mx.array([row]), axis=0)
        return found if order is None else mx.take(found, order, axis=2)

    def write(self, x: mx.array, slots: Sequence[int], rows: Rows) -> None:
        B, K, _, D = x.shape
        if self._data is None:
            self._data = mx.zeros((B, K, _rounded(max(slots) + 1), D), x.dtype)
        self._grow(B, max(slots) + 1)
        R = self._data.shape[0]
        if R > B:  # room for rows to come: what is written there is never read
            x = mx.pad(x, [(0, R - B), (0, 0), (0, 0), (0, 0)])

        def index() -> mx.array:
            places = mx.array([*slots, *[0] * (R - B)])
            return mx.broadcast_to(places[:, None, None, None], (R, K, 1, D))

        where = rows.once(("slots", R, K, D, *slots), index)
        self._data = mx.put_along_axis(self._data, where, x, axis=2)

    def read(self, rows: int, size: int) -> mx.array:
        assert self._data is not None
        return self._data[:rows, :, :size]

    def resize(self, rows: int, size: int) -> None:
        if self._data is None:
            return
        R, _, S, _ = self._data.shape
        if rows > R or size > S:
            self._grow(rows, size)
        elif 2 * rows <= R or 2 * _rounded(size) <= S:
            self._data = mx.take(self._data[:, :, : _rounded(size)], mx.arange(rows), axis=0)

    def _grow(self, rows: int, size: int) -> None:
        assert self._data is not None
        R, _, S, _ = self._data.shape
        more_rows = max(rows - R, R // 4) if rows > R else 0  # rows that come one by one are copied a few times only
        more_slots = _rounded(size - S) if size > S else 0
        if more_rows or more_slots:
            self._data = mx.pad(self._data, [(0, more_rows), (0, 0), (0, more_slots), (0, 0)])

    @property
    def state(self) -> list[mx.array]:
        return [] if self._data is None else [self._data]


class QuantizedRows:
    """MLX's affine quantization; the first `start` slots of each row are plain."""

    def __init__(self, like: QuantizedBuffer):
        self._bits, self._group_size, self._start = like.bits, like.group_size, like.start
        self._plain = DenseRows()
        self._packed = [DenseRows() for _ in range(3)]  # weights, scales, biases
        self._dtype = mx.float32

    def put(self, row: int, arrays: Sequence[mx.array]) -> None:
        packed = arrays[-3:] if len(arrays) >= 3 else []
        self._plain.put(row, arrays[: len(arrays) - len(packed)])
        for i, rows in enumerate(self._packed):
            rows.put(row, packed[i : i + 1])

    def take(self, row: int, size: int, order: mx.array | None) -> QuantizedBuffer:
        buffer = QuantizedBuffer(self._bits, self._group_size, self._start)
        arrays = [self._plain.copy(row, min(size, self._start), None)] if size and self._start else []
        if size > self._start:
            arrays += [rows.copy(row, size - self._start, order) for rows in self._packed]
        buffer.state = arrays
        return buffer

    def write(self, x: mx.array, slots: Sequence[int], rows: Rows) -> None:
        """Rows on the other side of `start` write, too: where the token that belongs there is still to come."""
        self._dtype, start = x.dtype, self._start
        if min(slots) < start:
            self._plain.write(x, [min(slot, start) for slot in slots], rows)  # one slot more than is read
        if max(slots) >= start:
            parts = mx.quantize(x, group_size=self._group_size, bits=self._bits)
            for packed, part in zip(self._packed, parts, strict=True):
                packed.write(part, [max(slot - start, 0) for slot in slots], rows)

    def read(self, rows: int, size: int) -> mx.array:
        plain = min(self._start, size)
        parts = [self._plain.read(rows, plain)] if plain else []
        if size > self._start:
            packed = [p.read(rows, size - self._start) for p in self._packed]
            values = mx.dequantize(*packed, group_size=self._group_size, bits=self._bits)
            parts.append(values.astype(self._dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def resize(self, rows: int, size: int) -> None:
        if self._start:
            self._plain.resize(rows, min(size, self._start + 1))
        for packed in self._packed:
            packed.resize(rows, max(size - self._start, 0))

    @property
    def state(self) -> list[mx.array]:
        return self._plain.state + [array for rows in self._packed for array in rows.state]


class NoRows:
    """For the values of latent attention, which are a part of its keys."""

    state: list[mx.array] = []  # noqa: RUF012

    def put(self, row: int, arrays: Sequence[mx.array]) -> None:
        pass

    def take(self, row: int, size: int, order: mx.array | None) -> NoBuffer:
        return NoBuffer()

    def write(self, x: None, slots: Sequence[int], rows: Rows) -> None:
        pass

    def read(self, rows: int, size: int) -> None:
        return None

    def resize(self, rows: int, size: int) -> None:
        pass


def rows_like(buffer: Any) -> Any:
    """The rows' form of a buffer of this kind, without rows."""
    if isinstance(buffer, QuantizedBuffer):
        return QuantizedRows(buffer)
    return NoRows() if isinstance(buffer, NoBuffer) else DenseRows()


def _rounded(slots: int) -> int:
    return -(-slots // STEP) * STEP

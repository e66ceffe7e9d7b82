"""Where a cache keeps the keys, or the values, of one layer: a growing array, plain or quantized.

Shapes: B rows, K heads, S tokens, D head_dim. Slots are in the order in which the tokens came.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

STEP = 256  # slots are allocated in steps, so that most tokens are written in place


class Buffer(Protocol):
    size: int

    def append(self, x: mx.array) -> None:
        """Add x [B, K, L, D] behind what is there."""
        ...

    def read(self, start: int = 0) -> mx.array:
        """Slots from `start` on, as plain arrays [B, K, size - start, D]."""
        ...

    def remove(self, start: int, stop: int) -> None:
        """Take out the slots start..stop; those behind move up."""
        ...

    @property
    def state(self) -> list[mx.array]:
        """The slots in use, for evaluation and saving."""
        ...

    @state.setter
    def state(self, arrays: list[mx.array]) -> None: ...

    def tail(self, start: int) -> list[mx.array]:
        """The part of the state that slots from `start` on have added."""
        ...

    def extend(self, arrays: list[mx.array]) -> None:
        """Add the tail of another buffer behind what is there."""
        ...

    @property
    def nbytes(self) -> int: ...

    def copy(self) -> Any: ...

    @property
    def batch_key(self) -> Any:
        """Buffers with equal keys can be batched."""
        ...


class NoBuffer:
    """Keeps nothing: for the values of latent attention, which are a part of its keys."""

    size = 0
    nbytes = 0
    state: list[mx.array] = []  # noqa: RUF012

    def append(self, x: None) -> None:
        pass

    def read(self, start: int = 0) -> None:
        return None

    def remove(self, start: int, stop: int) -> None:
        pass

    def tail(self, start: int) -> list[mx.array]:
        return []

    def extend(self, arrays: list[mx.array]) -> None:
        pass

    def copy(self) -> NoBuffer:
        return self

    batch_key = ("none",)


class DenseBuffer:
    """Plain arrays in the model's dtype."""

    def __init__(self) -> None:
        self.size = 0
        self._data: mx.array | None = None

    def append(self, x: mx.array) -> None:
        B, K, L, D = x.shape
        end = self.size + L
        if self._data is None or end > self._data.shape[2]:
            slots = -(-L // STEP) * STEP
            grown = mx.zeros((B, K, slots, D), x.dtype)
            self._data = grown if self._data is None else mx.concatenate([self._used(), grown], axis=2)
        self._data[:, :, self.size : end] = x
        self.size = end

    def read(self, start: int = 0) -> mx.array:
        assert self._data is not None
        return self._data[:, :, start : self.size]

    def remove(self, start: int, stop: int) -> None:
        if self._data is None or stop <= start:
            return
        if stop < self.size:
            rest = self._data[:, :, stop : self.size]
            self._data[:, :, start : start + rest.shape[2]] = rest
        self.size -= stop - start

    @property
    def state(self) -> list[mx.array]:
        return [] if self._data is None else [self._used()]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        self._data = arrays[0] if arrays else None
        self.size = arrays[0].shape[2] if arrays else 0

    def tail(self, start: int) -> list[mx.array]:
        return [self.read(start)] if start < self.size else []

    def extend(self, arrays: list[mx.array]) -> None:
        for array in arrays:
            self.append(array)

    @property
    def nbytes(self) -> int:
        return 0 if self._data is None else self._data.nbytes

    def copy(self) -> DenseBuffer:
        """Shares the array: writing to one of the two makes MLX copy it."""
        other = DenseBuffer()
        other._data, other.size = self._data if self._data is None else self._data[:], self.size
        return other

    batch_key = ("dense",)

    def _used(self) -> mx.array:
        assert self._data is not None
        return self._data if self.size == self._data.shape[2] else self._data[:, :, : self.size]


class QuantizedBuffer:
    """MLX's affine quantization, in groups along D; the first `start` tokens stay plain.

    A token's slot never depends on how the prompt was cut into chunks: it is quantized when it comes, and what is
    read is always what was stored.
    """

    def __init__(self, bits: int, group_size: int, start: int = 0):
        self.bits, self.group_size, self.start = bits, group_size, start
        self._plain = DenseBuffer()
        self._packed = [DenseBuffer() for _ in range(3)]  # weights, scales, biases
        self._dtype = mx.float32

    @property
    def size(self) -> int:
        return self._plain.size + self._packed[0].size

    def append(self, x: mx.array) -> None:
        self._dtype = x.dtype
        room = min(max(self.start - self.size, 0), x.shape[2])
        if room:
            self._plain.append(x[:, :, :room])
        if room < x.shape[2]:
            parts = mx.quantize(x[:, :, room:], group_size=self.group_size, bits=self.bits)
            for buffer, part in zip(self._packed, parts, strict=True):
                buffer.append(part)

    def read(self, start: int = 0) -> mx.array:
        plain = self._plain.size
        parts = [self._plain.read(start)] if start < plain else []
        if self._packed[0].size:
            packed = [b.read(max(start - plain, 0)) for b in self._packed]
            parts.append(mx.dequantize(*packed, group_size=self.group_size, bits=self.bits).astype(self._dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def remove(self, start: int, stop: int) -> None:
        plain = self._plain.size
        self._plain.remove(min(start, plain), min(stop, plain))
        for buffer in self._packed:
            buffer.remove(max(start - plain, 0), max(stop - plain, 0))

    @property
    def state(self) -> list[mx.array]:
        return self._plain.state + [a for b in self._packed for a in b.state]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        packed = arrays[-3:] if len(arrays) >= 3 else []
        self._plain.state = arrays[: len(arrays) - len(packed)]
        for buffer, array in zip(self._packed, packed, strict=False):
            buffer.state = [array]
        for array in packed[1:2] or arrays[:1]:
            self._dtype = array.dtype

    def tail(self, start: int) -> list[mx.array]:
        plain = self._plain.size
        return self._plain.tail(min(start, plain)) + [a for b in self._packed for a in b.tail(max(start - plain, 0))]

    def extend(self, arrays: list[mx.array]) -> None:
        packed = arrays[-3:] if len(arrays) >= 3 else []
        self._plain.extend(arrays[: len(arrays) - len(packed)])
        for buffer, array in zip(self._packed, packed, strict=False):
            buffer.append(array)
        for array in packed[1:2] or arrays[:1]:
            self._dtype = array.dtype

    @property
    def nbytes(self) -> int:
        return self._plain.nbytes + sum(b.nbytes for b in self._packed)

    @property
    def batch_key(self) -> Any:
        return ("quantized", self.bits, self.group_size, self.start)

    def copy(self) -> QuantizedBuffer:
        other = QuantizedBuffer(self.bits, self.group_size, self.start)
        other._plain, other._dtype = self._plain.copy(), self._dtype
        other._packed = [b.copy() for b in self._packed]
        return other

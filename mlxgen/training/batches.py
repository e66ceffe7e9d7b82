"""Batches of examples, as a function of seed and step: the same from run to run, and where a run goes on.

Without packing a batch has `batch_size` examples of about the same length, padded to one of a few lengths. With packing
its rows hold many examples each, and hardly any padding.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
import numpy as np

from mlxgen.errors import ConfigError, require
from mlxgen.training.batch import Batch, Example

# Examples are sorted by length within so many batches, not within all: the order of the rest stays random.
_SORTED_BATCHES = 32
Row = tuple[int, ...]  # numbers of the examples that stand in it


class Batches:
    """`len` of them are an epoch, in which every example is seen once; `at(step)` goes on into the next ones."""

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int = 4,
        max_length: int | None = None,
        packing: bool = False,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """max_length: positions of a packed row; None: those of the longest example.

        Raises ConfigError without examples, and for one that fits into no row or has nothing to predict.
        """
        require(batch_size >= 1, "data.batch_size", "at least 1", batch_size)
        if not examples:
            raise ConfigError("`data.path` must hold an example to learn from, but none is left.")
        self._examples = list(examples)
        self._lengths = [len(example.tokens) - 1 for example in examples]  # positions: the last token predicts nothing
        for example, length in zip(examples, self._lengths, strict=True):
            require(length >= 1, example.name or "data", "of two tokens at least", length + 1)
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        capacity = max(self._lengths) if max_length is None else max_length
        self._rows = pack(self._lengths, capacity) if packing else None
        self._width = capacity if packing else None
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)

    def __len__(self) -> int:
        rows = len(self._examples) if self._rows is None else len(self._rows)
        return -(-rows // self._batch_size)

    def at(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs."""
        epoch, number = divmod(step, len(self))
        return self._batch(self._order(epoch)[number])

    def padding(self) -> float:
        """The share of an epoch's positions that hold no token."""
        cells = sum(self._shape(rows)[0] * self._shape(rows)[1] for rows in self._order(0))
        return 1 - sum(self._lengths) / cells

    def _shape(self, rows: Sequence[Row]) -> tuple[int, int]:
        longest = padded(max(sum(self._lengths[i] for i in row) for row in rows))
        return len(rows), longest if self._width is None else min(longest, self._width)

    def _order_of_epoch(self, epoch: int) -> list[list[Row]]:
        rows = self._rows or [(number,) for number in range(len(self._examples))]
        order = np.arange(len(rows))
        if not self._shuffle:
            return self._cut([rows[i] for i in order])
        random = _generator(self._seed, epoch)
        random.shuffle(order)
        if self._rows is None:
            size, lengths = self._batch_size * _SORTED_BATCHES, np.array(self._lengths)
            windows = [order[i : i + size] for i in range(0, len(order), size)]
            order = np.concatenate([window[np.argsort(lengths[window], kind="stable")] for window in windows])
        batches = self._cut([rows[i] for i in order])
        return [batches[i] for i in random.permutation(len(batches))]

    def _cut(self, rows: Sequence[Row]) -> list[list[Row]]:
        return [list(rows[i : i + self._batch_size]) for i in range(0, len(rows), self._batch_size)]

    def _batch(self, rows: Sequence[Row]) -> Batch:
        shape = self._shape(rows)
        inputs, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights, segments = np.zeros(shape, np.float32), np.full(shape, -1, np.int32)
        for r, row in enumerate(rows):
            start = 0
            for number, i in enumerate(row):
                example, stop = self._examples[i], start + self._lengths[i]
                inputs[r, start:stop] = example.tokens[:-1]
                targets[r, start:stop] = example.tokens[1:]
                weights[r, start:stop] = example.learned[1:]
                segments[r, start:stop] = number
                start = stop
        names = [[self._examples[i].name for i in row] for row in rows]
        return Batch(
            inputs=mx.array(inputs),
            targets=mx.array(targets),
            weights=mx.array(weights),
            segments=None if self._rows is None else mx.array(segments),
            num_tokens=sum(self._lengths[i] for row in rows for i in row),
            names=tuple(", ".join(filter(None, row)) for row in names),
        )


def padded(length: int) -> int:
    """The next of a few lengths: multiples of 8, from 64 on of an eighth of the power of two below."""
    step = max(8, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def pack(lengths: Sequence[int], capacity: int) -> list[Row]:
    """Numbers of examples by rows that hold `capacity` positions: the longest first, each into the fullest row that has
    room (best fit decreasing). Raises ConfigError for one that is longer than a row.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    require(lengths[order[0]] <= capacity, "data.max_length", f"at least {lengths[order[0]]}", capacity)
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (positions left, row), sorted
    for i in order:
        at = bisect_left(free, (lengths[i], -1))
        if at < len(free):
            left, row = free.pop(at)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        free.insert(bisect_left(free, (left - lengths[i], row)), (left - lengths[i], row))
    return [tuple(row) for row in rows]


def _generator(seed: int, epoch: int) -> np.random.Generator:
    """PCG64 is the same on every machine and in every version of NumPy."""
    digest = hashlib.sha256(f"batches {seed} {epoch}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))

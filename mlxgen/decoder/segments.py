"""Rows that hold many texts (packing): every text sees itself alone, from position 0 on.

To most of a layer a token is just a row. So the tokens of packed rows go through the decoder as T rows of one
token, each at its own position, as in batched decoding; only a mixer has to bring the tokens of a text together.
It gets texts of about the same length side by side, padded on the right, where causal mixers do not look.

A mask over the whole row would do as well, but MLX's attention then keeps all T * T scores for the gradient.

Shapes: B rows, L positions, T = B * L tokens, S slots: tokens and padding, n texts of a group, the longest of m tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.decoder.uncached import Uncached

_STEPS = 4  # groups in each doubling of the length: padding of up to a quarter, and few calls


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tokens of packed rows stand: in rows one after the other, and side by side in groups of texts.

    groups: (n, m) of each. longest: tokens of the longest text.
    """

    positions: mx.array  # [T], of each token in its text
    slots: mx.array  # [S], the token in each slot; in padding the last one of its text
    filled: mx.array  # [S], false for padding
    places: mx.array  # [T], the slot of each token
    groups: tuple[tuple[int, int], ...]
    longest: int

    def apart(self, x: mx.array) -> mx.array:
        """x [T, ...] -> [S, ...]. A gather both ways: the gradient of padding is 0, so nothing has to be added up."""

        @mx.custom_function
        def gather(x: mx.array) -> mx.array:
            return x[self.slots]

        @gather.vjp
        def gather_vjp(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            return cotangent[self.places]

        return gather(x)

    def together(self, y: mx.array) -> mx.array:
        """y [S, ...] -> [T, ...]."""

        @mx.custom_function
        def gather(y: mx.array) -> mx.array:
            return y[self.places]

        @gather.vjp
        def gather_vjp(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            filled = self.filled.reshape(-1, *[1] * (cotangent.ndim - 1))
            return mx.where(filled, cotangent[self.slots], mx.array(0, cotangent.dtype))

        return gather(y)

    def by_group(self, x: mx.array) -> list[mx.array]:
        """x [S, ...] -> [n, m, ...] of each group."""
        ends = np.cumsum([n * m for n, m in self.groups])[:-1].tolist()
        parts = mx.split(x, ends) if ends else [x]
        return [part.reshape(n, m, *x.shape[1:]) for part, (n, m) in zip(parts, self.groups, strict=True)]


def layout_of(segments: mx.array) -> Layout:
    """segments [B, L]: the number of each position's text; neighbours of the same number are one. Padding counts as a
    text of its own.
    """
    ids = np.asarray(segments)
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, ids.size))
    groups: dict[int, list[int]] = {}
    for text in np.argsort(lengths, kind="stable"):
        groups.setdefault(_size_class(int(lengths[text])), []).append(int(text))
    shapes, slots, filled = [], [], []
    for texts in groups.values():
        longest = int(lengths[texts].max())
        at = np.arange(longest)
        shapes.append((len(texts), longest))
        slots.append((starts[texts, None] + np.minimum(at, lengths[texts, None] - 1)).reshape(-1))
        filled.append((at < lengths[texts, None]).reshape(-1))
    all_slots, all_filled = np.concatenate(slots), np.concatenate(filled)
    places = np.empty(ids.size, np.int32)
    places[all_slots[all_filled]] = np.flatnonzero(all_filled)
    return Layout(
        positions=mx.array((np.arange(ids.size) - np.repeat(starts, lengths)).astype(np.int32)),
        slots=mx.array(all_slots.astype(np.int32)),
        filled=mx.array(all_filled),
        places=mx.array(places),
        groups=tuple(shapes),
        longest=int(lengths.max()),
    )


def _size_class(length: int) -> int:
    """Equal for lengths that are not worth a call of their own."""
    step = max(8, (1 << (length.bit_length() - 1)) // _STEPS)
    return -(-length // step) * step


class Packed:
    """What a layer sees of packed rows, in place of a cache: T rows of one token each.

    lender: the layer whose keys this one reads, if they are not its own; lends: whether this is such a layer.
    """

    def __init__(self, layout: Layout, mask_of: Callable[[int | None, int | None, int], Any], layer: Any):
        self.layout, self.offset = layout, layout.positions
        self._mask_of, self._window, self._chunk = mask_of, layer.window, layer.chunk
        self.lender: Packed | None = None
        self.lends = False
        self._seen: tuple[list[mx.array], list[Any]] | None = None

    def make_mask(self, length: int) -> Any:
        return None  # each group has its own

    def attend(
        self, q: mx.array, k: mx.array | None, v: mx.array | None, mask: Any, attention: Callable[..., mx.array]
    ) -> mx.array:
        """q [T, H, 1, D], k and v [T, K, 1, D] -> [T, H, 1, D]."""
        layout = self.layout
        if k is None:
            assert self.lender is not None and self.lender._seen is not None
            keys, values = self.lender._seen
        else:
            keys = self._heads(k)
            values = self._heads(v) if v is not None else [None] * len(keys)
            self._seen = (keys, values) if self.lends else None
        outputs = []
        for q_, k_, v_, (n, m) in zip(self._heads(q), keys, values, layout.groups, strict=True):
            out = attention(q_, k_, v_, self._mask_of(self._window, self._chunk, m))  # [n, H, m, D]
            outputs.append(out.swapaxes(1, 2).reshape(n * m, -1, 1, out.shape[-1]))
        return layout.together(mx.concatenate(outputs) if len(outputs) > 1 else outputs[0])

    def _heads(self, x: mx.array) -> list[mx.array]:
        """[T, N, 1, D] -> [n, N, m, D] of each group."""
        return [part[:, :, :, 0].swapaxes(1, 2) for part in self.layout.by_group(self.layout.apart(x))]

    def mix(self, mixer: Callable[..., mx.array], x: mx.array, length: int) -> mx.array:
        """x [T, hidden] through a mixer with a memory, which begins anew with each text -> [T, hidden]."""
        outputs = []
        for part, (n, m) in zip(self.layout.by_group(self.layout.apart(x)), self.layout.groups, strict=True):
            outputs.append(mixer(part.reshape(n * m, -1), n, Uncached(), None, length))
        return self.layout.together(mx.concatenate(outputs))

    def write(self, state: Sequence[mx.array], length: int) -> None:
        """Layers without a mixer count the tokens."""


def packed(layers: Sequence[Any], segments: mx.array) -> tuple[list[Packed], int]:
    """The caches of one pass over packed rows, and the length of the longest text."""

    @cache
    def mask_of(window: int | None, chunk: int | None, length: int) -> Any:
        return Uncached(window, chunk).make_mask(length)

    layout = layout_of(segments)
    return [Packed(layout, mask_of, layer) for layer in layers], layout.longest

"""A whole sequence at once, as in training: nothing is remembered, the cache protocol is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx


class Uncached:
    """What a layer sees when there is no cache: only the tokens at hand, from position 0 on."""

    def __init__(self, window: int | None = None, chunk: int | None = None):
        self.offset = 0
        self.window, self.chunk = window, chunk

    def make_mask(self, length: int) -> Any:
        limit = min(self.window or length, self.chunk or length)
        if limit >= length:
            return "causal"
        queries, keys = mx.arange(length)[:, None], mx.arange(length)
        visible = queries >= keys
        if self.window is not None:
            visible = visible & (queries - keys < self.window)
        if self.chunk is not None:
            visible = visible & (queries // self.chunk == keys // self.chunk)
        return visible

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, mask: Any, attention: Callable[..., mx.array]
    ) -> mx.array:
        return attention(q, k, v, mask)

    def read(self) -> tuple[mx.array, ...]:
        return ()

    def write(self, state: Sequence[mx.array], length: int) -> None:
        pass

    @property
    def state(self) -> list[mx.array]:
        return []

    @property
    def nbytes(self) -> int:
        return 0

    def can_trim(self, count: int) -> bool:
        return count == 0

    def trim(self, count: int) -> int:
        return 0

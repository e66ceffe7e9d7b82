"""The moments of a run in which it holds most: their graphs, over caches that are as full as they will be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxgen.cache import Rows, merge
from mlxgen.cache.buffer import NoBuffer
from mlxgen.cache.layer_cache import FullCache, WindowCache
from mlxgen.cache.recurrent import HybridCache, RecurrentCache
from mlxgen.decoder import Decoder
from mlxgen.fit.trace import peak_bytes

Policy = Callable[[Any], list[Any]]
Pick = Callable[[mx.array], mx.array]
"""Logits [B, V] -> tokens [B], lazily."""


@dataclass(frozen=True, kw_only=True)
class _Shapes:
    """What one token leaves in a layer's cache."""

    keys: tuple[int, ...] | None  # [1, K, 1, D]
    values: tuple[int, ...] | None
    dtype: mx.Dtype
    state: tuple[tuple[tuple[int, ...], mx.Dtype], ...]


class Phases:
    """Peaks of a decoder under a cache policy, its weights not counted. The decoder's arrays are never evaluated."""

    def __init__(self, decoder: Decoder, policy: Policy, dtype: mx.Dtype):
        decoder.update(tree_unflatten([(name, p.astype(dtype)) for name, p in tree_flatten(decoder.parameters())]))
        self._decoder, self._policy = decoder, policy
        self._weights = tree_flatten(decoder.parameters())
        self._shapes = Phases.of(decoder, policy)._shapes

    @classmethod
    def of(cls, loaded: Decoder, policy: Policy) -> Phases:
        """Of a decoder that has its weights: the sizes of caches only."""
        self = cls.__new__(cls)
        self._decoder, self._policy, self._weights = loaded, policy, []
        caches = policy(loaded.spec)
        loaded.hidden(mx.zeros((1, 1), mx.int32), caches)  # a graph that never runs
        self._shapes = [_shapes(cache) for cache in caches]
        return self

    def row_bytes(self, tokens: int) -> int:
        """What the caches of one row of a batch hold when it gets its last token."""
        caches = self._caches(tokens - 1, chunk=tokens)
        rows = Rows([tokens - 1])
        return sum(merge([cache], rows).nbytes for cache in caches)

    @property
    def layers(self) -> int:
        return len(self._shapes)

    def own_bytes(self, tokens: int, chunk: int) -> int:
        """What the caches of a sequence by itself hold, once it is computed in chunks."""
        return sum(cache.nbytes for cache in self._caches(tokens, chunk))

    def prefill(self, tokens: int, chunk: int, pick: Pick) -> int:
        """The peak of a prompt's last chunk, if that is a whole one, its own caches included."""
        done = max(tokens - chunk, 0)

        def run(fresh: mx.array, *weights: mx.array) -> list[mx.array]:
            decoder, caches = self._with(weights), self._caches(done, chunk)
            hidden = decoder.hidden(fresh, caches, length=tokens)
            return [pick(decoder.logits(hidden[:, -1:])[:, -1]), *_arrays(caches)]

        # How large a cache has grown depends on where the chunks were cut: here it may be smaller than it can be.
        grown = self._caches(done, chunk)
        for cache, shapes in zip(grown, self._shapes, strict=True):
            _fill(cache, shapes, tokens - done, chunk)
        short = self.own_bytes(tokens, chunk) - sum(cache.nbytes for cache in grown)
        return self._peak(run, mx.zeros((1, tokens - done), mx.int32)) + max(short, 0)

    def decode(self, rows: int, tokens: int, pick: Pick) -> int:
        """The peak of steps of so many rows, their caches included: two, as one runs ahead of the other."""

        def run(fresh: mx.array, *weights: mx.array) -> list[mx.array]:
            decoder, caches, where = self._with(weights), self._caches(tokens, chunk=tokens), None
            if rows > 1:
                where = Rows([tokens] * rows)
                caches = [merge([_hollow(cache)] * rows, where) for cache in caches]
            picked = fresh
            for _ in range(2):
                picked = pick(decoder(picked[:, None], caches)[:, -1])
                if where is not None:
                    where.advance()
            return [picked, *_arrays(caches)]

        return self._peak(run, mx.zeros((rows,), mx.int32))

    def _with(self, weights: Sequence[mx.array]) -> Decoder:
        self._decoder.update(tree_unflatten([(n, w) for (n, _), w in zip(self._weights, weights, strict=True)]))
        return self._decoder

    def _peak(self, run: Callable[..., Any], fresh: mx.array) -> int:
        try:
            return peak_bytes(run, fresh, *(w for _, w in self._weights))
        finally:
            self._with([w for _, w in self._weights])

    def _caches(self, tokens: int, chunk: int) -> list[Any]:
        """Caches that hold so many tokens of nothing."""
        caches = self._policy(self._decoder.spec)
        if tokens:
            for cache, shapes in zip(caches, self._shapes, strict=True):
                _fill(cache, shapes, tokens, chunk)
        return caches


def _arrays(caches: Sequence[Any]) -> list[mx.array]:
    return [array for cache in caches for array in cache.state]


def _shapes(cache: Any) -> _Shapes:
    attention = cache.attention if isinstance(cache, HybridCache) else cache
    recurrent = cache.recurrent if isinstance(cache, HybridCache) else cache
    state = recurrent.state if isinstance(recurrent, RecurrentCache) else []
    keys = values = None
    dtype = mx.float32
    if isinstance(attention, FullCache):
        keys, dtype = attention.keys.read().shape, attention.keys.read().dtype
        values = None if isinstance(attention.values, NoBuffer) else attention.values.read().shape
    return _Shapes(keys=keys, values=values, dtype=dtype, state=tuple((a.shape, a.dtype) for a in state))


def _fill(cache: Any, shapes: _Shapes, tokens: int, chunk: int) -> None:
    """As `tokens` tokens would, that come in chunks."""
    attention = cache.attention if isinstance(cache, HybridCache) else cache
    recurrent = cache.recurrent if isinstance(cache, HybridCache) else cache
    if isinstance(recurrent, RecurrentCache):
        recurrent.write([mx.zeros(shape, dtype) for shape, dtype in shapes.state], tokens)
    if not isinstance(attention, FullCache):
        return
    if isinstance(attention, WindowCache):  # whatever is beyond this has been forgotten
        whole = attention.sinks + attention.window + 2 * attention.slack + 2 * chunk
        skipped = max(tokens - whole, 0)
        for start in range(0, tokens - skipped, chunk):
            _append(attention, shapes, min(chunk, tokens - skipped - start))
        attention.offset += skipped
        attention.dropped += skipped
    else:
        _append(attention, shapes, tokens)


def _append(cache: FullCache, shapes: _Shapes, count: int) -> None:
    k, v = (
        None if shape is None else mx.zeros((*shape[:2], count, shape[3]), shapes.dtype)
        for shape in (shapes.keys, shapes.values)
    )
    cache.attend(k, k, v, None, lambda q, k, v, mask: q)


def _hollow(cache: Any) -> Any:
    """A cache that stands where another does and holds nothing, but for a recurrent memory."""
    if isinstance(cache, HybridCache):
        return HybridCache(_hollow(cache.attention), cache.recurrent)
    if not isinstance(cache, FullCache):
        return cache
    hollow = cache.copy()
    for buffer in (hollow.keys, hollow.values):
        buffer.remove(0, buffer.size)
        buffer.state = []
    return hollow


def rows_allocated(rows: int) -> int:
    """Rows that a batch has room for when they come one by one; see mlxgen.cache.slots."""
    room = min(rows, 2)
    while room < rows:
        room += max(1, room // 4)
    return room

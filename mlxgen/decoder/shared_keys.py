"""Layers that attend over the keys and values of an earlier layer, and have none of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.blueprint.mixers import attention_of
from mlxgen.blueprint.spec import AttentionSpec, LayerSpec
from mlxgen.decoder.segments import Packed
from mlxgen.protocols import LayerCache


class SharedKeys:
    """Which layer reads whose keys."""

    def __init__(self, layers: Sequence[LayerSpec]):
        self._lenders = {i: lender for i, layer in enumerate(layers) if (lender := keys_of(layer)) is not None}

    def __call__(self, caches: Sequence[LayerCache]) -> Sequence[Any]:
        """The caches of one pass: the lenders' remember what their layer attended over, the borrowers' give that."""
        if not self._lenders:
            return caches
        if isinstance(caches[0], Packed):
            for i, lender in self._lenders.items():
                caches[i].lender, caches[lender].lends = caches[lender], True
            return caches
        lenders, lent = self._lenders, {i: Lent(caches[i]) for i in self._lenders.values()}
        return [Borrowed(lent[lenders[i]], c) if i in lenders else lent.get(i, c) for i, c in enumerate(caches)]


def keys_of(layer: LayerSpec) -> int | None:
    """The number of the layer whose keys this one reads, if they are not its own."""
    attention = attention_of(layer.mixer)
    return attention.keys_of if isinstance(attention, AttentionSpec) else None


class Lent:
    """A layer's cache during one pass, and then what that layer attended over."""

    def __init__(self, cache: LayerCache):
        self._cache = cache
        self.offset = cache.offset
        self.make_mask = cache.make_mask
        self.seen: tuple[mx.array, mx.array] | None = None

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any, attention: Callable[..., mx.array]) -> mx.array:
        def remembering(q: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
            self.seen = keys, values
            return attention(q, keys, values, mask)

        return self._cache.attend(q, k, v, mask, remembering)


class Borrowed:
    """The cache of a layer without keys: it lets the layer see what another one saw, and counts the tokens."""

    def __init__(self, lent: Lent, own: Any):
        self._lent, self._own = lent, own
        self.offset = lent.offset

    def attend(self, q: mx.array, k: None, v: None, mask: Any, attention: Callable[..., mx.array]) -> mx.array:
        assert self._lent.seen is not None
        self._own.write((), q.shape[2])
        return attention(q, *self._lent.seen, mask)

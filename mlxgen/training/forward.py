"""The forward pass as it runs while training: noise on the embeddings, layers that are computed again.

Both wrap a module for the length of one pass, so the decoder and the names of its parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxgen.decoder.shared_keys import keys_of
from mlxgen.training.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Forward:
    """(decoder, batch) -> hidden states [B, L, H].

    neftune: alpha of the noise (arXiv:2310.05914), and `key` what it is drawn from. recompute: a layer's insides are
    computed again when its gradient is, and not kept until then (arXiv:1604.06174).
    """

    neftune: float | None = None
    key: mx.array | None = None
    recompute: bool = False

    def __call__(self, decoder: Any, batch: Batch) -> mx.array:
        packed = {} if batch.segments is None else {"segments": batch.segments}
        parts: dict[str, Any] = {}
        if self.neftune:
            assert self.key is not None
            parts["embed_tokens"] = _Noisy(decoder.embed_tokens, self.neftune, self.key)
        if self.recompute:
            parts["layers"] = _recomputed(decoder)
        with _replaced(decoder, parts):
            return decoder.hidden(batch.inputs, **packed)


PLAIN = Forward()


class _Noisy:
    """An embedding whose vectors [B, L, H] get uniform noise of alpha / sqrt(L * H)."""

    def __init__(self, embedding: nn.Module, alpha: float, key: mx.array):
        self._embedding, self._alpha, self._key = embedding, alpha, key

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self._embedding(tokens)
        size = self._alpha / (x.shape[-2] * x.shape[-1]) ** 0.5
        return x + mx.random.uniform(-size, size, x.shape, x.dtype, key=self._key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedding, name)


class _Recomputed:
    """A layer of which only inputs and outputs are kept."""

    def __init__(self, layer: nn.Module):
        self._layer, self._run = layer, nn.utils.checkpoint(layer)

    def __call__(self, *args: Any) -> mx.array:
        return self._run(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _recomputed(decoder: Any) -> list[Any]:
    """The layers, wrapped from the first that is trained on; those that share keys with others stay as they are."""
    specs = decoder.spec.layers
    shared = {i for i, spec in enumerate(specs) if keys_of(spec) is not None}
    shared |= {keys_of(specs[i]) for i in shared}
    trained = [i for i, layer in enumerate(decoder.layers) if tree_flatten(layer.trainable_parameters())]
    first = 0 if tree_flatten(decoder.embed_tokens.trainable_parameters()) else min(trained, default=0)
    return [layer if i < first or i in shared else _Recomputed(layer) for i, layer in enumerate(decoder.layers)]


@contextmanager
def _replaced(decoder: Any, parts: dict[str, Any]) -> Iterator[None]:
    before = {name: decoder[name] for name in parts}
    try:
        for name, part in parts.items():
            decoder[name] = part
        yield
    finally:
        for name, part in before.items():
            decoder[name] = part

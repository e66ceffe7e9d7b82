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
import numpy as np
from mlx.nn.utils import checkpoint
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
            length = batch.inputs.shape[1] if batch.segments is None else lengths(batch.segments)
            parts["embed_tokens"] = _Noisy(decoder.embed_tokens, self.neftune, self.key, length)
        if self.recompute:
            parts["layers"] = _recomputed(decoder)
        with _replaced(decoder, parts):
            return decoder.hidden(batch.inputs, **packed)


PLAIN = Forward()


class _Noisy:
    """An embedding whose vectors [B, L, H] get uniform noise of alpha / sqrt(L * H), L the length of their text."""

    def __init__(self, embedding: nn.Module, alpha: float, key: mx.array, length: int | mx.array):
        self._embedding, self._key = embedding, key
        self._size = alpha / length**0.5

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self._embedding(tokens)
        noise = mx.random.uniform(-1, 1, x.shape, mx.float32, key=self._key)
        return x + (noise * (self._size / x.shape[-1] ** 0.5)).astype(x.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedding, name)


def lengths(segments: mx.array) -> mx.array:
    """segments [B, L] -> how long the text of each token is, tokens as the decoder takes them then: [B * L, 1, 1]."""
    ids = np.asarray(segments)
    texts = ids + (ids.max() + 2) * np.arange(ids.shape[0])[:, None]  # the same number in another row is another text
    _, text, counts = np.unique(texts.reshape(-1), return_inverse=True, return_counts=True)
    return mx.array(counts[text].astype(np.float32)[:, None, None])


class _Recomputed:
    """A layer of which only inputs and outputs are kept."""

    def __init__(self, layer: nn.Module):
        self._layer, self._run = layer, checkpoint(layer)

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

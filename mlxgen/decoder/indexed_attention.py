"""Latent attention over the keys that a small indexer picks (DeepSeek Sparse Attention, DeepSeek-V3.2).

The indexer has keys of its own, one for each token. They stand behind the latent vectors in the same cache.

Shapes: B batch, L new tokens, S tokens seen, H index heads, D index_dim, T = B * L rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.special import IndexedAttentionSpec
from mlxgen.decoder.attention import split_heads
from mlxgen.decoder.latent_attention import LatentAttention
from mlxgen.decoder.rope import Rope
from mlxgen.errors import ConfigError
from mlxgen.protocols import LayerCache


class Indexer(nn.Module):
    """Scores of all keys for each query: the sum over heads of w * relu(q . k) (transformers models/deepseek_v32)."""

    def __init__(self, spec: IndexedAttentionSpec, hidden_size: int):
        super().__init__()
        assert spec.q_rank is not None and spec.rope is not None
        self.spec = spec
        self.wq_b = nn.Linear(spec.q_rank, spec.index_heads * spec.index_dim, bias=False)
        self.wk = nn.Linear(hidden_size, spec.index_dim, bias=False)
        self.k_norm = nn.LayerNorm(spec.index_dim, eps=1e-6)
        self.weights_proj = nn.Linear(hidden_size, spec.index_heads, bias=False)
        self.rope = Rope(replace(spec.rope, interleaved=False), spec.index_dim)

    def keys(self, x: mx.array, batch: int, offset: int | mx.array, length: int) -> mx.array:
        """x [T, hidden] -> [B, 1, L, D]."""
        return self.rope(split_heads(self.k_norm(self.wk(x)), batch, self.spec.index_dim), offset, length)

    def queries(self, q_latent: mx.array, batch: int, offset: int | mx.array, length: int) -> mx.array:
        """q_latent [T, q_rank] -> [B, H, L, D]."""
        return self.rope(split_heads(self.wq_b(q_latent), batch, self.spec.index_dim), offset, length)

    def visible(self, q: mx.array, keys: mx.array, x: mx.array, mask: Any) -> Any:
        """The mask of the best `index_top_k` keys [B, 1, L, S], q [B, H, L, D], keys [B, 1, S, D], x [T, hidden]."""
        B, _, L, _ = q.shape
        seen, top_k = keys.shape[2], self.spec.index_top_k
        if seen <= top_k:
            return mask
        if keys.shape[0] != B:
            raise ConfigError(f"`data.packing` must be false with this model for texts of more than {top_k} tokens.")
        scores = mx.maximum(q.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2), 0)
        weights = split_heads(self.weights_proj(x).astype(mx.float32), B, 1)  # [B, H, L, 1]
        scores = (scores * weights).sum(axis=1, keepdims=True)  # constant factors do not change the order
        if isinstance(mask, str):  # "causal": the new tokens are the last L of S
            mask = mx.arange(seen - L, seen)[:, None] >= mx.arange(seen)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        best = mx.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]
        chosen = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), best, mx.array(True), axis=-1)
        return chosen if mask is None else chosen & mask


class IndexedAttention(LatentAttention):
    """Latent attention in which each query sees the keys that the indexer finds best."""

    def __init__(self, spec: IndexedAttentionSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        self.indexer = Indexer(spec, hidden_size)

    def __call__(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        q_latent = self.query_latent(x)
        queries = self.indexer.queries(q_latent, batch, cache.offset, length)
        keys = self.indexer.keys(x, batch, cache.offset, length)
        indexed = _IndexedCache(cache, keys, lambda keys, mask: self.indexer.visible(queries, keys, x, mask))
        return self.attended(x, q_latent, batch, indexed, mask, length)


class _IndexedCache:
    """A layer's cache with the indexer's keys behind the attention's; what is read is narrowed by `visible`."""

    def __init__(self, cache: LayerCache, keys: mx.array, visible: Callable[[mx.array, Any], Any]):
        self.offset = cache.offset
        self._cache, self._keys, self._visible = cache, keys, visible

    def attend(self, q: mx.array, k: mx.array, v: None, mask: Any, attention: Callable[..., mx.array]) -> mx.array:
        def narrowed(q: mx.array, keys: mx.array, values: None, mask: Any) -> mx.array:
            return attention(q, keys[..., :width], values, self._visible(keys[..., width:], mask))

        width = k.shape[-1]
        return self._cache.attend(q, mx.concatenate([k, self._keys], axis=-1), v, mask, narrowed)

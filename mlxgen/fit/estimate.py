"""What a run holds at most: its weights, its caches, and what is alive while it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlxgen.cache.buffer import STEP
from mlxgen.config import Config
from mlxgen.decoder import Decoder
from mlxgen.fit.phases import Phases, rows_allocated
from mlxgen.fit.weights import layer_bytes, weights_bytes
from mlxgen.loading import Described, precision
from mlxgen.passes.fuse_projections import fuse_projections
from mlxgen.sampler import Sampler, sample


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """For `batch` requests of `context` tokens each, prompt and answer. Activations: all but weights and caches."""

    batch: int
    context: int
    weights_bytes: int
    cache_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.activations_bytes


class Estimator:
    """Estimates for one model under one configuration. Loads nothing and computes nothing.

    policy: the cache policy, instead of the configuration's. sampler: how tokens are picked.
    """

    def __init__(self, described: Described, config: Config, policy: Callable[[Any], list[Any]], sampler: Sampler):
        dtype, dequantize = precision(config.model)
        self._chunk = config.prefill_chunk
        self._sampler = sampler
        decoder = Decoder(described.spec)
        plain = dtype or described.cache_dtype
        self.weights_bytes = weights_bytes(
            decoder, described.config, described.checkpoint, plain, dequantize=dequantize
        )
        self._loading = layer_bytes(decoder, plain)
        for layer in decoder.layers if config.model.fuse else ():
            fuse_projections(layer)
        self._phases = Phases(decoder, policy, described.cache_dtype)
        self.estimate = lru_cache(1024)(self._estimate)

    def _estimate(self, batch: int, context: int) -> Estimate:
        """`context` counts prompt and answer."""
        cache = caches_bytes(self._phases, batch, context, self._chunk)
        peak = max(self._loading, self._prefill(batch, context), self._decode(batch, context))
        if batch > 1:
            # A batch gets longer, or loses a row, layer by layer: a layer's old arrays stand beside the new ones.
            layer = cache // self._phases.layers
            leaving = cache + self._phases.row_bytes(context)  # of the last row, which takes the place of another
            peak = max(peak, self._decode(batch, context) + layer, leaving + layer)
        return Estimate(
            batch=batch,
            context=context,
            weights_bytes=self.weights_bytes,
            cache_bytes=cache,
            activations_bytes=max(peak - cache, 0),
        )

    def _prefill(self, batch: int, context: int) -> int:
        """The last prompt, while all others decode."""
        others = 0 if batch == 1 else caches_bytes(self._phases, batch - 1, context, self._chunk)
        return others + self._phases.prefill(context, self._chunk, self._pick)

    def _decode(self, batch: int, context: int) -> int:
        spare = rows_allocated(batch) - batch if batch > 1 else 0
        return self._phases.decode(batch, context, self._pick) + spare * self._phases.row_bytes(context)

    def _pick(self, logits: mx.array) -> mx.array:
        rows = logits.shape[0]
        tokens, _ = sample(logits, [self._sampler] * rows, [self._sampler.start((1,))] * rows)
        return tokens


def caches_bytes(phases: Phases, rows: int, tokens: int, chunk: int) -> int:
    """Of rows of so many tokens. A row alone has its own; together they have as many slots as the longest."""
    if rows <= 1:
        return phases.own_bytes(tokens, chunk) if rows else 0
    return rows_allocated(rows) * phases.row_bytes(-(-tokens // STEP) * STEP)

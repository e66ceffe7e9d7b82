"""What the memory there is allows: before a model is loaded, and then for the requests that come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlxgen.cache.buffer import STEP
from mlxgen.config import Config
from mlxgen.decoder import Decoder
from mlxgen.engine import Generation, Scheduler
from mlxgen.errors import FitError
from mlxgen.fit.estimate import Estimate, Estimator, caches_bytes
from mlxgen.fit.limit import memory_limit_bytes
from mlxgen.fit.phases import Phases
from mlxgen.loading import Described

_AMPLE = 4  # where memory is so many times the weights, nobody needs to look closer
_SPARE = 1 << 30
_MOST_ROWS = 64
_FOR_CACHES = 0.8  # of what is free beside the weights, where nothing more is known


def check_fits(described: Described, config: Config, policy: Callable[..., Any], sampler: Any) -> Estimate | None:
    """Raise FitError, with what would fit, if the run that is asked for does not; None where it surely does.

    That is `batch` requests of `context` tokens; where these are not given, one request, whose prompt takes one chunk.
    """
    free = memory_limit_bytes(config.memory_limit) - mx.get_active_memory()
    asked = (config.batch, config.context, config.memory_limit) != (None, None, None)
    rough = described.checkpoint.total_bytes if described.checkpoint else 0
    if not asked and free > _AMPLE * 4 * rough + _SPARE:  # 8 bits in the file may be 32 in memory
        return None
    estimator = Estimator(described, config, policy, sampler)
    usual = config.prefill_chunk + config.max_tokens
    context = min(config.context or usual, described.spec.context or 1 << 62)
    estimate = estimator.estimate(config.batch or 1, context)
    if estimate.total_bytes > free:
        raise FitError(
            f"the run needs {gb(estimate.total_bytes)} (weights {gb(estimate.weights_bytes)}, caches "
            f"{gb(estimate.cache_bytes)}, activations {gb(estimate.activations_bytes)}), but {gb(free)} are free; "
            f"{advice(estimator, estimate, free)}."
        )
    return estimate


def advice(estimator: Estimator, estimate: Estimate, free: int) -> str:
    """What would fit, in the words of the configuration."""
    if estimator.weights_bytes > free:
        return "take a smaller model, or one with fewer bits"
    found = []
    if batch := largest(lambda n: estimator.estimate(n, estimate.context), estimate.batch, free):
        found.append(f"batch={batch}")
    if context := largest(lambda n: estimator.estimate(estimate.batch, n), estimate.context, free):
        found.append(f"context={context}")
    fits = f"what fits: {' or '.join(found)}; " if found else ""
    return f"{fits}cache=quantized, cache=window or a smaller prefill_chunk need less"


def largest(estimate: Callable[[int], Estimate], below: int, free: int) -> int:
    """The largest number under `below`, or 0, for which the estimate is within `free` bytes."""
    low, high = 0, below
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        if estimate(middle).total_bytes <= free:
            low = middle
        else:
            high = middle
    return low


def open_scheduler(
    config: Config, decoder: Decoder, policy: Callable[..., Any], reserved: Estimate | None
) -> Scheduler:
    """Admits what fits beside the loaded weights. reserved: what was planned for, if that was looked into."""
    free = memory_limit_bytes(config.memory_limit) - mx.get_active_memory()
    budget = int(_FOR_CACHES * free) if reserved is None else free - reserved.activations_bytes
    phases: list[Phases] = []  # made when it is first needed

    @lru_cache(4096)
    def cost(rows: int, tokens: int, chunk: int) -> int:
        if not phases:
            phases.append(Phases.of(decoder, policy))
        # One of them may just have been computed by itself.
        return caches_bytes(phases[0], rows, tokens, chunk) + (phases[0].own_bytes(tokens, chunk) if rows > 1 else 0)

    def together(generations: Sequence[Generation]) -> int:
        longest = max(len(g.request.prompt) + g.request.max_tokens for g in generations)
        chunk = max(g.request.prefill_chunk for g in generations)
        return cost(len(generations), -(-longest // STEP) * STEP, chunk)

    return Scheduler(cost=together, budget_bytes=max(budget, 0), max_rows=config.batch or _MOST_ROWS)


def gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"

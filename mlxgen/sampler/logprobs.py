"""Log-probabilities of the model itself."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxgen.sampler.select import top_ids


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """Natural logarithms, all <= 0."""

    chosen: mx.array  # [B] of the tokens asked for
    top_ids: mx.array  # [B, top] int32, the most likely first, of equals the lowest id
    top: mx.array  # [B, top]


def logprobs(logits: mx.array, tokens: mx.array, top: int = 0) -> LogProbs:
    """Log-probabilities of `tokens` [B] and of the `top` most likely tokens, under raw `logits` [B, V].

    It is the model's distribution: before penalties, bias, truncation and temperature. Lazy.
    """
    logits = logits.astype(mx.float32)
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    ids = top_ids(logits, min(top, logits.shape[-1]))
    return LogProbs(
        chosen=mx.take_along_axis(values, tokens[:, None], axis=-1)[:, 0],
        top_ids=ids,
        top=mx.take_along_axis(values, ids, axis=-1),
    )

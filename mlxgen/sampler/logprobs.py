"""Log-probabilities: of the model itself, and of what a sampler's chain makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxgen.sampler.sampler import Sampler, State, process
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


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The likeliest next tokens of one row, falling. Natural logarithms."""

    ids: mx.array  # [count] int32
    scores: mx.array  # [count] log-probabilities after the sampler's chain, -inf for what it drops
    logprobs: mx.array  # [count] the model's own
    top_ids: mx.array  # [top] as in LogProbs
    top: mx.array  # [top]


def candidates(
    logits: mx.array, scores: mx.array, sampler: Sampler, state: State, count: int, top: int = 0
) -> Candidates:
    """The `count` best continuations under a sampler's chain, for beam search. Lazy.

    logits: raw [1, V]. scores: what the chain starts from [1, V], the same but for tokens that must not be.
    """
    processed = process(scores, [sampler], [state])
    processed = processed - mx.logsumexp(processed, axis=-1, keepdims=True)
    ids = top_ids(processed, min(count, processed.shape[-1]))
    own = logits.astype(mx.float32)
    own = own - mx.logsumexp(own, axis=-1, keepdims=True)
    best = top_ids(own, min(max(top, 0), own.shape[-1]))
    return Candidates(
        ids=ids[0],
        scores=mx.take_along_axis(processed, ids, axis=-1)[0],
        logprobs=mx.take_along_axis(own, ids, axis=-1)[0],
        top_ids=best[0],
        top=mx.take_along_axis(own, best, axis=-1)[0],
    )

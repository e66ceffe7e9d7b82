"""The autoregressive loop: compute the prompt once (prefill), then one token at a time (decode).

The loop runs one step ahead: while the host looks at a token, the device already computes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.engine.sequence import TokenSequence
from mlxgen.errors import RequestError
from mlxgen.protocols import LanguageModel

# Now and then MLX's pool of freed buffers is given back, as buffer sizes change while the caches grow.
_CLEAR_EVERY = 256


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate. `eos_ids` end the answer; `top_logprobs` below 0 asks for no log-probabilities."""

    prompt: tuple[int, ...]
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    top_logprobs: int = -1
    prefill_chunk: int = 512


@dataclass(frozen=True, kw_only=True)
class Token:
    """One generated token. `ends`: it is an end-of-sequence token."""

    id: int
    ends: bool
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


# logits [1, V] -> the token [1], and None or log-probabilities with `chosen` [1], `top_ids` and `top` [1, n].
Pick = Callable[[mx.array], tuple[mx.array, Any]]


def generate(
    model: LanguageModel, sequence: TokenSequence, request: Request, pick: Pick
) -> Iterator[Token]:
    """Yield the answer's tokens, an end-of-sequence token included as the last.

    `pick` chooses a token; it must stay lazy. A token below 0 means that the logits were no numbers: RequestError.
    When the generator ends, or is closed early, `sequence` holds just the tokens that were computed and given out.
    """
    if not request.max_tokens:
        return
    known = list(request.prompt)
    try:
        sequence.rewind(request.prompt)
        logits = prefill(model, sequence, request.prompt, request.prefill_chunk)
        token, extra = pick(logits)
        mx.async_eval(token)
        for produced in range(1, request.max_tokens + 1):
            following = None
            if produced < request.max_tokens:
                following = pick(_next_logits(model, sequence, known, token, request.prefill_chunk))
                mx.async_eval(following[0])
            item = _token(token, extra, request)
            known.append(item.id)
            yield item
            if item.ends or following is None:
                return
            token, extra = following
            if produced % _CLEAR_EVERY == 0:
                mx.clear_cache()
    finally:
        sequence.tokens = known
        sequence.keep(min(len(known), sequence.caches[0].offset))


def prefill(model: LanguageModel, sequence: TokenSequence, prompt: Sequence[int], chunk: int) -> mx.array:
    """Compute the tokens of `prompt` that the sequence does not hold yet; returns the last one's logits [1, V].

    In chunks, so that memory does not grow with the square of the prompt; the output head sees one position.
    """
    todo = list(prompt[len(sequence.tokens) :])
    while len(todo) > chunk:
        model.hidden(mx.array([todo[:chunk]]), sequence.caches, length=len(prompt))
        mx.eval([cache.state for cache in sequence.caches])
        todo = todo[chunk:]
    hidden = model.hidden(mx.array([todo]), sequence.caches, length=len(prompt))
    sequence.tokens = list(prompt)
    return model.logits(hidden[:, -1:])[:, -1]


def _next_logits(
    model: LanguageModel, sequence: TokenSequence, known: list[int], token: mx.array, chunk: int
) -> mx.array:
    if sequence.caches[0].offset == model.recompute_at:
        everything = [*known, int(token.item())]
        sequence.reset()
        return prefill(model, sequence, everything, chunk)
    return model(token[:, None], sequence.caches)[:, -1]


def _token(token: mx.array, extra: Any, request: Request) -> Token:
    number = int(token.item())
    if number < 0:
        raise RequestError("the model's scores are not numbers (NaN) or all excluded; the answer ends here.")
    if extra is None:
        return Token(id=number, ends=number in request.eos_ids)
    top = zip(extra.top_ids[0].tolist(), extra.top[0].tolist(), strict=True)
    return Token(id=number, ends=number in request.eos_ids, logprob=extra.chosen.item(), top_logprobs=tuple(top))

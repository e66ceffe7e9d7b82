"""Prefill: the prompt is computed, and its keys and values stored, before the first token can be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxgen.engine.sequence import TokenSequence
from mlxgen.protocols import LanguageModel


def prefill_chunk(
    model: LanguageModel,
    sequence: TokenSequence,
    tokens: Sequence[int],
    chunk: int,
    look: Callable[[mx.array, int, int], None] | None = None,
) -> mx.array | None:
    """Compute up to `chunk` of the tokens that the sequence does not hold yet.

    Returns the logits of the last token [1, V] once all are computed, None before that: the output head sees one
    position of a prompt, and memory does not grow with its square.
    look: called with the hidden states [1, stop - start, hidden], and start and stop, before the next chunk.
    """
    start, stop = len(sequence.tokens), sequence.next_stop(len(tokens), chunk)
    hidden = model.hidden(mx.array([tokens[start:stop]]), sequence.caches, length=len(tokens))
    sequence.tokens = list(tokens[:stop])
    if look is not None:
        look(hidden, start, stop)
    if stop == len(tokens):
        return model.logits(hidden[:, -1:])[:, -1]
    sequence.mark_if_due(len(tokens))
    mx.eval([cache.state for cache in sequence.caches])
    return None


def prefill(model: LanguageModel, sequence: TokenSequence, tokens: Sequence[int], chunk: int) -> mx.array:
    """All of it: the logits of the last token [1, V]."""
    while True:
        logits = prefill_chunk(model, sequence, tokens, chunk)
        if logits is not None:
            return logits

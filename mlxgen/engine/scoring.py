"""Log-probabilities of a prompt's own tokens, without the logits of all its positions at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxgen.engine.request import Token
from mlxgen.errors import RequestError
from mlxgen.protocols import LanguageModel

_POSITIONS = 64  # whose logits are held at once


def score_tokens(
    model: LanguageModel, logprobs: Callable[..., Any], hidden: mx.array, following: Sequence[int], top: int
) -> list[Token]:
    """Each of the `following` tokens with its log-probability, and the `top` most likely ones in its place.

    hidden: [1, L, hidden] of the L tokens before each; fewer may be followed. Raises RequestError for NaN.
    """
    scored: list[Token] = []
    for start in range(0, len(following), _POSITIONS):
        part = list(following[start : start + _POSITIONS])
        logits = model.logits(hidden[:, start : start + len(part)])[0]
        found = logprobs(logits, mx.array(part), top)
        mx.eval(found.chosen, found.top_ids, found.top)
        rows = zip(part, found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist(), strict=True)
        for token, value, ids, values in rows:
            if math.isnan(value):
                raise RequestError("the model's scores are not numbers (NaN).")
            best = tuple(zip(ids, values, strict=True))
            scored.append(Token(id=token, ends=False, logprob=value, top_logprobs=best))
    return scored

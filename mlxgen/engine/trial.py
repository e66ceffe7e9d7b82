"""Guessed tokens while the model checks them.

Shapes: L tokens fed, the last known one and the guesses; V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxgen.engine.request import Generation
from mlxgen.engine.speculation import Guess
from mlxgen.engine.step import Step
from mlxgen.protocols import LayerCache

if TYPE_CHECKING:
    from mlxgen.engine.engine import Engine


@dataclass
class Trial:
    """What one row picks behind its last known token and behind each guess.

    tokens[i] counts if all guesses before it are right.
    """

    row: Generation
    guess: Guess
    tokens: mx.array  # [L]
    extras: list[Any]  # log-probabilities of each, or None
    before: list[Any]  # the sampler state of each
    after: list[Any]
    seconds: float = 0.0  # that went into it

    def outcome(self) -> tuple[list[int], int]:
        """(the picked tokens, how many guesses are right): waits for the device."""
        start = time.perf_counter()
        values = self.tokens.tolist()
        self.seconds += time.perf_counter() - start
        right = 0
        for guess, value in zip(self.guess.tokens, values, strict=False):
            if guess != value:
                break
            right += 1
        return values, right

    def step(self, place: int) -> Step:
        """What was picked at one place, as a step of its own."""
        tokens = self.tokens[place : place + 1]
        return Step([self.row], tokens, self.extras[place : place + 1], self.before[place : place + 1])


def allowed_part(row: Generation, guess: Guess | None) -> tuple[Guess | None, list[mx.array] | None]:
    """The guess as far as no end-of-sequence token is in it, and a guide allows it; and the masks for its places."""
    if guess is None:
        return None, None
    ends = (place for place, token in enumerate(guess.tokens) if token < 0 or token in row.request.eos_ids)
    guess, masks = guess.first(next(ends, len(guess.tokens))), None
    if row.guide is not None:
        try:
            masks = row.guide.masks(guess.tokens)
        except Exception:  # the row will meet it again when it picks its next token
            return None, None
        guess = guess.first(len(masks) - 1)
    return (guess if guess.tokens else None), masks


def take_back(caches: Sequence[LayerCache], count: int) -> bool:
    """Forget the newest tokens; False if the caches can't."""
    if not all(cache.can_trim(count) for cache in caches):
        return False
    for cache in caches:
        cache.trim(count)
    return True


def start_trial(row: Generation, guess: Guess, masks: list[mx.array] | None, logits: mx.array, engine: Engine) -> Trial:
    """Pick from logits [L, V], as far as masks [L] of [V] allow."""
    scores = logits if masks is None else mx.where(mx.stack(masks), logits, -mx.inf)
    assert engine.parts.sample_ahead is not None
    try:
        picked = engine.parts.sample_ahead(scores, row.request.sampler, row.state, guess.tokens)
    except Exception as error:
        row.error = error
        states = [row.state] * logits.shape[0]
        picked = mx.full((logits.shape[0],), -1), states, states
    tokens, before, after = picked
    extras = [engine.extra(row, logits[i : i + 1], tokens[i : i + 1]) for i in range(logits.shape[0])]
    mx.async_eval(tokens)
    return Trial(row, guess, tokens, extras, before, after)

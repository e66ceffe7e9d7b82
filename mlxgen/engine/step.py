"""Tokens that are being computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.engine.request import Generation


@dataclass
class Step:
    """Tokens that are being computed: tokens[i] belongs to rows[i]."""

    rows: list[Generation]
    tokens: mx.array  # [B]
    extras: list[Any]  # log-probabilities of a row, or None
    before: list[Any]  # the sampler states that these tokens were picked from

    def __add__(self, other: Step) -> Step:
        tokens = mx.concatenate([self.tokens, other.tokens])
        return Step(self.rows + other.rows, tokens, self.extras + other.extras, self.before + other.before)

    def only(self, keep: list[int]) -> Step | None:
        """Some of the rows."""
        if not keep:
            return None
        if len(keep) == len(self.rows):
            return self
        rows, extras, before = ([column[i] for i in keep] for column in (self.rows, self.extras, self.before))
        return Step(rows, self.tokens[mx.array(keep)], extras, before)

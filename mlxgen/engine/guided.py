"""Rows whose answers must follow a rule: before a token is picked, those that the rule forbids are taken out."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxgen.engine.request import Generation


def guided(rows: Sequence[Generation], logits: mx.array) -> mx.array:
    """Logits [B, V] with -inf for what a row's guide forbids; for everything, and an error, where a guide fails."""
    if all(row.guide is None for row in rows):
        return logits
    every = mx.ones((logits.shape[-1],), dtype=mx.bool_)
    return mx.where(mx.stack([every if row.guide is None else _mask(row, every) for row in rows]), logits, -mx.inf)


def _mask(row: Generation, every: mx.array) -> mx.array:
    assert row.guide is not None
    try:
        return row.guide.masks()[0]
    except Exception as error:
        row.error = error
        return ~every

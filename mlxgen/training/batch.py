"""What the training loop is fed with.

Shapes: B rows, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Example:
    """One text to learn from. `learned[i]`: whether the model is taught to produce token i. `name`: where it stands."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens, and the tokens that follow them.

    weights: what the loss at each position counts, 0 for padding and for what is not learned. segments: of packed
    rows, the number of the example that a position belongs to, from 0, -1 for padding; None: one example a row.
    """

    inputs: mx.array  # [B, L]
    targets: mx.array  # [B, L]
    weights: mx.array  # [B, L] float32
    segments: mx.array | None = None  # [B, L]
    num_tokens: int  # real ones, padding not counted
    names: tuple[str, ...] = ()  # where each row's examples stand, for messages: "train.jsonl line 7"

"""The recurrence of numbers that each decay by themselves: h_t = a_t * h_(t-1) + b_t.

All tokens of a chunk at once, by doubling: after step s, every position holds what the last 2^s tokens did
(Hillis and Steele, 1986).
"""

from __future__ import annotations

import mlx.core as mx

CHUNK = 64


def linear_scan(a: mx.array, b: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """a and b [B, L, ...], state [B, ...] before the first token -> (h [B, L, ...], state after the last)."""
    if a.shape[1] == 1:
        h = b + a * state[:, None]
        return h, h[:, 0]
    chunks = []
    for start in range(0, a.shape[1], CHUNK):
        chunks.append(_scan_chunk(a[:, start : start + CHUNK], b[:, start : start + CHUNK], state))
        # Gathered: a slice would hold the whole chunk's memory.
        state = mx.take(chunks[-1], mx.array([chunks[-1].shape[1] - 1]), axis=1)[:, 0]
    return (chunks[0] if len(chunks) == 1 else mx.concatenate(chunks, axis=1)), state


def _scan_chunk(a: mx.array, b: mx.array, state: mx.array) -> mx.array:
    length, step = a.shape[1], 1
    first = b[:, :1] + a[:, :1] * state[:, None]
    b = mx.concatenate([first, b[:, 1:]], axis=1)
    while step < length:
        b = mx.concatenate([b[:, :step], b[:, step:] + a[:, step:] * b[:, :-step]], axis=1)
        if 2 * step < length:
            a = mx.concatenate([a[:, :step], a[:, step:] * a[:, :-step]], axis=1)
        step *= 2
    return b

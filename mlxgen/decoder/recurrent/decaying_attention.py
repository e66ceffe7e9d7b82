"""Linear attention whose memory decays: S_t = exp(g_t) S_(t-1) + k_t^T v_t, y_t = q_t S_t, g_t <= 0.

Chunks of tokens at once (arXiv:2405.21060 section 6, arXiv:2312.06635): within a chunk it is attention with a mask of
decays, between chunks the memory is handed on. Everything is float32.

Shapes: B batch, G groups, R heads of a group that share queries and keys, L tokens, N key dim, P value dim, C chunk.
"""

from __future__ import annotations

import mlx.core as mx

CHUNK = 64


def decaying_attention(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """q, k [B, G, 1, L, N], v [B, G, R, L, P], g [B, G, R, L], state [B, G, R, N, P] -> (y like v, state)."""
    L = v.shape[-2]
    if L == 1:
        state = mx.addmm(state * mx.exp(g)[..., None], k.swapaxes(-1, -2), v)
        return q @ state, state
    size = min(L, CHUNK)
    q, k, v = (in_chunks(x, size) for x in (q, k, v))  # [B, G, R, L / C, C, ...]
    g = in_chunks(g[..., None], size)
    fade = mx.exp(mx.cumsum(g, axis=-2))  # what is left of the memory that a chunk found
    y = (q @ k.swapaxes(-1, -2) * decay_mask(g[..., 0])) @ v
    added = (k * fade_to_end(g)).swapaxes(-1, -2) @ v
    states = []
    for i in range(v.shape[-3]):
        states.append(state)
        state = state * fade[..., i, -1:, :] + added[..., i, :, :]
    y = y + (q * fade) @ mx.stack(states, axis=-3)
    return from_chunks(y, L), state


def decay_mask(g: mx.array) -> mx.array:
    """g [..., C] -> the decays after token j up to token i for j <= i, else 0 [..., C, C].

    Summed for each pair: differences of long sums would lose the digits of small decays behind large ones.
    """
    C = g.shape[-1]
    after = mx.where(mx.tri(C, k=-1, dtype=mx.bool_), g[..., None], 0.0)
    return mx.exp(mx.where(mx.tri(C, dtype=mx.bool_), mx.cumsum(after, axis=-2), -mx.inf))


def fade_to_end(g: mx.array) -> mx.array:
    """g [..., C, D] -> the decays after each token up to the last one [..., C, D]."""
    return mx.exp(mx.cumsum(g, axis=-2, reverse=True, inclusive=False))


def in_chunks(x: mx.array, size: int) -> mx.array:
    """[..., L, D] -> [..., chunks, size, D], zeros behind the end: tokens that add nothing and let nothing decay."""
    *front, L, D = x.shape
    if L % size:
        x = mx.pad(x, [(0, 0)] * len(front) + [(0, -L % size), (0, 0)])
    return x.reshape(*front, -1, size, D)


def from_chunks(x: mx.array, length: int) -> mx.array:
    """[..., chunks, size, D] -> [..., length, D]."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., :length, :]

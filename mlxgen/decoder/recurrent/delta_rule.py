"""The gated delta rule: S_t = exp(g_t) S_(t-1), then S_t += beta_t k_t^T (v_t - k_t S_t); y_t = q_t S_t.

Chunks of tokens at once: what the tokens of a chunk write depends on what those before them wrote, a triangular system
that is solved for all at once (arXiv:2406.06484 section 3, arXiv:2412.06464 section 3.3). Everything is float32.

Shapes: B batch, G groups, R heads of a group that share queries and keys, L tokens, N key dim, P value dim, C chunk, a
power of two. g is a number for each token, or one for each of its key channels: [..., 1] or [..., N].
"""

from __future__ import annotations

import mlx.core as mx

from mlxgen.decoder.recurrent.decaying_attention import decay_mask, fade_to_end, from_chunks, in_chunks

CHUNK = 64


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """q, k [B, G, 1, L, N], v [B, G, R, L, P], g [B, G, R, L, 1 or N], beta [B, G, R, L, 1], state [B, G, R, N, P]
    -> (y like v, state).
    """
    L = v.shape[-2]
    if L == 1:
        state = state * mx.exp(g).swapaxes(-1, -2)
        state = mx.addmm(state, k.swapaxes(-1, -2), beta * (v - k @ state))
        return q @ state, state
    size = min(1 << (L - 1).bit_length(), CHUNK)
    q, k, v, g, beta = (in_chunks(x, size) for x in (q, k, v, g, beta))
    fade, corrected = mx.exp(mx.cumsum(g, axis=-2)), beta * k  # fade: what is left of the memory that a chunk found
    products = decayed_products(mx.stack([mx.broadcast_to(q, corrected.shape), corrected]), k, g)
    seen, solved = products[0], inverse(products[1])
    writes, reads = solved @ (beta * v), solved @ (corrected * fade)
    keys, forget = (k * fade_to_end(g)).swapaxes(-1, -2), fade[..., -1:, :].swapaxes(-1, -2)
    q = q * fade
    outputs = []
    for i in range(v.shape[-3]):
        written = writes[..., i, :, :] - reads[..., i, :, :] @ state
        outputs.append(q[..., i, :, :] @ state + seen[..., i, :, :] @ written)
        state = mx.addmm(state * forget[..., i, :, :], keys[..., i, :, :], written)
    return from_chunks(mx.stack(outputs, axis=-3), L), state


def decayed_products(a: mx.array, b: mx.array, g: mx.array) -> mx.array:
    """a_i . b_j, each channel times its decays after j up to i, for j <= i, else 0.

    a, b [..., C, N], g [..., C, 1 or N] -> [..., C, C]. Decays are never divided, as what is left may be 0: where they
    differ by channel, the matrix is put together from blocks, and in each block decays are counted from the middle
    between its rows and its columns.
    """
    if g.shape[-1] == 1:
        return a @ b.swapaxes(-1, -2) * decay_mask(g[..., 0])
    matrix = (a * b).sum(axis=-1)[..., None, None]  # [..., C, 1, 1]: the diagonal as blocks of one
    size = 1
    while size < g.shape[-2]:
        a2, b2, g2 = (x.reshape(*x.shape[:-2], -1, 2 * size, x.shape[-1]) for x in (a, b, g))
        fade = mx.concatenate([fade_to_end(g2[..., :size, :]), mx.exp(mx.cumsum(g2[..., size:, :], axis=-2))], axis=-2)
        below = ((a2 * fade) @ (b2 * fade).swapaxes(-1, -2))[..., size:, :size]
        matrix = _stair(matrix[..., 0::2, :, :], below, matrix[..., 1::2, :, :])
        size *= 2
    return matrix[..., 0, :, :]


def inverse(matrix: mx.array) -> mx.array:
    """The inverse of I + what is below the diagonal, [..., C, C]; by blocks, with the error of one product.

    [[A, 0], [B, D]] has the inverse [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    *front, C, _ = matrix.shape
    blocks = mx.ones((*front, C, 1, 1))
    size = 1
    while size < C:
        pairs = matrix.reshape(*front, C // (2 * size), 2, size, C // (2 * size), 2, size)
        below = mx.moveaxis(mx.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        blocks = _stair(first, -(second @ below @ first), second)
        size *= 2
    return blocks[..., 0, :, :]


def _stair(a: mx.array, b: mx.array, d: mx.array) -> mx.array:
    """[[a, 0], [b, d]]."""
    top = mx.concatenate([a, mx.zeros_like(a)], axis=-1)
    return mx.concatenate([top, mx.concatenate([b, d], axis=-1)], axis=-2)

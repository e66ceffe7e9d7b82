"""The arithmetic that stages share: probabilities, the leading tokens, the draw. All lazy, rows independent.

Shapes: B rows, V vocabulary. Dropped tokens have logit -inf and weight 0.
"""

from __future__ import annotations

import math

import mlx.core as mx

LOG2_E = math.log2(math.e)
# A set whose mass equals the asked-for share up to float32 rounding is large enough.
SHARE = 1 - 1e-6
_LANES = 64
_BLOCK = 128  # tokens of the vocabulary per block of the draw
_SORT_AT_MOST = 4096  # on a CPU, how many tokens may be sorted


def weights(logits: mx.array, top: mx.array | None = None) -> mx.array:
    """Probabilities up to a factor, [B, V]: the most likely token has 1. top: the largest logit, [B, 1]."""
    top = logits.max(axis=-1, keepdims=True) if top is None else top
    # 2**x, as MLX's exp takes 2.4 times as long on a CPU.
    return mx.power(2.0, (logits - top) * LOG2_E)


def row_sum(x: mx.array) -> mx.array:
    """Sum over the last axis, [B, 1], in two levels: over a whole vocabulary float32 would lose digits."""
    rows, size = x.shape
    if size <= 4 * _LANES:
        return x.sum(axis=-1, keepdims=True)
    x = _pad(x, -size % _LANES, 0)
    return x.reshape(rows, _LANES, -1).sum(axis=1).sum(axis=-1, keepdims=True)


def drop(logits: mx.array, keep: mx.array) -> mx.array:
    """The logits with -inf where `keep` is false."""
    return mx.where(keep, logits, -mx.inf)


def largest(score: mx.array, count: int) -> mx.array:
    """Mask [B, V] of the `count` largest scores; of equal scores the lowest index first."""
    keys = _ranks(score)
    kth = score.shape[-1] - count
    return keys >= mx.partition(keys, kth, axis=-1)[..., kth : kth + 1]


def top_ids(score: mx.array, count: int) -> mx.array:
    """The `count` ids of the largest scores, falling, [B, count] int32; of equal scores the lowest first."""
    size = score.shape[-1]
    if count == 0:
        return mx.zeros((score.shape[0], 0), dtype=mx.int32)
    keys = mx.partition(_ranks(score), size - count, axis=-1)[..., size - count :]
    return _index(mx.sort(keys, axis=-1)[..., ::-1], size)


def leading(mass: mx.array, need: mx.array, score: mx.array | None = None) -> mx.array:
    """Mask [B, V] of the fewest tokens, in order of falling score, whose masses add up to `need` [B, 1] > 0.

    The score is the mass itself unless given. Of equal scores the lowest index comes first. The search is
    a weighted quickselect of static shapes: cut the candidates into an upper and a lower half, go on in the
    half where the sum is reached, sort what is small enough. So a CPU never sorts a vocabulary. On a GPU,
    where MLX's partition is a sort, one sort does it all.
    """
    size = mass.shape[-1]
    halvings = _halvings(size)
    odd = -size % 2**halvings
    mass = _pad(mass, odd, 0)
    if score is None:
        keys, mass_of = _pack(mass.view(mx.int32)), _mass_in_key
    else:
        keys = _ranks(_pad(score, odd, -math.inf))

        def mass_of(keys: mx.array) -> mx.array:
            return mx.take_along_axis(mass, _index(keys, mass.shape[-1]), axis=-1)

    rest = keys
    for _ in range(halvings):
        half = rest.shape[-1] // 2
        rest = mx.partition(rest, half, axis=-1)
        lower, upper = rest[..., :half], rest[..., half:]
        found = row_sum(mass_of(upper))
        inside = found >= need
        rest = mx.where(inside, upper, lower)
        need = mx.where(inside, need, need - found)
    rest = mx.sort(rest, axis=-1)
    above = mx.cumsum(mass_of(rest), axis=-1, reverse=True, inclusive=False)
    last = (above >= need).sum(axis=-1, keepdims=True)
    return (keys >= mx.take_along_axis(rest, last, axis=-1))[..., :size]


def draw_token(logits: mx.array, uniforms: mx.array) -> mx.array:
    """One token per row, [B] int32, from the softmax of float32 logits; uniforms [B, 2].

    -1 if the row holds NaN, +inf or nothing but -inf. Inverse CDF in two levels, a block of the vocabulary,
    then a token in it, each with its own number: the sums stay short, so float32 is exact enough for every V,
    and a GPU need not scan a vocabulary in one thread group.
    """
    rows, size = logits.shape
    top = logits.max(axis=-1, keepdims=True)
    block = min(size, _BLOCK)
    blocks = _pad(weights(logits, top), -size % block, 0).reshape(rows, -1, block)
    chosen = _first_above(blocks.sum(axis=-1), uniforms[:, :1])  # [B, 1]
    inside = mx.take_along_axis(blocks, chosen[..., None], axis=1)[:, 0]  # [B, block]
    token = chosen * block + _first_above(inside, uniforms[:, 1:])
    return mx.where(finite(top), token, -1)[:, 0]


def finite(x: mx.array) -> mx.array:
    return mx.abs(x) < mx.inf  # false for NaN


def _first_above(mass: mx.array, share: mx.array) -> mx.array:
    """The first index at which the running sum exceeds share (< 1) of the whole, [B, 1]; never of mass 0."""
    # A parallel scan rounds differently at every index, so only sums where there is mass may count.
    total = mx.where(mass > 0, mx.cumsum(mass, axis=-1), 0)
    above = total > share * total.max(axis=-1, keepdims=True)
    return mx.argmax(above, axis=-1, keepdims=True).astype(mx.int32)


def _ranks(score: mx.array) -> mx.array:
    """int64 keys [B, V], all different, that order by score, then by lower index."""
    bits = (score + 0.0).view(mx.int32)  # + 0.0 turns -0.0 into 0.0
    # Read as integers, the negative floats come in reversed order.
    return _pack(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _pack(bits: mx.array) -> mx.array:
    """int32 -> int64 keys: the bits in the upper half, the index, counted from the end, in the lower."""
    backwards = mx.arange(bits.shape[-1] - 1, -1, -1, dtype=mx.int64)
    return (bits.astype(mx.int64) << 32) | backwards


def _index(keys: mx.array, size: int) -> mx.array:
    return size - 1 - (keys & 0xFFFFFFFF).astype(mx.int32)


def _mass_in_key(keys: mx.array) -> mx.array:
    return (keys >> 32).astype(mx.int32).view(mx.float32)


def _pad(x: mx.array, count: int, value: float) -> mx.array:
    return mx.pad(x, [(0, 0), (0, count)], constant_values=value) if count else x


def _halvings(size: int) -> int:
    if mx.default_device().type == mx.DeviceType.gpu:
        return 0
    return max(0, math.ceil(math.log2(size / _SORT_AT_MOST)))

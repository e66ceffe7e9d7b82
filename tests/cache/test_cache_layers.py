"""Caches never change a result: any cutting into chunks equals one pass, and equals a plain NumPy attention."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.cache import FullCache, WindowCache
from mlxgen.cache.buffer import DenseBuffer, QuantizedBuffer

B, H, D = 2, 2, 32
# float32 sums in another order: about 1e-7 relative for values of size 1.
ATOL = 1e-5


def numpy_attention(q, k, v, visible):
    scores = np.einsum("bhld,bhsd->bhls", q, k) / np.sqrt(D)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhls,bhsd->bhld", weights / weights.sum(-1, keepdims=True), v)


def visible(length, window=None, sinks=0):
    """What each position may see, straight from the definition."""
    seen = np.zeros((length, length), bool)
    for p in range(length):
        for s in range(p + 1):
            seen[p, s] = window is None or s > p - window or s < sinks
    return seen


def attention(q, k, v, mask):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=D**-0.5, mask=mask)


def run(cache, q, k, v, chunks):
    outs, start = [], 0
    for n in chunks:
        part = [x[:, :, start : start + n] for x in (q, k, v)]
        outs.append(cache.attend(*part, cache.make_mask(n), attention))
        start += n
    return np.array(mx.concatenate(outs, axis=2))


def tensors(length, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((B, H, length, D)).astype(np.float32) for _ in range(3)]


chunkings = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(
    chunks=chunkings, window=st.one_of(st.none(), st.integers(1, 12)), sinks=st.integers(0, 5), slack=st.integers(1, 6)
)
def test_chunks_never_matter(chunks, window, sinks, slack):
    q, k, v = tensors(sum(chunks))
    if window is None:
        cache, sinks = FullCache(), 0
    else:
        cache = WindowCache(window, sinks)
        cache.slack = slack
    got = run(cache, *map(mx.array, (q, k, v)), chunks)
    want = numpy_attention(q, k, v, visible(sum(chunks), window, sinks))
    np.testing.assert_allclose(got, want, atol=ATOL)
    assert cache.offset == sum(chunks)


def test_window_of_three_sees_three():
    """Position 5 sees 3, 4 and 5, in the prompt's mask and in decode."""
    cache = WindowCache(3)
    q, k, v = map(mx.array, tensors(5))
    mask = cache.make_mask(5)
    assert np.array(mask)[4].tolist() == [False, False, True, True, True]
    cache.attend(q, k, v, mask, attention)
    seen = []
    cache.attend(*map(mx.array, tensors(1)), cache.make_mask(1), lambda q, k, v, m: seen.append(k.shape[2]) or v)
    assert seen == [3]


def test_keys_visible_to_each_chunk():
    """Window 4 in chunks of 3: the keys handed to attention are [0..2], [0..5], [3..8], [6..11], then four."""
    cache, position, seen = WindowCache(4), 0, []
    for n in (3, 3, 3, 3, 1):
        k = mx.broadcast_to(mx.arange(position, position + n, dtype=mx.float32)[:, None], (1, 1, n, D))
        cache.attend(k, k, k, cache.make_mask(n), lambda q, k, v, m: seen.append(np.array(k[0, 0, :, 0])) or v)
        position += n
    assert [(int(s[0]), int(s[-1])) for s in seen] == [(0, 2), (0, 5), (3, 8), (6, 11), (9, 12)]


@settings(max_examples=15, deadline=None)
@given(before=st.integers(1, 9), back=st.integers(1, 9), kind=st.sampled_from(["full", "window", "quantized"]))
def test_trimmed_equals_never_seen(before, back, kind):
    make = {
        "full": FullCache,
        "window": lambda: WindowCache(4, 1),
        "quantized": lambda: FullCache(QuantizedBuffer(8, 32, 2), QuantizedBuffer(8, 32, 2)),
    }[kind]
    q, k, v = map(mx.array, tensors(before + back + 3))
    trimmed, fresh = make(), make()
    run(trimmed, q[:, :, : before + back], k[:, :, : before + back], v[:, :, : before + back], [before, back])
    assert trimmed.trim(back) == back and trimmed.offset == before
    run(fresh, q[:, :, :before], k[:, :, :before], v[:, :, :before], [before])
    rest = [x[:, :, before : before + 3] for x in (q, k, v)]
    np.testing.assert_array_equal(run(trimmed, *rest, [1, 2]), run(fresh, *rest, [1, 2]))


def test_trim_then_add_counts_the_kept():
    """Six tokens, three taken back, one added: length 4, and the removed ones stay removed."""
    cache = FullCache()
    q, k, v = map(mx.array, tensors(7))
    run(cache, q[:, :, :6], k[:, :, :6], v[:, :, :6], [6])
    assert cache.trim(3) == 3
    run(cache, q[:, :, 6:], k[:, :, 6:], v[:, :, 6:], [1])
    keys = cache.keys.read()
    assert keys.shape[2] == cache.offset == 4
    np.testing.assert_array_equal(np.array(keys[:, :, 3:]), np.array(k[:, :, 6:]))


def test_a_window_refuses_to_go_back_beyond_what_it_keeps():
    cache = WindowCache(3)
    cache.slack = 1
    q, k, v = map(mx.array, tensors(30))
    run(cache, q, k, v, [1] * 30)
    assert cache.trim(20) == 0 and cache.offset == 30


@settings(max_examples=15, deadline=None)
@given(chunks=chunkings, bits=st.sampled_from([2, 3, 4, 5, 6, 8]), start=st.integers(0, 10))
def test_quantized_buffer_equals_quantizing_each_token(chunks, bits, start):
    """What is read never depends on chunks, and is MLX's own quantization of every token from `start` on."""
    x = mx.array(tensors(sum(chunks))[0])
    buffer, at = QuantizedBuffer(bits, 32, start), 0
    for n in chunks:
        buffer.append(x[:, :, at : at + n])
        at += n
    rounded = mx.dequantize(*mx.quantize(x, group_size=32, bits=bits), group_size=32, bits=bits)
    want = mx.concatenate([x[:, :, :start], rounded[:, :, start:]], axis=2)
    np.testing.assert_array_equal(np.array(buffer.read()), np.array(want))
    assert buffer.size == sum(chunks)


@pytest.mark.parametrize("make", [DenseBuffer, lambda: QuantizedBuffer(4, 32, 3)])
def test_a_copy_is_independent(make):
    x = mx.array(tensors(6)[0])
    one = make()
    one.append(x[:, :, :4])
    two = one.copy()
    one.append(x[:, :, 4:5])
    two.append(x[:, :, 5:6])
    last = [np.array(b.read())[:, :, 4:] for b in (one, two)]
    assert not np.array_equal(*last) and one.size == two.size == 5

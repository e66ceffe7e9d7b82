"""Caches in files: continuing from a file equals never having stopped."""

import mlx.core as mx
import pytest

from mlxgen.cache import Full, Quantized, Window, load_caches, save_caches
from mlxgen.errors import ModelError
from mlxgen.testing.models import tiny_decoder

POLICIES = [Full(), Window(size=12, sinks=2), Quantized(k_bits=8, v_bits=4, group_size=32, start=3)]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def decoder(request):
    return tiny_decoder(request.param, head_dim=32, sliding_window=8)


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "window", "quantized"])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_restored_equals_uninterrupted(decoder, policy, length, tmp_path):
    tokens = mx.arange(1, length + 6)[None]
    caches, file = policy(decoder.spec), tmp_path / "prompt.safetensors"
    decoder(tokens[:, :length], caches)
    save_caches(file, caches, tokens[0, :length].tolist(), "this")
    want = decoder(tokens[:, length:], caches)
    restored = policy(decoder.spec)
    assert load_caches(file, restored, "this") == tokens[0, :length].tolist()
    assert [c.offset for c in restored] == [length] * len(restored)
    assert mx.array_equal(decoder(tokens[:, length:], restored), want)


def test_the_file_holds_the_tokens_not_the_allocation(decoder, tmp_path):
    sizes = []
    for length in (1, 200):
        caches = Full()(decoder.spec)
        decoder(mx.ones((1, length), mx.int32), caches)
        save_caches(tmp_path / f"{length}", caches, [1] * length, "this")
        sizes.append((tmp_path / f"{length}").stat().st_size)
    per_token = 2 * len(decoder.layers) * 2 * 32 * 4  # keys and values, 2 kv heads of 32, float32
    assert sizes[1] - sizes[0] == pytest.approx(199 * per_token, rel=0.02)
    assert not list(tmp_path.glob(".*"))


def test_another_models_file_is_refused(decoder, tmp_path):
    caches, file = Full()(decoder.spec), tmp_path / "c"
    decoder(mx.ones((1, 2), mx.int32), caches)
    save_caches(file, caches, [1, 1], "this")
    with pytest.raises(ModelError, match="another model"):
        load_caches(file, Full()(decoder.spec), "that")
    with pytest.raises(ModelError, match="another model"):
        load_caches(file, Window(size=12)(decoder.spec), "this")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ModelError, match="no saved cache"):
        load_caches(file, Full()(decoder.spec), "this")

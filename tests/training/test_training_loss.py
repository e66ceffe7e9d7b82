import math

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from training_batches import make_batch

from mlxgen.testing.models import tiny_decoder
from mlxgen.training import loss as module
from mlxgen.training.batch import Batch
from mlxgen.training.forward import Forward
from mlxgen.training.loss import evaluation_loss, next_token_loss, total_weight


def plain_loss(decoder, batch):
    """The oracle: all logits at once."""
    logits = decoder(batch.inputs).astype(mx.float32)
    return (nn.losses.cross_entropy(logits, batch.targets) * batch.weights).sum()


def gradients(decoder, loss, *args):
    value, tree = nn.value_and_grad(decoder, loss)(decoder, *args)
    return value.item(), dict(tree_flatten(tree))


def assert_same(ours, theirs, tolerance=1e-5):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, expected in theirs[1].items():
        size = mx.abs(expected).max().item()
        assert mx.abs(ours[1][name] - expected).max().item() <= tolerance * (size + 1e-6), name


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": False}), ("gemma2", {}), ("cohere", {})],
)
@given(rows=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(family, changes, rows, seed):
    decoder, batch = tiny_decoder(family, **changes), make_batch(seed)
    expected = gradients(decoder, plain_loss, batch)
    before = module._CHUNK_ELEMENTS
    module._CHUNK_ELEMENTS = rows * 298
    try:
        assert_same(gradients(decoder, next_token_loss, batch), expected)
        assert evaluation_loss(decoder, batch).item() == pytest.approx(expected[0], rel=1e-6)
    finally:
        module._CHUNK_ELEMENTS = before


def test_frozen_head_gets_no_gradient_and_passes_it_on():
    decoder, batch = tiny_decoder(tie_word_embeddings=False), make_batch(1)
    decoder.freeze()
    decoder.layers[1].unfreeze()
    expected = gradients(decoder, plain_loss, batch)
    assert all(name.startswith("layers.1.") for name in expected[1])
    assert_same(gradients(decoder, next_token_loss, batch), expected)


LAYERS = ["sliding_attention", "full_attention"] * 2  # the last two read the keys of the first


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3n_text"])
def test_layers_computed_again_give_the_same_gradients(family):
    changes = {
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "gemma3n_text": {
            "vocab_size_per_layer_input": 298,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "layer_types": LAYERS,
        },
    }
    decoder = tiny_decoder(family, **changes.get(family, {}))
    batch = make_batch(3)
    expected = gradients(decoder, next_token_loss, batch)
    assert_same(gradients(decoder, next_token_loss, batch, Forward(recompute=True)), expected)


def test_a_batch_without_learned_tokens_is_zero():
    batch = make_batch(0, share=-1.0)
    assert total_weight(batch) == 0
    value, grads = gradients(tiny_decoder(), next_token_loss, batch)
    assert value == 0 and all(mx.abs(g).max().item() == 0 for g in grads.values())


def test_weights_count():
    decoder, batch = tiny_decoder(), make_batch(5)
    double = Batch(**{**vars(batch), "weights": batch.weights * 2.0})
    assert next_token_loss(decoder, double).item() == pytest.approx(
        2 * next_token_loss(decoder, batch).item(), rel=1e-6
    )


def test_noise_on_embeddings_is_of_the_papers_size_and_leaves_the_decoder_alone():
    decoder, batch = tiny_decoder(), make_batch(2)
    before = decoder.embed_tokens
    noisy = Forward(neftune=5.0, key=mx.random.key(0))
    seen = []
    layer = decoder.layers[0]

    class Spy:
        def __call__(self, x, *args):
            seen.append(x)
            return layer(x, *args)

        def __getattr__(self, name):
            return getattr(layer, name)

    decoder["layers"] = [Spy(), *decoder.layers[1:]]
    noisy(decoder, batch), Forward()(decoder, batch)
    noise = np.array(seen[0] - seen[1])
    bound = 5.0 / math.sqrt(12 * 64)
    assert 0.95 * bound < np.abs(noise).max() <= bound * 1.0001
    assert decoder.embed_tokens is before


def test_the_peak_does_not_grow_with_the_vocabulary():
    def peak(vocab_size):
        decoder = tiny_decoder(vocab_size=vocab_size, hidden_size=32, tie_word_embeddings=False)
        decoder.freeze()
        hidden = mx.random.normal((200, 32))
        targets, weights = mx.arange(200), mx.ones((200,))
        mx.eval(hidden, decoder.parameters())
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda h: module.learned_loss(decoder, h, targets, weights))(hidden))
        return mx.get_peak_memory() - before

    # How many chunks are in flight at once depends a little on timing.
    assert peak(150_000) <= 1.1 * peak(50_000)

"""Low-rank changes against their formulas in NumPy, on every kind of map and every way to hold its weights."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map
from passes_helpers import FAMILIES, MODES, TOKENS, decoder_of, distance, stir, trained

from mlxgen.config import AdapterConfig
from mlxgen.decoder.moe import ExpertLinear
from mlxgen.passes.adapted import Adapted, learning_rate_scale, set_dropout_key, set_weights
from mlxgen.passes.attach import attach
from mlxgen.passes.fuse_adapted import fuse_adapted
from mlxgen.passes.fuse_projections import fuse_projections
from mlxgen.passes.low_rank import Factors, plain_weight

KINDS = ("linear", "experts", "embedding")
ROWS, COLUMNS, EXPERTS = 64, 32, 3


def random(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


def frozen(kind, mode, bias):
    if kind == "embedding":
        base = nn.Embedding(ROWS, COLUMNS)
    elif kind == "experts":
        base = ExpertLinear(EXPERTS, COLUMNS, ROWS, bias)
    else:
        base = nn.Linear(COLUMNS, ROWS, bias=bias)
    base.update(tree_map(lambda p: random(*p.shape, seed=p.size), base.parameters()))
    if mode is not None:
        group_size, bits = MODES[mode]
        base = base.to_quantized(group_size=group_size, bits=bits, mode=mode)
    return base


def factors(kind, rank, scale, dora, seed=0):
    front = (EXPERTS,) if kind == "experts" else ()
    a, b = random(*front, rank, COLUMNS, seed=seed), random(*front, ROWS, rank, seed=seed + 1)
    return Factors(a=a, b=b, scale=scale, m=mx.abs(random(*front, ROWS, seed=seed + 2)) if dora else None)


def changed_weight(base, change):
    """W + scale * B A, and of DoRA each row at the length m (equation 5 of its paper), in float64."""
    weight = np.array(plain_weight(base).astype(mx.float32), np.float64)
    weight = weight + change.scale * (np.array(change.b, np.float64) @ np.array(change.a, np.float64))
    if change.m is not None:
        weight = weight * (np.array(change.m)[..., None] / np.linalg.norm(weight, axis=-1, keepdims=True))
    return weight


def as_numpy(array):
    return np.array(array.astype(mx.float32))


def inputs(kind):
    if kind == "embedding":
        return (mx.array([[0, 5, 63], [7, 7, 1]]),)
    if kind == "experts":
        return random(5, 1, 1, COLUMNS, seed=9), mx.array([[0, 2], [1, 0], [2, 2], [1, 2], [0, 1]])
    return (random(5, COLUMNS, seed=9),)


def oracle(kind, base, weight, args):
    x, bias = np.array(args[0]), np.array(base["bias"]) if "bias" in base else 0.0
    if kind == "embedding":
        return weight[x]
    if kind == "experts":
        chosen = np.array(args[1])
        bias = bias[chosen] if "bias" in base else 0.0
        return np.einsum("tki,tkoi->tko", np.broadcast_to(x[:, :, 0], (*chosen.shape, COLUMNS)), weight[chosen]) + bias
    return x @ weight.T + bias


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from([None, *MODES]),
    dora=st.booleans(),
    bias=st.booleans(),
    rank=st.integers(1, 8),
    scale=st.floats(0.1, 4),
)
def test_a_change_is_its_formula(kind, mode, dora, bias, rank, scale):
    base = frozen(kind, mode, bias)
    change = factors(kind, rank, scale, dora)
    module, args = Adapted(base), inputs(kind)
    adapter = module.add("one", change)
    want = oracle(kind, base, changed_weight(base, change), args)
    for settled in (False, True):
        if settled:
            adapter.settle(base)
        got = module(*args)
        half = 1e-1 if got.dtype == mx.bfloat16 else 0  # a table in 4-bit floats is read in half precision
        np.testing.assert_allclose(as_numpy(got).reshape(want.shape), want, rtol=2e-4 + half, atol=2e-3 + half)
    if kind == "embedding":
        x = random(4, COLUMNS, seed=11)
        want = np.array(x) @ changed_weight(base, change).T
        np.testing.assert_allclose(as_numpy(module.as_linear(x)), want, rtol=2e-4, atol=3e-3)


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(KINDS), dora=st.booleans(), weights=st.tuples(st.floats(-1, 2), st.floats(-1, 2)))
def test_several_changes_are_the_weighted_sum_of_what_each_adds(kind, dora, weights):
    base, args = frozen(kind, None, True), inputs(kind)
    module = Adapted(base)
    changes = {"one": factors(kind, 2, 1.0, dora, seed=0), "two": factors(kind, 3, 0.5, False, seed=5)}
    for name, change in changes.items():
        module.add(name, change)
    module.shared.weights = dict(zip(changes, weights, strict=True))
    plain = np.array(base["weight"], np.float64)
    total = sum(w * (changed_weight(base, c) - plain) for w, c in zip(weights, changes.values(), strict=True))
    want = oracle(kind, base, plain + total, args)
    np.testing.assert_allclose(np.array(module(*args)).reshape(want.shape), want, rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("mode", [None, *MODES])
def test_before_training_the_answers_are_the_same_bit_for_bit(family, kind, mode):
    decoder = decoder_of(family, mode)
    before = decoder(TOKENS)
    attached = attach(
        decoder, AdapterConfig(kind=kind, rank=2, targets=("all_linear", "embeddings")), key=mx.random.key(0)
    )
    assert mx.array_equal(decoder(TOKENS), before)
    trainable = tree_flatten(decoder.trainable_parameters())
    assert attached.trained == sum(p.size for _, p in trainable)
    assert len(trainable) == len(attached.paths) * (3 if kind == "dora" else 2)
    stir(decoder)
    assert distance(decoder(TOKENS), before) > 0.01


@pytest.mark.parametrize("mode", [None, "affine", "mxfp4"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_reach_all_that_is_trained_and_nothing_else(kind, mode):
    decoder, _ = trained("qwen3_moe", mode, kind=kind, targets=("all_linear", "embeddings"))
    frozen_before = [mx.array(p) for _, p in tree_flatten(decoder.parameters())]
    loss = lambda model: nn.losses.cross_entropy(model(TOKENS[:, :-1]), TOKENS[:, 1:]).mean()  # noqa: E731
    value, gradients = nn.value_and_grad(decoder, loss)(decoder)
    names = {name for name, g in tree_flatten(gradients) if mx.abs(g).max().item() > 0}
    assert names == {name for name, _ in tree_flatten(decoder.trainable_parameters())}
    assert math.isfinite(value.item())
    after = [p for _, p in tree_flatten(decoder.parameters())]
    assert all(mx.array_equal(a, b) for a, b in zip(frozen_before, after, strict=True))


def test_experts_are_counted_by_hand():
    """4 experts in one of two layers: rank * (in + out) for each of their three maps."""
    decoder = decoder_of("qwen3_moe")
    attached = attach(decoder, AdapterConfig(kind="lora", rank=2, targets=("experts",)), key=mx.random.key(0))
    assert len(attached.paths) == 3
    assert attached.trained == 4 * 3 * 2 * (32 + 32)


def test_dropout_is_for_training_and_follows_its_key():
    decoder, _ = trained("llama", dropout=0.5)
    still = decoder(TOKENS)
    assert mx.array_equal(decoder(TOKENS), still)
    decoder.train()
    with pytest.raises(AssertionError, match="set_dropout_key"):
        decoder(TOKENS)
    answers = []
    for seed in (0, 0, 1):
        set_dropout_key(decoder, mx.random.key(seed))
        answers.append(decoder(TOKENS))
    assert mx.array_equal(answers[0], answers[1])
    assert distance(answers[0], answers[2]) > 1e-3
    assert distance(answers[0], still) > 1e-3
    decoder.eval()
    assert mx.array_equal(decoder(TOKENS), still)


def test_dropout_is_the_same_when_a_layer_is_computed_again():
    """Gradient checkpointing computes a layer twice; with another mask its gradient would be wrong."""
    decoder, _ = trained("llama", dropout=0.5)
    decoder.train()
    set_dropout_key(decoder, mx.random.key(3))
    q = decoder.layers[0].self_attn.q_proj
    x = random(6, 32)
    plain = mx.grad(lambda x: q(x).square().sum())(x)
    again = mx.grad(lambda x: mx.checkpoint(lambda x: q(x))(x).square().sum())(x)
    assert mx.array_equal(plain, again)


def test_an_adapter_can_be_switched_off():
    decoder, _ = trained("llama")
    before = decoder_of("llama")(TOKENS)
    set_weights(decoder, {"default": 0.0})
    assert mx.array_equal(decoder(TOKENS), before)
    set_weights(decoder, {"default": 1.0})
    assert distance(decoder(TOKENS), before) > 0.01


def test_each_row_of_a_batch_may_have_its_own_weight():
    for family in ("llama", "qwen3_moe"):
        decoder, _ = trained(family, targets=("all_linear", "embeddings"))
        tokens = mx.array([[5], [17], [3]])
        on = decoder(tokens)
        set_weights(decoder, {})
        off = decoder(tokens)
        set_weights(decoder, {"default": mx.array([0.0, 1.0, 0.0])})
        mixed = decoder(tokens)
        assert distance(mixed[1], on[1]) < 1e-4
        assert distance(mixed[::2], off[::2]) < 1e-4
        assert distance(on, off) > 0.01


def test_half_precision_stays_half():
    """The adapter is float32; what it adds is of the model's type."""
    decoder, _ = trained("qwen3_moe", targets=("attention", "embeddings"))
    decoder.update(tree_map(lambda p: p.astype(mx.bfloat16), decoder.parameters()))
    decoder.update(tree_map(lambda p: p.astype(mx.float32), decoder.trainable_parameters()))
    assert decoder.layers[0].self_attn.q_proj(mx.zeros((2, 32), mx.bfloat16)).dtype == mx.bfloat16
    assert decoder.embed_tokens(TOKENS).dtype == mx.bfloat16


def test_the_second_matrix_may_learn_faster():
    decoder, _ = trained("llama", learning_rate_ratio=16.0)
    scale = learning_rate_scale(decoder)
    assert set(scale) == {name for name, _ in tree_flatten(decoder.trainable_parameters())}
    assert {ratio for name, ratio in scale.items() if name.endswith("lora_b")} == {16.0}
    assert {ratio for name, ratio in scale.items() if name.endswith("lora_a")} == {1.0}


@pytest.mark.parametrize(
    ("given", "factor"),
    [
        ({"rank": 8, "alpha": 16.0}, 2.0),
        ({"rank": 4, "scale": 20.0}, 20.0),
        ({"rank": 16, "alpha": 8.0, "rank_stabilized": True}, 2.0),
        ({"rank": 8}, 2.0),
    ],
)
def test_scale(given, factor):
    assert AdapterConfig(kind="lora", **given).factor == factor


@pytest.mark.parametrize("targets", [("attention", "mlp"), ("q_proj", "up_proj"), ("v_proj",)])
@pytest.mark.parametrize("mode", [None, "affine"])
@pytest.mark.parametrize("length", [1, 40])
def test_projections_are_fused_with_their_changes(targets, mode, length):
    decoder, _ = trained("llama", mode, targets=targets)
    tokens = mx.random.randint(0, 64, (3, length), key=mx.random.key(1))
    set_weights(decoder, {"default": mx.repeat(mx.array([0.0, 1.0, 0.5]), length)})
    want = decoder(tokens)
    for layer in decoder.layers:
        fuse_projections(layer)
        fuse_adapted(layer)
        assert layer.self_attn.fused
        assert layer.mlp.fused
    assert distance(decoder(tokens), want) < 1e-4
    assert isinstance(decoder.layers[0].self_attn.qkv_proj, Adapted)


def test_lengths_keep_projections_apart():
    decoder, _ = trained("llama", kind="dora")
    for layer in decoder.layers:
        fuse_adapted(layer)
        assert not layer.self_attn.fused

"""The decoder's blocks: causality, fused against separate projections, experts against a loop, dtypes."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from mlxgen.blueprint.spec import MoeSpec
from mlxgen.decoder.moe import _SORT_FROM as SORT_FROM
from mlxgen.decoder.moe import Experts
from mlxgen.errors import ConfigError
from mlxgen.passes.fuse_projections import fuse_projections
from mlxgen.testing.models import tiny_config, tiny_decoder, tiny_spec

# float32 sums in another order.
ATOL = 1e-4
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32)
FAMILIES = {
    "llama": {},
    "qwen3_moe": MOE,
    "gemma2": dict(sliding_window=5),
    "olmo2": {},
    "gemma3_text": dict(sliding_window=3),
}


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request):
    return tiny_decoder(request.param, **FAMILIES[request.param])


@settings(max_examples=10, deadline=None)
@given(tokens=st.lists(st.integers(0, 297), min_size=2, max_size=14), data=st.data())
def test_a_later_token_never_changes_an_earlier_logit(decoder, tokens, data):
    cut = data.draw(st.integers(1, len(tokens) - 1))
    other = tokens[:cut] + [(t + 1) % 298 for t in tokens[cut:]]
    a, b = (np.array(decoder(mx.array([x]))[0, :cut]) for x in (tokens, other))
    np.testing.assert_allclose(a, b, atol=ATOL)


@pytest.mark.parametrize("quantize", [None, dict(bits=4, group_size=32), dict(bits=8, group_size=32)])
def test_fused_projections_change_nothing(decoder, quantize):
    fused = tiny_decoder_like(decoder)
    if quantize:
        nn.quantize(decoder_copy := tiny_decoder_like(decoder), **quantize)
        nn.quantize(fused, **quantize)
    else:
        decoder_copy = decoder
    for layer in fused.layers:
        fuse_projections(layer)
    assert "qkv_proj" in fused.layers[0].self_attn and "q_proj" not in fused.layers[0].self_attn
    tokens = mx.array([[5, 6, 7, 8, 9]])
    np.testing.assert_allclose(np.array(fused(tokens)), np.array(decoder_copy(tokens)), atol=ATOL)


def tiny_decoder_like(decoder):
    family = next(n for n, extra in FAMILIES.items() if tiny_spec(n, **extra) == decoder.spec)
    return tiny_decoder(family, **FAMILIES[family])


def test_projections_of_different_kinds_are_left_alone():
    decoder = tiny_decoder()
    nn.quantize(
        decoder, bits=4, group_size=32, class_predicate=lambda path, m: path.endswith("layers.0.self_attn.q_proj")
    )
    for layer in decoder.layers:
        fuse_projections(layer)
    assert "q_proj" in decoder.layers[0].self_attn and "qkv_proj" in decoder.layers[1].self_attn


@pytest.mark.parametrize("tokens", [1, 3, SORT_FROM])
def test_experts_equal_a_loop_over_tokens(tokens):
    """Also where tokens are sorted by expert."""
    spec = tiny_spec("qwen3_moe", **MOE).layers[0].ffn
    experts = Experts(spec.expert, 5, 64)
    x = mx.random.normal((tokens, 64), key=mx.random.key(1))
    chosen = mx.random.randint(0, 5, (tokens, 2), key=mx.random.key(2))
    got = np.array(experts(x[:, None], chosen))
    gate, up, down = (np.array(experts[n].weight) for n in ("gate_proj", "up_proj", "down_proj"))
    for t in range(tokens):
        for j in range(2):
            e, row = int(chosen[t, j]), np.array(x[t])
            g = gate[e] @ row
            np.testing.assert_allclose(got[t, j], down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)), atol=ATOL)


def test_all_experts_with_equal_weights_are_the_dense_average():
    """Two experts, both chosen, a router that does not care."""
    decoder = tiny_decoder("mixtral", num_local_experts=2, num_experts_per_tok=2)
    moe = decoder.layers[0].mlp
    moe.router.proj.weight = mx.zeros_like(moe.router.proj.weight)
    x = mx.random.normal((3, 64))
    both = moe.experts(x[:, None], mx.array([[0, 1]] * 3)).mean(axis=1)
    np.testing.assert_allclose(np.array(moe(x)), np.array(both), atol=ATOL)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_stays_half_and_finite(decoder, dtype):
    if mx.default_device().type == mx.cpu and isinstance(decoder.spec.layers[0].ffn, MoeSpec):
        return  # MLX has no half-precision gather_mm on a CPU; loading refuses that
    half = tiny_decoder_like(decoder)
    half.update(tree_map(lambda p: p.astype(dtype), half.parameters()))
    logits = half(mx.array([[1, 2, 3, 4, 5, 6, 7]]))
    assert logits.dtype == dtype and mx.isfinite(logits).all()
    assert half.hidden(mx.array([[1, 2]])).dtype == dtype


def test_a_decoder_is_built_without_touching_memory():
    mx.clear_cache()
    before = mx.get_active_memory()
    spec = tiny_spec(
        hidden_size=4096, intermediate_size=16384, num_hidden_layers=8, num_attention_heads=32, vocab_size=50000
    )
    from mlxgen.decoder import Decoder

    assert len(tree_flatten(Decoder(spec).parameters())) > 8
    assert mx.get_active_memory() - before < 1 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(num_key_value_heads=3),
            r"`layers\[0\].mixer.num_heads` must be a multiple of num_kv_heads \(3\), but is 4",
        ),
        (dict(hidden_size=65), "hidden size must be a multiple of the heads"),
        (dict(layer_types=["full_attention"]), "list of layer types must have 2 entries, but has 1"),
        (dict(layer_types=["full_attention", "spiral_attention"]), "must be one of full_attention, sliding_attention"),
        (dict(hidden_act="swoosh"), "activation must be one of .* but is 'swoosh'"),
        (dict(vocab_size=None), "`vocab_size` must be given"),
        (dict(num_hidden_layers=0), "layers must be at least 1"),
        (dict(rope_scaling={"type": "spiral"}), "`rope.kind` must be one of"),
    ],
)
def test_contradictory_configs_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_spec("llama", **changes)


def test_more_chosen_experts_than_there_are():
    with pytest.raises(ConfigError, match=r"top_k` must be from 1 to num_experts \(5\), but is 6"):
        tiny_spec("qwen3_moe", **{**MOE, "num_experts_per_tok": 6})


def test_config_of_the_tests_is_plain_data():
    assert tiny_config()["model_type"] == "llama"

"""Routers and experts against plain NumPy; latent attention in its two forms; layers that share or pick keys."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.blueprint.spec import ClampSpec, GroupSpec, MlpSpec, MoeSpec, RouterSpec
from mlxgen.cache import Full, Quantized, Window
from mlxgen.decoder.latent_attention import HeadLinear
from mlxgen.decoder.moe import Experts, MoE
from mlxgen.decoder.router import Router
from mlxgen.errors import ConfigError
from mlxgen.testing.models import tiny_decoder

LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
SHARING = {
    "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 298,
}  # fmt: skip
DECODERS = {
    "latent": lambda: tiny_decoder("deepseek_v3", **LATENT),
    "indexed": lambda: tiny_decoder("deepseek_v32", **LATENT, index_topk=9, index_n_heads=16, index_head_dim=16),
    "shared keys": lambda: tiny_decoder("gemma4_text", **SHARING),
    "values from keys": lambda: tiny_decoder("gemma4_text", **SHARING, attention_k_eq_v=True),
    "streams": lambda: tiny_decoder("gemma3n_text", **{**SHARING, "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0]}),
    "chunks": lambda: tiny_decoder(
        "llama4_text", head_dim=16, attention_chunk_size=8, num_local_experts=4, intermediate_size_mlp=96
    ),
    "sinks": lambda: tiny_decoder("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
}


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request):
    return DECODERS[request.param]()


def in_pieces(decoder, tokens, sizes, policy=None):
    caches, out, start = (policy or Full())(decoder.spec), [], 0
    while start < len(tokens):
        size = sizes[len(out) % len(sizes)]
        out.append(decoder(mx.array([tokens[start : start + size]]), caches))
        start += size
    return mx.concatenate(out, axis=1)


def close(a, b, tolerance=1e-4):
    return mx.abs(a - b).max().item() <= tolerance * mx.abs(b).max().item()


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_pieces_give_what_one_pass_gives(decoder, data):
    tokens = data.draw(st.lists(st.integers(1, 297), min_size=12, max_size=40))
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 5, 30]), min_size=1, max_size=3))
    assert close(in_pieces(decoder, tokens, sizes), decoder(mx.array([tokens])))


def test_borrowed_keys_are_those_of_the_whole_piece(decoder):
    """A piece longer than what a window's cache keeps: the lender forgets, the borrower must not miss it."""
    tokens = np.random.default_rng(0).integers(1, 298, 700).tolist()
    assert close(in_pieces(decoder, tokens, [600, 1]), decoder(mx.array([tokens])))


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
@pytest.mark.parametrize("policy", [Window(size=24, sinks=4), Quantized(k_bits=8, v_bits=8, group_size=32)])
def test_borrowers_see_what_the_policy_keeps(family, policy):
    decoder = tiny_decoder(family, **{**SHARING, "head_dim": 32, "global_head_dim": 32})
    tokens = np.random.default_rng(1).integers(1, 298, 20).tolist()
    assert close(in_pieces(decoder, tokens, [7], policy), decoder(mx.array([tokens])), 0.05)


def test_a_borrower_keeps_nothing():
    decoder = tiny_decoder("gemma4_text", **SHARING)
    caches = Full()(decoder.spec)
    decoder(mx.array([[5, 6, 7]]), caches)
    assert [c.nbytes > 0 for c in caches] == [True, True, False, False]
    assert all(c.offset == 3 and c.trim(2) == 2 and c.offset == 1 for c in caches)


def test_a_borrower_needs_a_lender():
    with pytest.raises(ConfigError, match="share"):
        tiny_decoder("gemma4_text", **{**SHARING, "num_kv_shared_layers": 3})


# Routers and experts


def numpy_router(logits, spec, bias, top_k):
    """One token: {expert: weight}."""
    if spec.softcap is not None:
        logits = np.tanh(logits / spec.softcap) * spec.softcap
    e = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if spec.score == "sigmoid" else e / e.sum()
    ranks = scores + bias if spec.select_bias else scores.copy()
    if spec.groups is not None:
        groups = np.split(np.arange(len(logits)), spec.groups.count)
        best = [np.sort(ranks[g])[-1 if spec.groups.by == "max" else -2 :].sum() for g in groups]
        for g in np.argsort(best)[: spec.groups.count - spec.groups.keep]:
            ranks[groups[g]] = -np.inf
    chosen = np.argsort(-ranks)[:top_k]
    weights = scores[chosen]
    if spec.normalize:
        weights = weights / (weights.sum() + spec.epsilon)
    return dict(zip(chosen.tolist(), (weights * spec.scale).tolist(), strict=True))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    score=st.sampled_from(["softmax", "sigmoid"]),
    softcap=st.sampled_from([None, 0.5]),
    normalize=st.booleans(),
    select_bias=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    groups=st.sampled_from([None, (4, 2, "max"), (4, 2, "top2"), (2, 1, "top2"), (4, 4, "top2")]),
    top_k=st.integers(1, 4),
)
def test_a_router_chooses_and_weighs_as_written(seed, score, softcap, normalize, select_bias, scale, groups, top_k):
    rng = np.random.default_rng(seed)
    spec = RouterSpec(
        score=score, softcap=softcap, normalize=normalize, epsilon=1e-20, select_bias=select_bias, scale=scale,
        groups=GroupSpec(count=groups[0], keep=groups[1], by=groups[2]) if groups else None,
    )  # fmt: skip
    router = Router(spec, 8, top_k, 16)
    bias = rng.normal(size=8).astype(np.float32)  # negative ones too: a dropped group must stay below them
    if select_bias:
        router.select_bias = mx.array(bias)
    x = rng.normal(size=(5, 16)).astype(np.float32)
    experts, weights = (np.array(a) for a in router(mx.array(x)))
    logits = x @ np.array(router.proj.weight).T
    for row in range(5):
        want = numpy_router(logits[row].astype(np.float64), spec, bias, top_k)
        got = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        assert got.keys() == want.keys()
        assert all(abs(got[e] - want[e]) < 1e-5 for e in want)


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.sampled_from([1, 3, 31, 32, 80]),
    bias=st.booleans(),
    clamp=st.booleans(),
    on_input=st.booleans(),
    seed=st.integers(0, 99),
)
def test_many_rows_go_through_the_same_experts_as_few(tokens, bias, clamp, on_input, seed):
    """Sorted by expert or not, a row gets what its own experts make of it."""
    mx.random.seed(seed)
    mlp = MlpSpec(width=12, activation="silu", bias=bias, clamp=ClampSpec(limit=0.5) if clamp else None)
    router = RouterSpec(score="sigmoid", normalize=False, on_input=on_input)
    moe = MoE(MoeSpec(num_experts=6, top_k=2, expert=mlp, router=router), 16)
    if bias:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = moe.experts[name]
            linear.bias = mx.random.normal(linear.bias.shape)
    x = mx.random.normal((tokens, 16))
    assert close(moe(x), mx.concatenate([moe(x[i : i + 1]) for i in range(tokens)]), 1e-5)


@pytest.mark.parametrize("mode", [{"group_size": 32, "bits": 8}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}])
def test_quantized_experts_equal_their_unpacked_weights(mode):
    experts = Experts(MlpSpec(width=32, activation="silu", bias=True), 4, 64)
    plain = Experts(MlpSpec(width=32, activation="silu", bias=True), 4, 64)
    plain.update(experts.parameters())
    nn.quantize(experts, **mode)
    for name in ("gate_proj", "up_proj", "down_proj"):
        q = experts[name]
        plain[name].weight = mx.dequantize(q.weight, q.scales, q.get("biases"), **mode).astype(mx.float32)
    x, chosen = mx.random.normal((40, 1, 64)), mx.random.randint(0, 4, (40, 2))
    assert close(experts(x, chosen), plain(x, chosen), 1e-5)


# Latent attention


@pytest.mark.parametrize("quantize", [False, True])
def test_latent_and_expanded_keys_give_the_same(quantize):
    decoder = tiny_decoder("deepseek_v3", **{**LATENT, "qk_nope_head_dim": 32, "kv_lora_rank": 64})
    if quantize:
        nn.quantize(decoder, group_size=32, bits=8, class_predicate=lambda path, module: isinstance(module, HeadLinear))
    tokens, results = mx.array([np.random.default_rng(3).integers(1, 298, 30).tolist()]), []
    for limit in (0, 1000):
        for layer in decoder.layers:
            layer.self_attn.expand_from = limit
        results.append(decoder(tokens))
    assert close(*results)


def test_the_latent_cache_is_small():
    decoder = tiny_decoder("deepseek_v3", **LATENT)
    caches = Full()(decoder.spec)
    decoder(mx.array([[1, 2, 3, 4]]), caches)
    assert [array.shape for array in caches[0].state] == [(1, 1, 4, 32 + 8)]

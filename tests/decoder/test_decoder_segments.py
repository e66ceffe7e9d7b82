"""Packed rows: every text gives what it gives alone, forwards and backwards."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxgen.decoder.segments import layout_of
from mlxgen.errors import ConfigError
from mlxgen.testing.models import tiny_decoder

DELTA = dict(
    linear_key_head_dim=8, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, head_dim=16
)  # fmt: skip
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_n_groups=2, mamba_d_ssm=128)
LATENT = dict(
    kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1, first_k_dense_replace=1,
    n_shared_experts=1,
)  # fmt: skip
SHARING = dict(
    head_dim=16, global_head_dim=32, num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=298,
)  # fmt: skip
CHUNKS = dict(head_dim=16, attention_chunk_size=7, num_local_experts=4, intermediate_size_mlp=96)
FAMILIES = {
    "llama": {},
    "gpt2": dict(n_embd=64, n_head=4, n_layer=2, n_positions=64),  # learned positions
    "bloom": dict(n_head=4, n_layer=2),  # scores by distance
    "gemma2": dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=16),  # windows, capped scores
    "gpt_oss": dict(head_dim=16, num_local_experts=4, sliding_window=6),  # sinks, experts
    "deepseek_v3": LATENT,
    "llama4_text": CHUNKS,
    "gemma4_text": SHARING,  # layers that read the keys of others
    "gemma3n_text": SHARING,
    "qwen3_5_text": dict(layer_types=["linear_attention", "full_attention"], **DELTA),
    "mamba": {},
    "falcon_h1": MAMBA2,  # two mixers side by side
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=6),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], num_local_experts=4),
}
LENGTHS = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=2)


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request):
    return tiny_decoder(request.param, **FAMILIES[request.param])


def packed_rows(lengths, seed=0):
    """Random tokens and segments [B, L] of rows of texts, padding behind, and (row, start, stop) of each text."""
    width = max(map(sum, lengths))
    tokens = np.random.default_rng(seed).integers(0, 298, (len(lengths), width))
    segments, texts = np.full(tokens.shape, -1), []
    for row, row_lengths in enumerate(lengths):
        start = 0
        for number, length in enumerate(row_lengths):
            segments[row, start : start + length] = number
            texts.append((row, start, start + length))
            start += length
    return mx.array(tokens), mx.array(segments), texts


@settings(max_examples=5, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_a_text_sees_itself_alone(decoder, lengths, seed):
    tokens, segments, texts = packed_rows(lengths, seed)
    together = np.array(decoder.hidden(tokens, segments=segments))
    for row, start, stop in texts:
        alone = np.array(decoder.hidden(tokens[row : row + 1, start:stop]))[0]
        np.testing.assert_allclose(together[row, start:stop], alone, atol=1e-4)


def test_gradients_are_those_of_the_texts_one_by_one(decoder):
    tokens, segments, texts = packed_rows([[3, 14, 9], [2, 11]])
    weights = mx.random.normal((*tokens.shape, decoder.spec.hidden_size), key=mx.random.key(1))

    def packed(decoder):
        return (decoder.hidden(tokens, segments=segments) * weights * (segments >= 0)[..., None]).sum()

    def one_by_one(decoder):
        return sum(
            (decoder.hidden(tokens[row : row + 1, a:b])[0] * weights[row, a:b]).sum() for row, a, b in texts
        )

    (loss, ours), (expected, theirs) = (nn.value_and_grad(decoder, f)(decoder) for f in (packed, one_by_one))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-3)
    theirs = dict(tree_flatten(theirs))
    for name, gradient in tree_flatten(ours):
        size = mx.abs(theirs[name]).max().item()
        assert mx.abs(gradient - theirs[name]).max().item() <= 1e-4 * (size + 1), name


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=6), min_size=1, max_size=3))
def test_every_token_stands_in_one_place_beside_those_of_its_text(lengths):
    _, segments, texts = packed_rows(lengths)
    layout, width = layout_of(segments), segments.shape[1]
    tokens = mx.arange(segments.size)
    assert layout.together(layout.apart(tokens)).tolist() == tokens.tolist()
    rows = [row for group in layout.by_group(layout.apart(tokens)) for row in group.tolist()]
    for row, start, stop in texts:
        wanted = list(range(row * width + start, row * width + stop))
        assert sum(held[: len(wanted)] == wanted and set(held[len(wanted) :]) <= {wanted[-1]} for held in rows) == 1
        assert layout.positions[wanted[0] : wanted[-1] + 1].tolist() == list(range(len(wanted)))
    assert layout.slots.size <= 1.25 * segments.size + 8 * len(rows)  # hardly any padding


def test_texts_too_long_for_an_indexer_are_refused():
    spec = dict(LATENT, index_topk=4, index_n_heads=2, index_head_dim=16)
    decoder = tiny_decoder("deepseek_v32", **spec)
    tokens, segments, _ = packed_rows([[4, 3]])
    mx.eval(decoder.hidden(tokens, segments=segments))
    tokens, segments, _ = packed_rows([[3, 9]])
    with pytest.raises(ConfigError, match=r"`data\.packing` must be false .* more than 4 tokens"):
        decoder.hidden(tokens, segments=segments)

"""Recurrent mixers: pieces against one pass, batches against rows, the arithmetic against loops, kept memories."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxgen.cache import Full, Quantized, Window, load_caches, save_caches
from mlxgen.decoder.recurrent.decaying_attention import decaying_attention
from mlxgen.decoder.recurrent.delta_rule import delta_rule
from mlxgen.decoder.recurrent.linear_scan import linear_scan
from mlxgen.passes.fuse_projections import fuse_projections
from mlxgen.testing.models import tiny_decoder

DELTA = dict(
    linear_key_head_dim=8, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, head_dim=16
)  # fmt: skip
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_n_groups=2, mamba_d_ssm=128)
KIMI = dict(
    linear_head_dim=16, linear_num_heads=2, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    num_experts=4, num_experts_per_token=2, moe_intermediate_size=32,
)  # fmt: skip
NEMOTRON = dict(
    mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, head_dim=16, n_routed_experts=4,
    moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, hybrid_override_pattern="-M*E",
)  # fmt: skip
FAMILIES = {
    "qwen3_5_text": dict(layer_types=["linear_attention", "full_attention"], **DELTA),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"], **KIMI),
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": dict(num_heads=4, head_dim=32, state_size=8, n_groups=2),
    "falcon_h1": MAMBA2,
    "nemotron_h": NEMOTRON,  # a layer without a mixer comes first
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=6),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], num_local_experts=4),
}
ATOL = 2e-4  # float32 sums in another order, of logits around 1


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request):
    return tiny_decoder(request.param, **FAMILIES[request.param])


def in_pieces(decoder, tokens, sizes, caches):
    pieces, start = [], 0
    for size in [*sizes, tokens.shape[1]]:
        if start < tokens.shape[1]:
            pieces.append(decoder(tokens[:, start : start + size], caches))
            start += size
    return mx.concatenate(pieces, axis=1)


def close(a, b, atol=ATOL):
    np.testing.assert_allclose(np.array(a), np.array(b), atol=atol, rtol=1e-3)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_pieces_give_what_one_pass_gives(decoder, data):
    tokens = mx.array([data.draw(st.lists(st.integers(0, 297), min_size=20, max_size=90))])
    sizes = data.draw(st.lists(st.integers(1, 70), max_size=5)) + [1] * data.draw(st.integers(0, 3))
    close(in_pieces(decoder, tokens, sizes, Full()(decoder.spec)), decoder(tokens))


def test_token_by_token_gives_what_one_pass_gives(decoder):
    tokens = mx.random.randint(0, 298, (1, 30), key=mx.random.key(5))
    close(in_pieces(decoder, tokens, [1] * 30, Full()(decoder.spec)), decoder(tokens))


def test_rows_of_a_batch_do_not_see_each_other(decoder):
    tokens = mx.random.randint(0, 298, (2, 11), key=mx.random.key(6))
    together, alone = Full()(decoder.spec), [Full()(decoder.spec) for _ in range(2)]
    batch = in_pieces(decoder, tokens, [7, 1, 1], together)
    rows = [in_pieces(decoder, tokens[i : i + 1], [7, 1, 1], alone[i]) for i in range(2)]
    close(batch, mx.concatenate(rows))


def test_a_later_token_never_changes_an_earlier_logit(decoder):
    tokens = mx.random.randint(0, 298, (1, 20), key=mx.random.key(7))
    other = mx.concatenate([tokens[:, :12], (tokens[:, 12:] + 1) % 298], axis=1)
    close(decoder(tokens)[:, :12], decoder(other)[:, :12])


@pytest.mark.parametrize("policy", [Full(), Window(size=12, sinks=2)], ids=["full", "window"])
def test_a_saved_or_copied_memory_goes_on_where_it_was(decoder, policy, tmp_path):
    check_kept(decoder, policy, tmp_path)


def test_only_the_attention_beside_a_recurrent_mixer_is_quantized(tmp_path):
    decoder = tiny_decoder("falcon_h1", **MAMBA2, head_dim=32)
    (cache, _) = check_kept(decoder, Quantized(group_size=32), tmp_path)
    assert [array.dtype for array in cache.state[:2]] == [mx.float32] * 2
    assert cache.state[2].dtype == mx.uint32 and cache.kind == "full+recurrent"


def check_kept(decoder, policy, tmp_path):
    tokens = mx.random.randint(0, 298, (1, 24), key=mx.random.key(8))
    caches = policy(decoder.spec)
    decoder(tokens[:, :20], caches)
    save_caches(tmp_path / "memory.safetensors", caches, tokens[0, :20].tolist(), "same")
    loaded = policy(decoder.spec)
    assert load_caches(tmp_path / "memory.safetensors", loaded, "same") == tokens[0, :20].tolist()
    copies = [cache.copy() for cache in caches]
    assert [c.offset for c in loaded] == [c.offset for c in copies] == [20] * len(caches)
    want = decoder(tokens[:, 20:], caches)
    for kept in (loaded, copies):
        close(decoder(tokens[:, 20:], kept), want, atol=1e-5)
    return caches


def test_a_memory_forgets_nothing_or_everything(decoder):
    tokens = mx.random.randint(0, 298, (1, 9), key=mx.random.key(9))
    caches = Full()(decoder.spec)
    first = decoder(tokens, caches)
    assert all(cache.can_trim(0) and cache.can_trim(9) and not cache.can_trim(10) for cache in caches)
    assert not all(cache.can_trim(1) for cache in caches)
    assert [cache.trim(9) for cache in caches] == [9] * len(caches)
    close(decoder(tokens, caches), first)


def test_the_size_of_a_memory_does_not_grow(decoder):
    def size(length):
        caches = Full()(decoder.spec)
        decoder(mx.zeros((1, length), mx.int32), caches)
        return [c.nbytes for c in caches if c.kind == "recurrent"]

    assert size(3) == size(50)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_is_kept_and_finite(dtype):
    for family, config in FAMILIES.items():
        if family in ("kimi_linear", "nemotron_h", "minimax"):  # on a CPU, experts are gathered in float32 only
            continue
        decoder = tiny_decoder(family, **config)
        want = np.array(decoder(mx.array([[3, 4, 5, 6, 7, 8]])))
        decoder.set_dtype(dtype)
        caches = Full()(decoder.spec)
        logits = in_pieces(decoder, mx.array([[3, 4, 5, 6, 7, 8]]), [4, 1], caches)
        assert logits.dtype == dtype, family
        got = np.array(logits.astype(mx.float32))
        assert np.isfinite(got).all(), family
        assert np.corrcoef(got.flatten(), want.flatten())[0, 1] > 0.98, family
        states = [c.read()[-1] for c in caches if "recurrent" in c.kind and len(c.read()) > 1]
        assert all(state.dtype == mx.float32 for state in states), family


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_fused_projections_of_a_delta_net_change_nothing(family):
    plain, fused = (tiny_decoder(family, **FAMILIES[family]) for _ in range(2))
    for layer in fused.layers:
        fuse_projections(layer)
    names = {name for name, _ in tree_flatten(fused.layers[0].mixer.parameters())}
    assert "in_proj.weight" in names and "q_proj.weight" not in names
    tokens = mx.array([[5, 6, 7, 8, 9]])
    close(fused(tokens), plain(tokens))


def draw_arrays(data, *shapes):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    return [rng.normal(size=shape) for shape in shapes]


def as_mx(*arrays):
    return [mx.array(a.astype(np.float32)) for a in arrays]


LENGTHS = st.one_of(st.integers(1, 9), st.integers(60, 140))
# The range of a token's decay, as powers of ten: large ones underflow, and must not cost small ones their digits.
DECAYS = st.sampled_from([(-9, -8), (-2, 0), (1, 2), (-4, 2)])


def decays(random, powers):
    """Negative numbers of `powers` from normal ones."""
    low, high = powers
    return -(10 ** (low + (high - low) / (1 + np.exp(-2 * random))))


@settings(max_examples=20, deadline=None)
@given(length=LENGTHS, decay=DECAYS, by_channel=st.booleans(), same_keys=st.booleans(), data=st.data())
def test_the_delta_rule_equals_a_loop(length, decay, by_channel, same_keys, data):
    N, P, R = 4, 3, 2
    q, k, v, g, beta, state = draw_arrays(
        data, (length, N), (length, N), (R, length, P), (R, length, N if by_channel else 1), (R, length, 1), (R, N, P)
    )
    if same_keys:  # the triangular system is at its worst
        k = np.broadcast_to(k[:1], k.shape)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = decays(g, decay), 2 / (1 + np.exp(-beta))
    want, memory = [], state.copy()
    for t in range(length):
        memory = memory * np.exp(g[:, t])[:, :, None]
        memory = memory + k[t][:, None] * (beta[:, t] * (v[:, t] - k[t] @ memory))[:, None, :]
        want.append(q[t] @ memory)
    arrays = (a[None, None] for a in (q[None], k[None], v, g, beta, state))
    y, after = delta_rule(*as_mx(*arrays))
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(np.array(y)[0, 0], np.stack(want, axis=1), atol=1e-5 * scale)
    np.testing.assert_allclose(np.array(after)[0, 0], memory, atol=1e-5 * max(1.0, np.abs(memory).max()))


@settings(max_examples=15, deadline=None)
@given(length=LENGTHS, decay=DECAYS, data=st.data())
def test_decaying_attention_equals_a_loop(length, decay, data):
    q, k, v, g, state = draw_arrays(data, (length, 4), (length, 4), (2, length, 3), (2, length), (2, 4, 3))
    g = decays(g, decay)
    want, memory = [], state.copy()
    for t in range(length):
        memory = memory * np.exp(g[:, t])[:, None, None] + k[t][:, None] * v[:, t][:, None, :]
        want.append(q[t] @ memory)
    y, after = decaying_attention(*as_mx(*(a[None, None] for a in (q[None], k[None], v, g, state))))
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(np.array(y)[0, 0], np.stack(want, axis=1), atol=1e-5 * scale)
    np.testing.assert_allclose(np.array(after)[0, 0], memory, atol=1e-5 * max(1.0, np.abs(memory).max()))


@settings(max_examples=15, deadline=None)
@given(length=LENGTHS, data=st.data())
def test_the_scan_equals_a_loop(length, data):
    a, b, state = draw_arrays(data, (2, length, 3), (2, length, 3), (2, 3))
    a = 1 / (1 + np.exp(-a))
    want, h = [], state
    for t in range(length):
        h = a[:, t] * h + b[:, t]
        want.append(h)
    got, after = linear_scan(*as_mx(a, b, state))
    np.testing.assert_allclose(np.array(got), np.stack(want, axis=1), atol=1e-5)
    np.testing.assert_allclose(np.array(after), h, atol=1e-5)

"""What families' blueprints decide: what they refuse, and what stands in for keys that a config.json leaves out."""

import pytest

from mlxgen.blueprint import find_blueprint, read_blueprint, supported
from mlxgen.blueprint.schedule import layer_schedule
from mlxgen.config import conf_dir
from mlxgen.errors import ConfigError

FOLDERS = [conf_dir() / "architecture"]
SIZES = dict(
    vocab_size=32, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, intermediate_size=24,
    max_position_embeddings=64,
)  # fmt: skip


def spec(model_type, **config):
    config = {**SIZES, "model_type": model_type, **config}
    return find_blueprint(config, FOLDERS).spec(config)


@pytest.mark.parametrize(
    ("model_type", "config", "key"),
    [
        ("opt", dict(ffn_dim=24, word_embed_proj_dim=8), "word_embed_proj_dim"),
        ("falcon", dict(new_decoder_architecture=True, parallel_attn=False), "parallel_attn"),
        ("falcon", dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, alibi=True), "alibi"),
        ("mpt", dict(d_model=16, n_heads=2, n_layers=1, attn_config=dict(alibi=False)), "attn_config.alibi"),
        ("mpt", dict(d_model=16, n_heads=2, n_layers=1, attn_config=dict(qk_ln=True)), "attn_config.qk_ln"),
        ("doge", dict(is_moe=True), "is_moe"),
        ("iquestcoder", dict(clip_qkv=1.0), "clip_qkv"),
        ("hunyuan_v1_dense", dict(use_cla=True), "use_cla"),
        ("gptj", dict(n_embd=16, n_head=2, n_layer=1, rotary_dim=None), "rotary_dim"),
        ("dbrx", dict(ffn_config=dict(moe_normalize_expert_weights=2.0)), "ffn_config.moe_normalize_expert_weights"),
    ],
)
def test_what_a_family_can_not_compute_is_refused_by_its_key(model_type, config, key):
    with pytest.raises(ConfigError, match=rf"^config.json: `{key}` .* is not supported: .+\.$"):
        spec(model_type, **config)


def test_gpt2_scales_scores_by_the_layer_where_asked():
    plain, falling = (
        spec("gpt2", n_embd=16, n_head=2, n_layer=4, scale_attn_by_inverse_layer_idx=flag) for flag in (False, True)
    )
    assert [layer.mixer.scale for layer in plain.layers] == pytest.approx([8**-0.5] * 4)
    assert [layer.mixer.scale for layer in falling.layers] == pytest.approx([8**-0.5 / (i + 1) for i in range(4)])


def test_the_layers_of_gpt_neo_repeat():
    config = dict(num_layers=5, num_heads=2, window_size=7)
    types = [[["global"], 2], [["local", "global", "local"], 1]]
    found = spec("gpt_neo", **config, attention_types=types)
    assert [layer.mixer.window for layer in found.layers] == [None, None, 7, None, 7]
    with pytest.raises(ConfigError, match="must have 5 entries, but has 24"):
        spec("gpt_neo", **config)


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("cohere2", [4096, 4096, 4096, None]),
        ("olmo3", [4096, 4096, 4096, None]),
        ("exaone4", [4096, 4096, 4096, None]),
        ("cwm", [None, 8192, 8192, 8192]),
        ("granite_swa", [None, 128, 128, 128]),
        ("ministral", [4096] * 4),
        ("mistral", [None] * 4),
    ],
)
def test_windows_where_the_layer_types_are_left_out(model_type, windows):
    assert [layer.mixer.window for layer in spec(model_type).layers] == windows


def test_exaone4_reads_its_older_pattern_and_no_window_at_all():
    assert spec("exaone4", sliding_window_pattern="LLLG") == spec("exaone4", sliding_window_pattern=4)
    full = spec("exaone4", sliding_window=None).layers
    assert all(layer.mixer.window is None and layer.mixer.rope is not None for layer in full)


@pytest.mark.parametrize(
    ("model_type", "kind", "theta"),
    [("apertus", "llama3", 12e6), ("cwm", "llama3", 1e6), ("ministral3", "yarn", 1e6), ("helium", "default", 1e5)],
)
def test_ropes_of_files_without_rope_settings(model_type, kind, theta):
    rope = spec(model_type).layers[0].mixer.rope
    assert (rope.kind, rope.theta) == (kind, theta)


def test_a_null_beside_rope_theta_is_a_plain_rope():
    rope = spec("apertus", rope_theta=5000.0, rope_scaling=None).layers[0].mixer.rope
    assert (rope.kind, rope.theta) == ("default", 5000.0)


def test_only_full_layers_of_olmo3_are_stretched_in_older_files():
    scaling = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8)
    ropes = [layer.mixer.rope for layer in spec("olmo3", rope_theta=700.0, rope_scaling=scaling).layers]
    assert [rope.kind for rope in ropes] == ["default", "default", "default", "yarn"]
    assert {rope.theta for rope in ropes} == {700.0}


def test_falcon_in_its_three_shapes():
    first = spec("falcon").layers[0]
    multi = spec("falcon", multi_query=False, parallel_attn=False).layers[0]
    late = spec("falcon", new_decoder_architecture=True, num_kv_heads=4).layers[0]
    assert (first.mixer.num_kv_heads, first.parallel, first.shared_in_norm) == (1, True, True)
    assert (multi.mixer.num_kv_heads, multi.parallel) == (8, False)
    assert (late.mixer.num_kv_heads, late.parallel, late.shared_in_norm) == (4, True, False)


@pytest.mark.parametrize(
    ("node", "names"),
    [
        ({"kind": "every", "n": 3, "hit": "a", "miss": "b"}, "bbabb"),
        ({"kind": "every", "n": 3, "at": 0, "hit": "a", "miss": "b"}, "abbab"),
        ({"kind": "every", "n": 2, "hit": "a", "miss": "b", "except": [1]}, "bbbab"),
        ({"kind": "every", "n": 0, "hit": "a", "miss": "b"}, "bbbbb"),
        ({"kind": "runs", "runs": [[["x", "y"], 2], [["x"], 1]], "map": {"x": "a", "y": "b"}}, "ababa"),
    ],
)
def test_schedules(node, names):
    assert "".join(layer_schedule(node, 5, "here")) == names


def test_every_blueprint_is_read_and_says_where_its_facts_are_from():
    for name in sorted(set(supported(FOLDERS).values())):
        assert read_blueprint(name, FOLDERS).tree["decoder"]
        text = (FOLDERS[0] / f"{name}.yaml").read_text()
        assert text.startswith("# "), name

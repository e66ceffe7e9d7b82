"""A setting that a blueprint does not understand stops the load; one that nobody knows is mentioned."""

import json

import pytest

import mlxgen
from mlxgen.blueprint import find_blueprint
from mlxgen.config import conf_dir
from mlxgen.errors import ModelError
from mlxgen.testing.checkpoints import write_tiny
from mlxgen.testing.models import tiny_config

FOLDERS = [conf_dir() / "architecture"]


def unread(model_type="llama", **changes):
    config = tiny_config(model_type, **changes)
    return find_blueprint(config, FOLDERS).unread(config, FOLDERS)


def test_what_is_read_neutral_or_about_training_passes():
    keys = dict(
        attention_dropout=0.1, transformers_version="5", router_aux_loss_coef=0.1, bos_token_id=1, use_cache=True
    )
    assert unread(**keys, attn_logit_softcapping=None, num_experts=0, sliding_window=None) == ([], [])


@pytest.mark.parametrize(
    "key", [dict(final_logit_softcapping=30.0), dict(num_local_experts=8), dict(logit_scale=0.5), dict(clip_qkv=8.0)]
)
def test_a_known_key_of_other_families_stops(key):
    assert unread(**key) == ([*key], [])


def test_a_window_is_read_where_layers_use_it_and_stops_where_none_does():
    assert unread("mistral", sliding_window=8) == ([], [])
    assert unread("qwen2", sliding_window=8, use_sliding_window=False) == ([], [])
    assert unread("llama", sliding_window=8) == (["sliding_window"], [])
    assert unread("llama", sliding_window=8, layer_types=["full_attention", "sliding_attention"]) == ([], [])


def test_an_unknown_key_is_only_mentioned():
    assert unread(flux_capacitor=1.21) == ([], ["flux_capacitor"])


def test_loading_stops_or_warns(tmp_path):
    folder = write_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "logit_scale": 0.5}))
    with pytest.raises(
        ModelError, match=r"`logit_scale` 0.5: it changes .* llama does not read it; model.strict=false"
    ):
        mlxgen.load(f"model={folder}")
    with pytest.warns(UserWarning, match="does not read it"):
        mlxgen.load(f"model={folder}", "model.strict=false")
    (folder / "config.json").write_text(json.dumps({**config, "flux_capacitor": 1.21}))
    with pytest.warns(UserWarning, match="nobody knows `flux_capacitor`"):
        mlxgen.load(f"model={folder}")

"""inspect and architectures: facts about models, without their weights."""

import json

import pytest

from mlxgen.cli import main
from mlxgen.config import conf_dir
from mlxgen.testing.checkpoints import write_tiny


def report(capsys, *words):
    assert main(["inspect", *words, "output=json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_parameters_are_those_of_the_checkpoint(tmp_path, capsys):
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    folder = write_tiny(tmp_path, "qwen3_moe", head_dim=16, **moe)
    found = report(capsys, f"model={folder}")
    assert found["parameters"]["total"] * 4 == found["checkpoint_bytes"]  # float32 in the file
    assert found["parameters"]["experts"] == 2 * 4 * 3 * 32 * 64  # layers, experts, projections, width, hidden
    assert found["spec"]["layers"][0]["ffn"]["top_k"] == 2


@pytest.mark.parametrize(
    ("cache", "per_token"),
    [
        ([], 2 * 2 * 2 * 32 * 4),  # layers, keys and values, heads, size of a head, float32
        (["cache=window", "cache.size=64"], 0),
        (["cache=quantized", "cache.group_size=32"], 2 * 2 * 2 * (32 + 2 * 4)),  # a byte each, scale and bias per group
    ],
)
def test_cache_bytes_of_a_token(cache, per_token, tmp_path, capsys):
    folder = write_tiny(tmp_path, head_dim=32)
    assert report(capsys, f"model={folder}", "model.dtype=float32", *cache)["cache"]["bytes_per_token"] == per_token


def test_only_the_config_of_a_distant_repository_is_fetched(monkeypatch, tmp_path, capsys):
    import mlxgen.checkpoint.hub as hub

    folder = write_tiny(tmp_path)
    fetched = []
    monkeypatch.setattr(hub, "cached_repository", lambda *_: None)
    monkeypatch.setattr(hub, "fetch_file", lambda repo, file, *_: fetched.append((repo, file)) or folder / file)
    assert report(capsys, "model=someone/some-model")["checkpoint_bytes"] is None
    assert fetched == [("someone/some-model", "config.json")]


def test_architectures_lists_every_blueprint(capsys):
    assert main(["architectures", "output=json"]) == 0
    rows = {row["family"]: row for row in json.loads(capsys.readouterr().out)}
    files = {path.stem for path in (conf_dir() / "architecture").glob("*.yaml")} - {"base", "auto"}
    assert files <= set(rows)
    assert rows["qwen3_moe"]["inherits"] == "qwen3 < qwen2 < llama < base"
    assert main(["architectures"]) == 0
    assert "Gemma 3" in capsys.readouterr().out

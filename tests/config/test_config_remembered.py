"""What Hydra has composed once is not composed again, and is never anything else."""

import json
import os
import sys
from pathlib import Path

import pytest

from mlxgen.config import compose, load_config, read_overrides
from mlxgen.config import remembered as remembered_module
from mlxgen.config.folders import cache_folder
from mlxgen.config.remembered import remembered


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path))
    return tmp_path / "composed"


class Composer:
    def __init__(self, data):
        self.data, self.calls = data, 0

    def __call__(self):
        self.calls += 1
        return self.data


def test_the_same_words_are_composed_once(cache):
    compose_once = Composer({"a": [1, 2.5, None, "x"]})
    assert [remembered(["model=x"], compose_once) for _ in range(3)] == [{"a": [1, 2.5, None, "x"]}] * 3
    assert compose_once.calls == 1
    remembered(["model=y"], compose_once)
    assert compose_once.calls == 2


def test_a_damaged_file_is_a_miss(cache):
    composer = Composer({"a": 1})
    remembered(["w"], composer)
    (file,) = cache.iterdir()
    file.write_text('{"a": 2')
    assert remembered(["w"], composer) == {"a": 1}
    assert json.loads(file.read_text()) == {"a": 1}


def test_a_changed_file_is_noticed(cache, tmp_path, monkeypatch):
    conf = tmp_path / "conf"
    (conf / "group").mkdir(parents=True)
    (conf / "group" / "x.yaml").write_text("a: 1")
    monkeypatch.setattr(remembered_module, "conf_dir", lambda: conf)
    composer = Composer({"a": 1})
    remembered(["w"], composer)
    (conf / "group" / "x.yaml").write_text("a: 12")
    remembered(["w"], composer)
    (conf / "group" / "y.yaml").write_text("")
    remembered(["w"], composer)
    assert composer.calls == 3


@pytest.mark.parametrize("data", [{"a": {5: 1.0}}, {"a": (1, 2)}, {"a": float("nan")}])
def test_what_a_file_can_not_hold_is_composed_each_time(cache, data):
    composer = Composer(data)
    assert [remembered(["w"], composer) is data for _ in range(2)] == [True, True]
    assert not cache.exists()


def test_interpolations_are_composed_each_time(cache):
    composer = Composer({"a": 1})
    for _ in range(2):
        remembered(["model.source=${oc.env:HOME}"], composer)
    assert composer.calls == 2


def test_a_folder_that_can_not_be_written_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "file"))
    assert remembered(["w"], Composer({"a": 1})) == {"a": 1}


def test_few_files_are_kept(cache):
    for i in range(70):
        remembered([f"seed={i}"], Composer({"a": i}))
    assert len(list(cache.iterdir())) == 64


@pytest.mark.parametrize(
    "words",
    [[], ["model=qwen3_4b", "sampler=top_p", "sampler.top_p=0.5"], ["chat", "cache=window", "stop=[a, b]", "prompt=x"]],
)
def test_what_comes_back_is_what_was_composed(cache, words):
    first = load_config(words)
    assert len(list(cache.iterdir())) == 1
    assert load_config(words) == first


def test_a_folder_of_the_users_own_is_read_each_time(cache, tmp_path):
    own = tmp_path / "own"
    (own / "sampler").mkdir(parents=True)
    file = own / "sampler" / "mine.yaml"
    for value in (0.5, 0.25):
        file.write_text(f"# Mine.\ndefaults: [base]\ntemperature: {value}\n")
        os.utime(file, (1, 1))
        assert compose(read_overrides(["sampler=mine"], own))["sampler"]["temperature"] == value
    assert not cache.exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "mlxgen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mlxgen"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "mlxgen"
    monkeypatch.setenv("MLXGEN_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"

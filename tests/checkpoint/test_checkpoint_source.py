"""What a person may write for a model, and what the answer is to the rest."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_helpers import floats, write_folder, write_safetensors, write_tiny_gguf

from mlxgen.checkpoint import PackageSource, open_checkpoint
from mlxgen.checkpoint.source import resolve
from mlxgen.errors import ConfigError, ModelError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing in this file may reach for the network: opening a socket fails the test."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)


def make_folder(path: Path) -> Path:
    write_safetensors(write_folder(path) / "model.safetensors", {"a": floats(1)})
    return path


def test_folder_by_text_and_path(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "org" / "name")
    for source in (str(folder), folder, "org/name", "./org/name", "org/name/"):
        assert list(open_checkpoint(source).tensors) == ["a"], "what exists here comes before the hub"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(open_checkpoint("~/model").tensors) == ["a"]


def test_gguf_file_and_the_folder_around_it(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "models.gguf")
    assert open_checkpoint(str(path)).config["model_type"] == "llama"
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(path, folder / "one.gguf")
    assert open_checkpoint(folder).path == folder / "one.gguf"
    shutil.copy(path, folder / "two.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files. Name one of them: one\.gguf, two\.gguf"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "source",
    ["gpt2", "a/b/c", "/no/such/folder", "./org/name", "../x/y", "org/name/file.bin", "", "org name/x"],
)
def test_what_is_nothing_lists_what_was_tried(source: str, tmp_path: Path) -> None:
    if source == "":
        source = "none"
    with pytest.raises(ModelError, match="no such file or folder, not a hub id `org/name`") as caught:
        open_checkpoint(source)
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_is_never_a_hub_id() -> None:
    with pytest.raises(ModelError, match="no such folder"):
        open_checkpoint(Path("org/name"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with pytest.raises(ModelError, match="Name its folder"):
        open_checkpoint(folder / "model.safetensors")


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must hold config\.json"):
        open_checkpoint(tmp_path)


def test_revision_needs_a_hub_id(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    with pytest.raises(ModelError, match="`revision` is for hub ids"):
        open_checkpoint("model", revision="main")
    with pytest.raises(ModelError, match="given twice: v1 and, in org/name@v2, v2"):
        open_checkpoint("org/name@v2", revision="v1")


@pytest.mark.parametrize(
    ("source", "repo", "file", "revision"),
    [
        ("org/name", "org/name", None, None),
        ("mlx-community/Qwen3-0.6B-4bit@v1.0", "mlx-community/Qwen3-0.6B-4bit", None, "v1.0"),
        ("org/name@refs/pr/3", "org/name", None, "refs/pr/3"),
        ("org/name/file.Q4_0.gguf", "org/name", "file.Q4_0.gguf", None),
        ("org/name/sub/f-00001-of-00002.gguf@abc", "org/name", "sub/f-00001-of-00002.gguf", "abc"),
    ],
)
def test_forms_of_hub_ids(
    monkeypatch: pytest.MonkeyPatch, source: str, repo: str, file: str | None, revision: str | None
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("mlxgen.checkpoint.hub.fetch_repository", lambda *a: asked.append(a) or Path("x"))
    monkeypatch.setattr("mlxgen.checkpoint.hub.fetch_file", lambda *a: asked.append(a) or Path("x"))
    resolve(source)
    wanted = (repo, revision) if file is None else (repo, file, revision)
    assert asked[0][: len(wanted)] == wanted


def test_text_form_of_a_package() -> None:
    digest = "0" * 64
    source = PackageSource.parse(f"package:a-b==1.0,c==2:x/m.gguf.part00,y/m.gguf.part01#sha256={digest}")
    assert source == PackageSource(
        requirements=["a-b==1.0", "c==2"],
        members=["x/m.gguf.part00", "y/m.gguf.part01"],
        sha256=digest,
        file="m.gguf",
    )


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"requirements": ["a"]}, "requirements"),
        ({"requirements": ["a>=1"]}, "requirements"),
        ({"requirements": ["--index-url=https://evil.example"]}, "requirements"),
        ({"requirements": ["a==1 --pre"]}, "requirements"),
        ({"requirements": []}, "requirements"),
        ({"members": ["../x"]}, "members"),
        ({"members": ["/etc/passwd"]}, "members"),
        ({"members": []}, "members"),
        ({"sha256": "abc"}, "sha256"),
        ({"sha256": "A" * 64}, "sha256"),
        ({"file": "a/b.gguf"}, "file"),
        ({"file": ".."}, "file"),
        ({"file": ""}, "file"),
    ],
)
def test_package_sources_are_checked(change: dict[str, object], key: str) -> None:
    fields = {"requirements": ["a==1"], "members": ["a/x"], "sha256": "0" * 64, "file": "x.gguf"}
    with pytest.raises(ConfigError, match=f"`package.{key}` must be"):
        PackageSource(**{**fields, **change})  # type: ignore[arg-type]


def test_package_without_a_checksum() -> None:
    with pytest.raises(ConfigError, match=r"package\.sha256"):
        open_checkpoint("package:a==1:x.gguf")


def test_importing_is_light() -> None:
    """What only some sources need is imported when it is needed."""
    heavy = "{'huggingface_hub', 'gguf', 'rich', 'filelock', 'transformers'}"
    script = f"import sys, mlxgen.checkpoint; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"

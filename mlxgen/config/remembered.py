"""What Hydra has composed once: the same words over the same files compose to the same again.

A short command would spend half of its time on it. A file that is missing, damaged or can't be written is a miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxgen.config.folders import cache_folder, conf_dir

_KEPT = 64  # files


def remembered(words: Sequence[str], compose: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `compose` gives for these words over the shipped conf/, from a file if there is one."""
    if any("${" in word for word in words):  # may depend on more than words and files
        return compose()
    path = cache_folder() / "composed" / f"{_fingerprint(words)}.json"
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    data = compose()
    text = json.dumps(data, default=str)
    if json.loads(text) == data:  # a mapping with numbers for keys would not come back as it was
        with suppress(OSError):
            _write(path, text)
    return data


def _fingerprint(words: Sequence[str]) -> str:
    """Of the words, and of every file that takes part: its name, size and time."""
    files = [Path(entry.path) for folder in _folders(conf_dir()) for entry in os.scandir(folder) if entry.is_file()]
    hydra = find_spec("hydra")
    files += [*Path(__file__).parent.glob("*.py"), *([Path(hydra.origin)] if hydra and hydra.origin else [])]
    stamps = []
    for file in sorted(files):
        status = file.stat()
        stamps.append((str(file), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr((list(words), stamps)).encode()).hexdigest()


def _folders(root: Path) -> list[Path]:
    return [root, *(Path(entry.path) for entry in os.scandir(root) if entry.is_dir())]


def _write(path: Path, text: str) -> None:
    """All of it or nothing, whoever writes at the same time; the oldest files make room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    by_age = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in by_age[_KEPT:]:
        old.unlink(missing_ok=True)

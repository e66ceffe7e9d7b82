"""Files that processes share, found by the tokens they are of. What is in them is another module's business.

A file holds what a sequence has beyond a beginning that another file holds, its parent, so that a conversation is not
written anew after every turn. Named `<kind>-<tokens>.kv` by hashes, it ends with the SHA-256 of what comes before. It
appears whole or not at all, so a process may be killed at any moment, and several may share the folder.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxgen.engine.token_trie import TokenTrie

_SUFFIX = ".kv"
_STALE_S = 3600.0  # an unfinished file of that age is a killed process's


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredFile:
    """`tokens`: all, the parent's included; the first `base` of them are there."""

    path: Path
    tokens: tuple[int, ...]
    base: int = 0
    parent: StoredFile | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def chain(self) -> list[StoredFile]:
        """What must be read for it, in this order."""
        return [*(self.parent.chain if self.parent else []), self]

    def read(self) -> bytes:
        """What was written. Raises OSError, or ValueError if it is not that any more."""
        data = self.path.read_bytes()
        content, checksum = data[:-32], data[-32:]
        if hashlib.sha256(content).digest() != checksum:
            raise ValueError(f"{self.path} is broken")
        return content

    def write(self, content: bytes | memoryview) -> None:
        """Raises OSError."""
        partial = self.path.with_name(f".{self.name}.{os.getpid()}")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.write(hashlib.sha256(content).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)

    def touch(self) -> None:
        """It was used just now; and those that it needs even later, so that they are removed after it."""
        for file in reversed(self.chain):
            try:
                os.utime(file.path)
            except OSError:  # gone, or the folder is read only
                return


class ShelfFolder:
    """The files of a folder by kind. read_about: gives {"parent", "base", "tokens"} of a file, or raises anything."""

    def __init__(self, path: Path, read_about: Callable[[Path], Mapping[str, Any]]):
        self.path, self._read_about = path, read_about
        self._files: dict[str, StoredFile] = {}  # by name
        self._tries: dict[str, TokenTrie[StoredFile]] = defaultdict(TokenTrie)

    def files_of(self, kind: str, unfinished: Sequence[str] = ()) -> TokenTrie[StoredFile]:
        """The files of a kind that are there now; `unfinished` are being written."""
        try:
            there = {name for name in os.listdir(self.path) if name.startswith(kind) and name.endswith(_SUFFIX)}
        except OSError:
            there = set()
        mine = {name for name in self._files if name.startswith(kind)}
        for name in mine - there - set(unfinished):
            self.forget(self._files[name])
        new = there - mine
        while new:
            self._take_in(next(iter(new)), new)
        return self._tries[kind]

    def new_file(self, kind: str, tokens: Sequence[int], parent: StoredFile | None, base: int) -> StoredFile:
        """A file that is going to be written."""
        path = self.path / f"{kind}-{_hash(tokens)}{_SUFFIX}"
        file = StoredFile(path=path, tokens=tuple(tokens), base=base, parent=parent)
        if path.name not in self._files:
            self._files[path.name] = file
            self._tries[kind].insert(file.tokens, file)
        return file

    def remove(self, file: StoredFile) -> None:
        """Delete a file, and all that need it."""
        _unlink(file.path)
        self.forget(file)

    def forget(self, file: StoredFile) -> None:
        """A file is not there any more; those that need it are of no use then."""
        if self._files.pop(file.name, None) is None:
            return
        self._tries[file.name.partition("-")[0]].remove(file.tokens)
        for other in [other for other in self._files.values() if other.parent is file]:
            self.remove(other)

    def shrink(self, budget_bytes: int) -> None:
        """Delete the least recently used files, of all kinds, until the rest fits, and what killed processes left."""
        files = []
        for path in self.path.glob(f"*{_SUFFIX}*"):
            with suppress(OSError):
                about = path.stat()
                if path.suffix == _SUFFIX:
                    files.append((about.st_mtime_ns, about.st_size, path))
                elif path.name.startswith(".") and time.time() - about.st_mtime > _STALE_S:
                    _unlink(path)
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= budget_bytes:
                return
            _unlink(path)
            total -= size

    def _take_in(self, name: str, new: set[str]) -> StoredFile | None:
        """Index one of the new files, its parents first. Without these, or of other tokens, it is useless."""
        if name not in new:
            return self._files.get(name)
        new.remove(name)
        try:
            about = self._read_about(self.path / name)
            kind, base = name.partition("-")[0], int(about["base"])
            parent = self._take_in(about["parent"], new) if about["parent"] else None
            tokens = (*(parent.tokens[:base] if parent else ()), *about["tokens"])
            if f"{kind}-{_hash(tokens)}{_SUFFIX}" != name:
                raise ValueError(f"{name} is of other tokens")
        except Exception:  # whatever is wrong with it
            _unlink(self.path / name)
            return None
        return self.new_file(kind, tokens, parent, base)


def _hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(array("q", tokens).tobytes()).hexdigest()[:32]


def _unlink(path: Path) -> None:
    with suppress(OSError):  # the folder may be read only
        path.unlink()

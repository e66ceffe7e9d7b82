"""A folder that keeps computed sequences for the next process; what can't be read there is taken for missing."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from mlxgen.engine.sequence import TokenSequence
from mlxgen.engine.shelf_folder import ShelfFolder, StoredFile
from mlxgen.engine.token_trie import TokenTrie

_LEAST_TOKENS = 16  # that are worth a file
_WAITING_FILES = 2  # that may wait in memory for the disk
_LONGEST_CHAIN = 32  # of files that build on each other


class Codec(Protocol):
    """From caches to bytes and back; see mlxgen.cache.storage."""

    def pack(self, caches: Sequence[Any], base: int, about: Mapping[str, Any]) -> memoryview: ...

    def unpack(self, data: bytes, caches: Sequence[Any], base: int) -> None: ...

    def read_about(self, path: Path) -> dict[str, Any]: ...


class Shelf:
    """Sequences in files, the least recently used removed first where they take more than `budget_bytes`.

    fingerprint: what keys and values depend on besides kind and tokens; called when it is first needed.
    A folder that can't be written, or is full, is only read from then on, with one warning.
    """

    def __init__(self, folder: Path, budget_bytes: int, fingerprint: Callable[[], str], codec: Codec):
        self._folder, self._codec = ShelfFolder(folder, codec.read_about), codec
        self._budget_bytes, self._fingerprint, self._model = budget_bytes, fingerprint, ""
        self._writer = ThreadPoolExecutor(max_workers=1)  # Python waits for it before it ends
        self._writing: dict[str, Future[None]] = {}  # by name of the file
        self._writable = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = StoredFile(path=folder / ".probe", tokens=())
            probe.write(b"")
            probe.path.unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def find(self, like: TokenSequence, tokens: Sequence[int], more_than: int) -> TokenSequence | None:
        """A sequence like another one, of as many of the first `tokens` as possible, if more than `more_than`."""
        files = self._files_of(like)
        while True:
            file, count = _best(files, tokens, trims=like.trims_freely)
            if file is None or count <= more_than:
                return None
            sequence = self._read(file, like)
            if sequence is not None:
                sequence.keep(count)
                return sequence

    def add(self, sequence: TokenSequence) -> None:
        """Write what a sequence and its marks hold that no file does. The files may come later than this returns."""
        if not self._writable:
            return
        files, end = self._files_of(sequence), len(sequence.tokens)
        last = max(sequence.marks, default=end)  # from there a prompt like this one goes on
        for place in sorted({*sequence.marks, end}):
            file, count = _best(files, sequence.tokens[:place], trims=sequence.trims_freely)
            if file is not None:
                file.touch()
            needed = place >= last and not sequence.trims_freely
            if place >= _LEAST_TOKENS and place - count >= (1 if needed else _LEAST_TOKENS):
                self._put(sequence.fork(place), files)

    def wait(self) -> None:
        """Until everything is written."""
        for future in list(self._writing.values()):
            future.result()
        self._writing.clear()

    def _read(self, file: StoredFile, like: TokenSequence) -> TokenSequence | None:
        """All of a file's tokens; None, and it is gone, if it or one that it needs is broken."""
        self.wait()
        sequence = like.empty()
        for part in file.chain:
            try:
                self._codec.unpack(part.read(), sequence.caches, part.base)
            except Exception:  # whatever is wrong with it
                self._folder.remove(part)
                return None
        sequence.tokens = list(file.tokens)
        file.touch()
        return sequence

    def _put(self, sequence: TokenSequence, files: TokenTrie[StoredFile]) -> None:
        """Write a sequence, but for what it shares with the file that has most of it."""
        parent, base = next(files.matches(sequence.tokens), (None, 0))
        parent = _least(parent, base)
        if parent is not None and len(parent.chain) >= _LONGEST_CHAIN:
            parent, base = None, 0
        content = self._codec.pack(
            sequence.caches,
            base,
            {"parent": parent.name if parent else "", "base": base, "tokens": sequence.tokens[base:]},
        )
        if len(content) > self._budget_bytes:
            return
        while len(self._writing) >= _WAITING_FILES:
            first = next(iter(self._writing))
            self._writing.pop(first).result()
        file = self._folder.new_file(self._kind(sequence), sequence.tokens, parent, base)
        self._writing[file.name] = self._writer.submit(self._write, file, content)

    def _write(self, file: StoredFile, content: memoryview) -> None:
        if not self._writable:
            return
        try:
            file.write(content)
            file.touch()
            self._folder.shrink(self._budget_bytes)
        except OSError as error:
            self._give_up(error)

    def _files_of(self, sequence: TokenSequence) -> TokenTrie[StoredFile]:
        done = [name for name, future in self._writing.items() if future.done()]
        files = self._folder.files_of(self._kind(sequence), list(self._writing))
        for name in done:
            self._writing.pop(name).result()
        return files

    def _kind(self, sequence: TokenSequence) -> str:
        self._model = self._model or self._fingerprint()
        return hashlib.sha256(f"{self._model} {sequence.key!r}".encode()).hexdigest()[:16]

    def _give_up(self, error: OSError) -> None:
        self._writable = False
        text = f"`prefix.folder` {self._folder.path} can't be written ({error.strerror}); from now on it is only read."
        warnings.warn(text, stacklevel=2)


def _best(files: TokenTrie[StoredFile], tokens: Sequence[int], *, trims: bool) -> tuple[StoredFile | None, int]:
    """The file to go on from with the most of the first `tokens`, and how many. Without `trims`, only from its end."""
    best, most = None, 0
    for file, shared in files.matches(tokens):
        if shared <= most:
            break
        if trims or shared == len(file.tokens):
            best, most = file, shared
    return _least(best, most), most


def _least(file: StoredFile | None, count: int) -> StoredFile | None:
    """The first of a file's chain that holds `count` tokens."""
    while file is not None and file.base >= count:
        file = file.parent
    return file

"""A file of results: one JSON object a line, whole or absent, whenever the process ends."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from mlxgen.errors import ConfigError

_BEGIN = b'{"index": '


class ResultFile:
    """Open it before anything is computed. `done(index)` tells what a file that is resumed has already.

    failed: how many of its results are errors. Raises ConfigError for a file that can't be written, that exists and is
    neither resumed nor overwritten, that another process writes, or that holds something else.
    """

    def __init__(self, path: str, *, resume: bool = False, overwrite: bool = False):
        self.count = self.failed = 0
        self._next, self._beyond = 0, set[int]()  # all below are done, and these
        self._standard = path == "-"
        if self._standard and (resume or overwrite):
            raise ConfigError("`resume` and `overwrite` need `out`, the name of a file.")
        self._file: BinaryIO = sys.stdout.buffer if self._standard else self._opened(Path(path).expanduser())
        if self._standard:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"`out` must be a file that nobody writes, but another process has {path}.") from None
        empty = os.fstat(self._file.fileno()).st_size == 0
        if resume:
            self._take_up(path)
        elif overwrite or empty:
            self._file.truncate(0)
        else:
            self._file.close()
            raise ConfigError(f"`out` must be a new file, but {path} exists; add resume=true or overwrite=true.")

    def done(self, index: int) -> bool:
        return index < self._next or index in self._beyond

    def write(self, result: dict[str, Any]) -> None:
        """In one piece, and given to the system at once: what comes later can tear the next line only."""
        try:
            line = json.dumps(result, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half of a character that takes two, in a text or an id
            line = json.dumps(result).encode()
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        if not self._standard:
            self._file.close()

    def _opened(self, path: Path) -> BinaryIO:
        try:
            file = path.open("r+b" if path.exists() else "w+b")
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"`out` must be a file that can be written, but {path} can't: {why}.") from None
        return file

    def _take_up(self, path: str) -> None:
        """Read what is there. A last line without its end was torn when a process died: it is dropped."""
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n") and (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                break
            self._note(line, f"{path}, line {number}")
            whole += len(line)
        self._file.seek(whole)
        self._file.truncate()

    def _note(self, line: bytes, place: str) -> None:
        try:
            result = json.loads(line)
            index, failed = int(result["index"]), "error" in result
        except (ValueError, KeyError, TypeError):
            self._file.close()
            raise ConfigError(f"`out` must hold results only, but {place} is none; name another file.") from None
        self.count += 1
        self.failed += failed
        self._beyond.add(index)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1

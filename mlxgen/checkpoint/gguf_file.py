"""The header of a GGUF file: metadata as plain Python values, tensors with their place in the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Own code
because the reader of the gguf package makes a NumPy array of every token: 15 s for a vocabulary of 262,144.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mlxgen.errors import ModelError, WeightsError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """shape: row-major, as NumPy counts. type: the GGML type. offset: from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int
    file: Path


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """Metadata of the first file, tensors of all parts of a split set."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`, and of its siblings where it is one part of a split set.

    Raises ModelError for a file that is no GGUF or whose header is cut off, WeightsError for tensors of an
    unknown type, beyond the end of the file, or in parts that are missing.
    """
    parts = [_read_part(file) for file in _split_set(path)]
    expected = parts[0].metadata.get("split.count", 0)
    if expected not in (0, 1, len(parts)):
        raise WeightsError(
            f"`{path}` is one of {expected} parts, which must keep their names -0000N-of-0000M.gguf."
        )
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if twice := sorted(set(tensors) & set(part.tensors)):
            raise WeightsError(f"`{twice[0]}` is both in {tensors[twice[0]].file.name} and in {part.path}.")
        tensors |= part.tensors
    return GgufFile(path=parts[0].path, metadata=parts[0].metadata, tensors=tensors)


def split_names(name: str) -> list[str]:
    """The names of all parts of the set that a file name belongs to; just itself if it is no part."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def _split_set(path: Path) -> list[Path]:
    files = [path.with_name(name) for name in split_names(path.name)]
    if missing := [file for file in files if not file.is_file()]:
        raise WeightsError(
            f"`{missing[0]}` is missing ({len(missing)} of {len(files)} parts). Incomplete download?"
        )
    return files


def _read_part(path: Path) -> GgufFile:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(24)
        if start[:4] != _MAGIC:
            raise ModelError(f"`{path}` must begin with GGUF, but begins with {start[:4]!r} ({size} bytes).")
        version = int.from_bytes(start[4:8], "little")
        if version not in (2, 3):
            big = " It is a big-endian file." if version & 0xFFFF == 0 else ""
            raise ModelError(f"`{path}` must be GGUF version 2 or 3, but is version {version}.{big}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Header(data)
            try:
                tensor_count, key_count = header.number("Q"), header.number("Q")
                metadata = {header.string(): header.value(header.number("I")) for _ in range(key_count)}
                rows = [header.tensor() for _ in range(tensor_count)]
                header.check()
            except (struct.error, IndexError, OverflowError, MemoryError, ValueError):
                raise ModelError(
                    f"`{path}` has {size} bytes, but its header needs more. Truncated download?"
                ) from None
            except (KeyError, RecursionError) as error:
                raise ModelError(f"`{path}` has a broken header at byte {header.at}: {error}.") from None
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"`general.alignment` of {path} must be a positive number, but is {alignment!r}.")
    base = -(-header.at // alignment) * alignment
    tensors = _place(path, base, rows)
    needed = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if needed > size:
        raise WeightsError(f"`{path}` has {size} bytes, but its tensors need {needed}. Truncated download?")
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _place(path: Path, base: int, rows: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GgufTensor]:
    """The tensors with their places in the file, whose data begin at `base`."""
    from gguf import GGML_QUANT_SIZES  # not at import: it costs 0.2 s

    sizes = {int(kind): block for kind, block in GGML_QUANT_SIZES.items()}
    placed = {}
    for name, dims, kind, offset in rows:
        shape = tuple(reversed(dims))
        if kind not in sizes:
            raise WeightsError(
                f"`{name}` in {path} has GGML type {kind}, which the gguf package does not know. Update it?"
            )
        block, block_bytes = sizes[kind]
        if not shape or shape[-1] % block:
            raise WeightsError(
                f"`{name}` in {path} must have rows of a multiple of {block}, but has shape {shape}."
            )
        nbytes = prod(shape) // block * block_bytes
        placed[name] = GgufTensor(
            name=name, shape=shape, type=kind, offset=base + offset, nbytes=nbytes, file=path
        )
    return placed


class _Header:
    """Reads values one after the other, from byte 8 on."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 8

    def check(self) -> None:
        if self.at > len(self.data):
            raise IndexError

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        self.check()
        data, at, found = self.data, self.at, []
        read_length: Callable[..., tuple[int]] = _U64.unpack_from
        for _ in range(count):
            (length,) = read_length(data, at)
            at += 8 + length
            found.append(data[at - length : at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        value = self.number(_SCALARS[kind])
        # The decimal number that somebody wrote: 1e-06, not 9.999999974752427e-07.
        return float(str(np.float32(value))) if kind == 6 else value

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.value(kind) for _ in range(count)]
        code = _SCALARS[kind]
        values = (
            np.frombuffer(self.data, dtype="<" + code, count=count, offset=self.at) if count else np.zeros(0)
        )
        self.at += values.nbytes
        return values.tolist()

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = tuple(self.number("Q") for _ in range(self.number("I")))
        return name, dims, self.number("I"), self.number("Q")

"""An opened checkpoint: all that is known about the weights before one of them is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.errors import WeightsError, did_you_mean

if TYPE_CHECKING:
    import mlx.core as mx

Progress = Callable[[str, int, int | None], None]
"""Called with (what is fetched, bytes done, bytes in total or None)."""

_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor as `load` gives it: `shape` row-major, `nbytes` in memory, `file` the file that holds it.

    `dtype` is MLX's name of the type. float8_e4m3 and float8_e8m0 load as their bytes, uint8.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A model's files, opened but not read.

    path: the folder or the (first) GGUF file.
    config, generation_config: as in config.json and generation_config.json; for GGUF, made from the metadata.
    quantization: None, or {"group_size", "bits", "mode", <module path>: the same three or False}; paths as in
        `tensors`.
    tensors: what `load` accepts, in the order of the files.
    reader: gives the array of a TensorInfo and keeps none.
    tokenizer_folder: where tokenizer files lie, None if there are none.
    gguf_metadata: all keys of a GGUF file, None for other sources.
    baked: load-time operations of the blueprint that this file has already had: "norm_offset" says that the
        norm weights are stored as 1 + w.
    """

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    generation_config: Mapping[str, Any] = field(repr=False)
    quantization: Mapping[str, Any] | None = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    reader: Callable[[TensorInfo], mx.array] = field(repr=False)
    tokenizer_folder: Path | None
    gguf_metadata: Mapping[str, Any] | None = field(repr=False)
    baked: frozenset[str] = frozenset()

    def names(self) -> Iterator[str]:
        return iter(self.tensors)

    def load(self, name: str) -> mx.array:
        """The array of this name: lazy from safetensors, read at once from GGUF. Nothing here keeps it alive.

        Raises WeightsError for an unknown name or data that cannot be read.
        """
        info = self.tensors.get(name)
        if info is None:
            raise WeightsError(f"`{name}` is no tensor of {self.path}.{did_you_mean(name, self.tensors)}")
        return self.reader(info)

    @property
    def total_bytes(self) -> int:
        """Memory of all tensors once loaded."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """The weight files that are read, in order."""
        return list(dict.fromkeys(info.file for info in self.tensors.values()))

    def fingerprint(self) -> str:
        """SHA-256 over the names, shapes and dtypes, the sizes of the files and 64 samples of 4 KiB of each.

        Some milliseconds whatever the size, and the same for a copy elsewhere. It tells trainings,
        quantizations and revisions apart; a change of a few bytes between the samples goes unseen, so it is
        no integrity check.
        """
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"{name} {info.shape} {info.dtype}\n".encode())
        for file in self.files:
            size = file.stat().st_size
            digest.update(f"{size}\n".encode())
            with file.open("rb") as stream:
                for sample in range(_SAMPLES):
                    stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()

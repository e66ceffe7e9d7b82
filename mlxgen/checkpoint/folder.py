"""A folder in the hub's layout: config.json, safetensors in one file or in shards, MLX's quantization entry.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON header, data).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.checkpoint.base import Checkpoint, TensorInfo
from mlxgen.errors import ModelError, WeightsError

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tiktoken.model",
)

# Name in the header -> (MLX's name, bytes per element); exactly what MLX can load.
_DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "U16": ("uint16", 2), "I16": ("int16", 2),
    "U32": ("uint32", 4), "I32": ("int32", 4), "U64": ("uint64", 8), "I64": ("int64", 8),
    "C64": ("complex64", 8),
    "F16": ("float16", 2), "BF16": ("bfloat16", 2), "F32": ("float32", 4),
    "F8_E4M3": ("float8_e4m3", 1), "F8_E8M0": ("float8_e8m0", 1),
}  # fmt: skip
_MODE_DEFAULTS: dict[str, dict[str, Any]] = {
    "affine": {"group_size": 64, "bits": 4, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
_HEADER_LIMIT = 100_000_000  # of the reference implementation
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder of safetensors; every header is read and checked, no data.

    Raises ModelError for a config.json that is absent or no JSON object and for a folder without safetensors,
    WeightsError for files that are missing, truncated or contradict the index.
    """
    config = read_json(folder / "config.json")
    tensors = _read_tensors(folder)
    generation = folder / "generation_config.json"
    return Checkpoint(
        path=folder,
        config=config,
        generation_config=read_json(generation) if generation.exists() else {},
        quantization=mlx_quantization(config),
        tensors=tensors,
        reader=_Shards(),
        tokenizer_folder=folder if has_tokenizer(folder) else None,
        gguf_metadata=None,
    )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; ModelError if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"`{file.parent}` must hold {file.name}, but has none. Is it the folder of a model?"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"`{file}` must be JSON, but cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"`{file}` must be a JSON object, but is a {type(value).__name__}.")
    return value


def mlx_quantization(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json's `quantization` (or `quantization_config`, where MLX wrote it), every entry complete.

    Returns {"group_size", "bits", "mode", <module path>: {the same three} or False}, or None. Other tools'
    `quantization_config` (they have a `quant_method`) stay in the config.
    """
    found = config.get("quantization") or config.get("quantization_config")
    if not found or (isinstance(found, dict) and "quant_method" in found):
        return None
    if not isinstance(found, dict) or not all(isinstance(found.get(k), int) for k in ("group_size", "bits")):
        raise ModelError(f"`quantization` in config.json must have group_size and bits, but is {found!r}.")
    everywhere = {key: found[key] for key in ("group_size", "bits")} | {"mode": _mode("", found)}
    entries: dict[str, Any] = dict(everywhere)
    for path, entry in found.items():
        if path not in everywhere and isinstance(entry, dict | bool):
            entries[path] = _quantization_entry(path, entry, everywhere)
    return entries


def _quantization_entry(path: str, entry: dict[str, Any] | bool, everywhere: dict[str, Any]) -> Any:
    if isinstance(entry, bool):
        return dict(everywhere) if entry else False
    # What MLX assumes for an entry of its own, whatever the model's default is.
    return _MODE_DEFAULTS[_mode(f"{path}.", entry)] | entry


def _mode(path: str, entry: Mapping[str, Any]) -> str:
    mode = entry.get("mode", "affine")
    if mode not in _MODE_DEFAULTS:
        known = ", ".join(_MODE_DEFAULTS)
        raise ModelError(f"`quantization.{path}mode` in config.json must be one of {known}, but is {mode!r}.")
    return mode


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors to read and, with an index, its map name -> file.

    The index decides; other safetensors in the folder (adapters, consolidated copies) are not read. Raises
    WeightsError where a file is missing, ModelError where there are no safetensors at all.
    """
    index = folder / INDEX
    others = _complete_sets(folder)
    if index.exists():
        weight_map = _weight_map(index)
        named = sorted(set(weight_map.values()))
        missing = [name for name in named if not (folder / name).is_file()]
        if not missing:
            return [folder / name for name in named], weight_map
        if others:
            warnings.warn(
                f"{index} names {missing[0]}, which does not exist; reading {others[0][0].name} instead.",
                stacklevel=2,
            )
            return others[0], None
        raise WeightsError(
            f"`{folder / missing[0]}` is missing ({len(missing)} of {len(named)} files that {INDEX} names). "
            "Incomplete download? Fetch it again."
        )
    if others:
        return others[0], None
    raise ModelError(_no_weights(folder))


def _complete_sets(folder: Path) -> list[list[Path]]:
    """Sets of weight files that are complete by their names, the most likely first."""
    names = sorted(file.name for file in folder.glob("*.safetensors") if file.is_file())
    sets = [["model.safetensors"]] if "model.safetensors" in names else []
    shards: dict[tuple[str, int], list[str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            shards.setdefault((match[1], int(match[3])), []).append(name)
    sets += [found for (_, count), found in sorted(shards.items()) if len(found) == count]
    older = [name for name in names if name.startswith("weights")]  # early MLX conversions
    return [[folder / name for name in found] for found in [*sets, *([older] if older else [])]]


def _no_weights(folder: Path) -> str:
    if torn := sorted(file.name for file in folder.glob("*.safetensors") if _SHARD.fullmatch(file.name)):
        return (
            f"`{folder}` has only some of its shards ({torn[0]}, ...). Incomplete download? Fetch it again."
        )
    if pickles := sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)
    ):
        return (
            f"`{folder}` must hold safetensors, but has only {pickles[0]}. Convert it: "
            "`save_pretrained` of transformers writes safetensors."
        )
    return f"`{folder}` must hold model.safetensors or {INDEX} with its shards, but has neither."


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"`{index}` must have a `weight_map`, but has none.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise WeightsError(f"`weight_map` of {index} must name files of its folder, but names {name!r}.")
    return weight_map


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    files, weight_map = weight_files(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if weight_map is not None and weight_map.get(name) != file.name:
                continue
            if name in tensors:
                raise WeightsError(
                    f"`{name}` is both in {tensors[name].file.name} and in {file.name} of {folder}."
                )
            tensors[name] = info
    if weight_map is not None and (absent := sorted(set(weight_map) - set(tensors))):
        raise WeightsError(
            f"`{absent[0]}` is not in {weight_map[absent[0]]}, where {folder / INDEX} puts it "
            f"({len(absent)} such tensors). Fetch the files again."
        )
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one safetensors file, checked against its size.

    Raises WeightsError for a truncated file, a broken header, or a dtype that MLX does not have.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise WeightsError(
                f"`{file}` has {size} bytes, but its header alone needs {length + 8}. Truncated download?"
            )
        header_bytes = stream.read(length)
    try:
        header = json.loads(header_bytes)
        header.pop("__metadata__", None)
        entries = {name: _entry(file, name, fields) for name, fields in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise WeightsError(
            f"`{file}` must begin with a safetensors header, but its {length} bytes are not one."
        ) from None
    needed = 8 + length + max((end for _, end in entries.values()), default=0)
    if size < needed:
        raise WeightsError(f"`{file}` has {size} bytes, but its tensors need {needed}. Truncated download?")
    return {name: info for name, (info, _) in entries.items()}


def _entry(file: Path, name: str, fields: Mapping[str, Any]) -> tuple[TensorInfo, int]:
    """One tensor of a header and where its data end."""
    shape = tuple(int(n) for n in fields["shape"])
    begin, end = fields["data_offsets"]
    if fields["dtype"] not in _DTYPES:
        raise WeightsError(f"`{name}` in {file} has dtype {fields['dtype']}, which MLX cannot load.")
    dtype, item_bytes = _DTYPES[fields["dtype"]]
    if end - begin != prod(shape) * item_bytes or begin < 0:
        raise WeightsError(
            f"`{name}` in {file} must have {prod(shape) * item_bytes} bytes, but has {end - begin}."
        )
    return TensorInfo(name=name, shape=shape, dtype=dtype, nbytes=end - begin, file=file), end


class _Shards:
    """Lazy arrays of the shards. Each is handed out once and then forgotten, so that no data stays alive."""

    def __init__(self) -> None:
        self._lazy: dict[Path, dict[str, mx.array]] = {}

    def __call__(self, info: TensorInfo) -> mx.array:
        if info.name not in self._lazy.get(info.file, {}):
            try:
                loaded = mx.load(str(info.file), format="safetensors")
            except RuntimeError as error:
                raise WeightsError(f"`{info.file}` cannot be read: {error}.") from None
            assert isinstance(loaded, dict)
            self._lazy[info.file] = loaded
        return self._lazy[info.file].pop(info.name)

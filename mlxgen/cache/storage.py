"""Caches as bytes: what a prompt cost to compute is kept, and read back instead of computed again.

The format is safetensors: the used slots of every layer, and in the metadata the tokens they belong to and a
fingerprint of everything that the values depend on.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.errors import ModelError

_FORMAT = "mlxgen-cache-1"


def save_caches(path: Path, caches: Sequence[Any], tokens: Sequence[int], fingerprint: str) -> None:
    """Write caches and the token ids they hold. The file appears whole or not at all."""
    arrays, about = _taken_apart(caches, 0, {"fingerprint": fingerprint, "tokens": list(tokens)})
    partial = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
    try:
        mx.save_safetensors(str(partial), arrays, metadata=about)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_caches(path: Path, caches: Sequence[Any], fingerprint: str) -> list[int]:
    """Fill new caches from a file; returns the token ids they then hold.

    Raises ModelError if the file is broken, or was made by another model, policy or precision.
    """
    try:
        arrays, metadata = mx.load(str(path), format="safetensors", return_metadata=True)  # type: ignore[misc]
        about = json.loads(metadata["mlxgen"])
        same = about["format"] == _FORMAT and about["fingerprint"] == fingerprint
        layers, tokens = about["layers"], about["tokens"]
    except (RuntimeError, KeyError, ValueError) as error:
        raise ModelError(f"{path} is no saved cache: {' '.join(str(error).split())}") from error
    if not same or [layer["kind"] for layer in layers] != [cache.kind for cache in caches]:
        raise ModelError(
            f"{path} was saved by another model, cache policy or precision; remove it or name another file."
        )
    _put_together(caches, arrays, layers, 0)
    return tokens


def pack(caches: Sequence[Any], base: int, about: Mapping[str, Any]) -> memoryview:
    """The bytes of a file with all that caches hold beyond their first `base` tokens, and what is `about` them.

    Layers that keep every token give those from `base` on, all others their whole memory.
    """
    arrays, metadata = _taken_apart(caches, base, about)
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, metadata=metadata)  # type: ignore[arg-type]
    return file.getbuffer()


def unpack(data: bytes, caches: Sequence[Any], base: int) -> None:
    """Take up what `pack` gave, on caches that hold at least the first `base` tokens."""
    arrays, metadata = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)  # type: ignore[misc]
    _put_together(caches, arrays, json.loads(metadata["mlxgen"])["layers"], base)


def read_about(path: Path) -> dict[str, Any]:
    """What stands in a file besides arrays, which are not read. Raises OSError or ValueError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        about = json.loads(json.loads(file.read(length))["__metadata__"]["mlxgen"])
    if about.get("format") != _FORMAT:
        raise ValueError("another format")
    return about


def _taken_apart(caches: Sequence[Any], base: int, about: Mapping[str, Any]) -> tuple[dict[str, mx.array], dict]:
    arrays, layers = {}, []
    for number, cache in enumerate(caches):
        state = cache.tail(base) if cache.trims_freely else cache.state
        arrays |= {f"{number}.{i}": array for i, array in enumerate(state)}
        layers.append({"kind": cache.kind, "arrays": len(state), "counters": cache.counters})
    return arrays, {"mlxgen": json.dumps({"format": _FORMAT, "layers": layers, **about})}


def _put_together(caches: Sequence[Any], arrays: Mapping[str, mx.array], layers: Sequence[Any], base: int) -> None:
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        state = [arrays[f"{number}.{i}"] for i in range(layer["arrays"])]
        if cache.trims_freely:
            cache.trim(cache.offset - base)
            cache.extend(state, layer["counters"]["offset"] - base)
        else:
            cache.counters = layer["counters"]
            cache.state = state
    mx.eval([cache.state for cache in caches])

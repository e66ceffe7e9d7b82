"""Caches in a file: what a prompt cost to compute is kept, and read back instead of computed again.

A safetensors file with the used slots of every layer, and in its metadata the tokens they belong to and a fingerprint
of everything that the values depend on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.errors import ModelError

_FORMAT = "mlxgen-cache-1"


def save_caches(path: Path, caches: Sequence[Any], tokens: Sequence[int], fingerprint: str) -> None:
    """Write caches and the token ids they hold. The file appears whole or not at all."""
    arrays, layers = {}, []
    for number, cache in enumerate(caches):
        state = cache.state
        arrays |= {f"{number}.{i}": array for i, array in enumerate(state)}
        layers.append({"kind": cache.kind, "arrays": len(state), "counters": cache.counters})
    about = {"format": _FORMAT, "fingerprint": fingerprint, "tokens": list(tokens), "layers": layers}
    partial = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
    try:
        mx.save_safetensors(str(partial), arrays, metadata={"mlxgen": json.dumps(about)})
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
        raise ModelError(f"{path} was saved by another model, cache policy or precision; remove it or name another file.")
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        cache.counters = layer["counters"]
        cache.state = [arrays[f"{number}.{i}"] for i in range(layer["arrays"])]
    mx.eval([cache.state for cache in caches])
    return tokens

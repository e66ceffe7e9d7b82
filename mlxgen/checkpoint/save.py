"""Writing a checkpoint that mlx-lm and transformers read: their names, their config.json, safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxgen.checkpoint.block_ops import FlatExperts, FusedExperts
from mlxgen.checkpoint.names import NameMap, mlx_rename
from mlxgen.checkpoint.ops import Split, Stack, Transpose, build_ops

SHARD_BYTES = 5 << 30


def save_weights(decoder: nn.Module, rules: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    """Write model.safetensors (or shards with an index) and config.json into `folder`.

    rules: the blueprint's `weights`, read backward. The decoder's projections must not be fused. Every file appears
    whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(their_arrays(decoder, rules))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        partial = folder / f".{name}.partial.safetensors"
        mx.save_safetensors(str(partial), shard, metadata={"format": "pt"})
        os.replace(partial, folder / name)
        index |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(array.nbytes for shard in shards for array in shard.values())
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    write_json(folder / "config.json", config)


def their_arrays(decoder: nn.Module, rules: Mapping[str, Any]) -> dict[str, mx.array]:
    """The decoder's parameters under the names, and in the layout, of the family's own checkpoints.

    Packed weights only mlx-lm reads, so a decoder that has some is written as mlx-lm does.
    """
    arrays = dict(tree_flatten(decoder.parameters()))
    if any(name.endswith(".scales") for name in arrays):
        return mlx_arrays(arrays, rules)
    for op in reversed(build_ops(rules["ops"])):
        arrays = op.save(arrays)
    names = NameMap(rules["rename"])
    return {names.theirs(name): array for name, array in arrays.items()}


def mlx_arrays(arrays: Mapping[str, mx.array], rules: Mapping[str, Any]) -> dict[str, mx.array]:
    """Parameters under the names, and in the layout, of mlx-lm's models: experts stacked, linear maps [out, in]."""
    out = dict(arrays)
    for op in reversed(mlx_ops(rules)):
        out = op.save(out)
    names = NameMap(mlx_rename(rules))
    return {names.theirs(name): array for name, array in out.items()}


def mlx_ops(rules: Mapping[str, Any]) -> list[Any]:
    """Those of a blueprint's operations that the layout of mlx-lm's models needs, too."""
    ops = [op for op in build_ops(rules["ops"]) if not isinstance(op, Stack | FusedExperts | FlatExperts | Transpose)]
    return [op for op in ops if not (isinstance(op, Split) and op.axis)]


def mlx_quantization(decoder: nn.Module, rules: Mapping[str, Any]) -> dict[str, Any] | None:
    """What config.json must say of a decoder's packed weights: the commonest setting, and the others by name."""
    names = NameMap(mlx_rename(rules))
    found: dict[str, dict[str, Any]] = {}
    for path, module in decoder.named_modules():
        if "scales" in module and hasattr(module, "bits"):
            settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            found[names.theirs(f"{path}.scales").removesuffix(".scales")] = settings
    if not found:
        return None
    most = max(found.values(), key=list(found.values()).count)
    return {**most, **{name: settings for name, settings in found.items() if settings != most}}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _shards(arrays: Mapping[str, mx.array]) -> list[dict[str, mx.array]]:
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name, array in arrays.items():
        if shards[-1] and size + array.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    return shards

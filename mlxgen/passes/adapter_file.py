"""Adapters in folders, as mlx-lm keeps them: `adapters.safetensors` and `adapter_config.json`.

What only mlxgen knows stands under `mlxgen` in the config, which mlx-lm passes over. PEFT's form is in peft_file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.checkpoint.folder import read_header, read_json
from mlxgen.checkpoint.save import write_json
from mlxgen.config.adapter import AdapterConfig
from mlxgen.errors import ConfigError, ModelError
from mlxgen.passes.adapter_names import Layout
from mlxgen.passes.low_rank import Factors

CONFIG, MLX_FILE, PEFT_FILE = "adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"
_METADATA = {"format": "mlx"}


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """An adapter as it lies in a folder, under the names of the program that wrote it.

    modules: low-rank changes. weights: whole parameters that replace the model's own, of full fine-tuning.
    base: what is known of the model that it was trained on: `fingerprint`, `model_type`, `source`.
    fingerprint: of the adapter itself.
    """

    folder: Path
    layout: Layout
    modules: Mapping[str, Factors] = field(repr=False)
    weights: Mapping[str, mx.array] = field(repr=False)
    base: Mapping[str, Any]
    fingerprint: str


def read_adapter(folder: Path, is_embedding: Callable[[str], bool]) -> AdapterFile:
    """Read an adapter of mlxgen's, mlx-lm's or PEFT's. Raises ModelError for one that is broken or of another method.

    is_embedding: tells by a module's name whether it is one, which the shapes can't.
    """
    if not folder.is_dir():
        raise ModelError(f"`adapter.path` must be the folder of an adapter, but {folder} is none.")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"`adapter.path` must hold {CONFIG}, but {folder} has none. Is it the folder of an adapter?")
    config = read_json(folder / CONFIG)
    if "peft_type" in config:
        from mlxgen.passes.peft_file import read_peft

        return read_peft(folder, config)
    arrays, _ = read_arrays(folder / MLX_FILE)
    base = config.get("mlxgen", {}).get("base", {})
    found = {"folder": folder, "layout": "mlx", "base": base, "fingerprint": fingerprint(folder, MLX_FILE)}
    if config.get("fine_tune_type") == "full":
        return AdapterFile(modules={}, weights=arrays, **found)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("scale"), int | float):
        raise ModelError(f"`{folder / CONFIG}` must have `lora_parameters` with a scale, but has {parameters!r}.")
    modules = group(arrays, ("lora_a", "lora_b", "m"), folder)
    scale = float(parameters["scale"])
    return AdapterFile(
        modules={name: _from_mlx(parts, scale, is_embedding(name)) for name, parts in modules.items()},
        weights={},
        **found,
    )


def write_mlx(
    folder: Path,
    modules: Mapping[str, Factors],
    config: AdapterConfig,
    layers: tuple[Sequence[int], int],
    base: Mapping[str, Any],
    is_embedding: Callable[[str], bool],
) -> None:
    """Write low-rank changes as mlx-lm loads them: one rank and one scale for all.

    layers: the numbers of those that have changes, and how many there are.
    Smaller ranks are filled up with zeros, other scales go into the second matrix.
    """
    rank, scale = max(f.rank for f in modules.values()), next(iter(modules.values())).scale
    arrays: dict[str, mx.array] = {}
    for name, factors in modules.items():
        if factors.use != "both":
            raise ConfigError(
                f"`adapter.format` must be peft: {name} is embedding and output head, but one is changed."
            )
        alike = filled(factors, rank, scale)
        a, b = alike.a, alike.b
        if is_embedding(name):
            a, b = b, a
        elif b.ndim == 2:
            a, b = a.T, b.T
        arrays |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        if factors.m is not None:
            arrays[f"{name}.m"] = factors.m
    numbers, total = layers
    keys = _keys(modules, numbers, total)
    about = {
        "fine_tune_type": "dora" if config.kind == "dora" else "lora",
        "num_layers": len(numbers),
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": config.dropout, "keys": keys},
    }
    write(folder, MLX_FILE, arrays, _about(about, config, base), _METADATA)


def write_full(folder: Path, arrays: Mapping[str, mx.array], config: AdapterConfig, base: Mapping[str, Any]) -> None:
    """Write whole parameters that replace a model's own."""
    write(folder, MLX_FILE, arrays, _about({"fine_tune_type": "full", "num_layers": -1}, config, base), _METADATA)


def write(
    folder: Path, name: str, arrays: Mapping[str, mx.array], about: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """Both files; each appears whole or not at all. Raises ModelError where the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{name}.partial.safetensors"
        mx.save_safetensors(str(partial), {n: mx.contiguous(a) for n, a in arrays.items()}, metadata=dict(metadata))
        os.replace(partial, folder / name)
        write_json(folder / CONFIG, about)
        (folder / (PEFT_FILE if name == MLX_FILE else MLX_FILE)).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"the adapter can't be written to {folder}: {error}.") from None


def read_arrays(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The tensors of a file, and its metadata."""
    if not file.is_file():
        raise ModelError(f"`{file}` is missing; {CONFIG} beside it says that there must be one.")
    read_header(file)
    arrays, metadata = mx.load(str(file), format="safetensors", return_metadata=True)
    assert isinstance(arrays, dict)
    return arrays, metadata  # type: ignore[return-value]


def group(arrays: Mapping[str, mx.array], leaves: tuple[str, ...], folder: Path) -> dict[str, dict[str, mx.array]]:
    """`module.leaf` -> module -> leaf. Raises ModelError for another leaf, or a module without its first two."""
    modules: dict[str, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        module, leaf = next(((name[: -len(end) - 1], end) for end in leaves if name.endswith(f".{end}")), (name, ""))
        if not leaf:
            raise ModelError(f"the adapter in {folder} has a tensor that can't be used: {name}.")
        modules.setdefault(module, {})[leaf] = array
    for module, parts in modules.items():
        if leaves[0] not in parts or leaves[1] not in parts:
            raise ModelError(f"the adapter in {folder} lacks {leaves[0]} or {leaves[1]} of {module}.")
    return modules


def filled(factors: Factors, rank: int, scale: float) -> Factors:
    """The same change with a higher rank and another scale."""
    a, b, more = factors.a, factors.b, rank - factors.rank
    if more:
        front = [(0, 0)] * (a.ndim - 2)
        a, b = mx.pad(a, [*front, (0, more), (0, 0)]), mx.pad(b, [*front, (0, 0), (0, more)])
    return Factors(a=a, b=b if factors.scale == scale else b * (factors.scale / scale), scale=scale, m=factors.m)


def fingerprint(folder: Path, name: str) -> str:
    """SHA-256 over both files."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    if (folder / name).is_file():
        with (folder / name).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _from_mlx(parts: Mapping[str, mx.array], scale: float, embedding: bool) -> Factors:
    a, b = parts["lora_a"], parts["lora_b"]
    if embedding:
        a, b = b, a
    elif a.ndim == 2:
        a, b = a.T, b.T
    return Factors(a=a, b=b, scale=scale, m=parts.get("m"))


def _keys(modules: Mapping[str, Factors], numbers: Sequence[int], total: int) -> list[str]:
    """Which modules mlx-lm must adapt. It knows names inside a layer, of the last layers, and whole names."""
    inside: dict[str, list[int]] = {}
    others = []
    for name in modules:
        _, found, after = name.partition(".layers.")
        number, _, rest = after.partition(".")
        if found and number.isdigit():
            inside.setdefault(rest, []).append(int(number))
        else:
            others.append(name)
    last = list(numbers) == list(range(total - len(numbers), total))
    alike = all(sorted(found) == list(numbers) for found in inside.values())
    return [*inside, *others] if last and alike else list(modules)


def _about(about: Mapping[str, Any], config: AdapterConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: getattr(config, name) for name in ("kind", "rank", "dropout", "layers", "learning_rate_ratio")}
    own |= {"scale": config.factor, "targets": list(config.patterns)}
    return {"model": base.get("source"), **about, "mlxgen": {"base": dict(base), **own}}

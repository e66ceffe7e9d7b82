"""Adapters as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json`.

Reference: peft LoraConfig, tuners/lora/layer. The experts of transformers 5 are parameters, not modules: PEFT wraps
them, one wrapper around the other, and stores [E * r, in] and [out, r * E].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.config.adapter import AdapterConfig
from mlxgen.errors import ConfigError, ModelError
from mlxgen.passes.adapter_file import (
    CONFIG,
    PEFT_FILE,
    AdapterFile,
    filled,
    fingerprint,
    group,
    read_arrays,
    write,
)
from mlxgen.passes.low_rank import Factors

_PREFIX = "base_model.model."
_LEAVES = ("lora_A", "lora_B", "lora_magnitude_vector")
_WRAPPED = ".base_layer"
_BASE = "mlxgen_base"  # in the metadata of the tensors: PEFT warns of what it does not know in the config
_OTHERWISE = ("lora_bias", "use_qalora", "layer_replication", "megatron_config", "alora_invocation_tokens")


def read_peft(folder: Path, config: Mapping[str, Any]) -> AdapterFile:
    """Read a LoRA, rsLoRA or DoRA adapter of PEFT's. Raises ModelError for other methods, and other trained parts."""
    if config["peft_type"] != "LORA":
        raise ModelError(f"`{folder / CONFIG}` must be of a LORA adapter, but `peft_type` is {config['peft_type']!r}.")
    for key in _OTHERWISE:
        if config.get(key):
            raise ModelError(f"`{folder / CONFIG}` has `{key}`, which is not supported.")
    stored, metadata = read_arrays(folder / PEFT_FILE)
    arrays = {_bare(name): array for name, array in stored.items()}
    embeddings = {name.rpartition(".lora_embedding_")[0] for name in arrays if ".lora_embedding_" in name}
    # A copy of the frozen embedding, which PEFT adds on its own.
    arrays = {n: a for n, a in arrays.items() if not n.endswith("base_layer.weight")}
    arrays = {n.replace("lora_embedding_", "lora_"): a for n, a in arrays.items()}
    parameters = config.get("target_parameters") or []
    modules = {}
    for name, parts in group(arrays, _LEAVES, folder).items():
        scale = _scale(config, name)
        a, b, m = parts["lora_A"], parts["lora_B"], parts.get("lora_magnitude_vector")
        if name in embeddings:
            a, b = b.T, a.T
        own, experts = _parameter(name, parameters)
        if experts:
            rank = _setting(config, "rank_pattern", "r", name)
            count = a.shape[0] // rank
            a, b = a.reshape(count, rank, -1), b.reshape(b.shape[0], rank, count).transpose(2, 0, 1)
        modules[own] = Factors(a=a, b=b, scale=scale, m=m if m is None else m.reshape(-1))
    return AdapterFile(
        folder=folder,
        layout="peft",
        modules=modules,
        weights={},
        base=json.loads(metadata.get(_BASE, "{}")),
        fingerprint=fingerprint(folder, PEFT_FILE),
    )


def write_peft(
    folder: Path,
    modules: Mapping[str, Factors],
    config: AdapterConfig,
    base: Mapping[str, Any],
    is_embedding: Callable[[str], bool],
) -> None:
    """Write low-rank changes as PEFT loads them."""
    rank = max(f.rank for f in modules.values())
    scale = next(iter(modules.values())).scale
    arrays: dict[str, mx.array] = {}
    for name, factors in modules.items():
        alike = filled(factors, rank, scale)
        a, b = alike.a, alike.b
        stem, ab = f"{_PREFIX}{name}", ("lora_A.weight", "lora_B.weight")
        if b.ndim == 3:
            stem = f"{_PREFIX}{_wrapper(name)}"
            a, b = a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        elif is_embedding(name):
            if factors.m is not None:
                raise ConfigError("`adapter.format` must be mlx for DoRA on embeddings, which PEFT does otherwise.")
            a, b, ab = b.T, a.T, ("lora_embedding_A", "lora_embedding_B")
        arrays |= {f"{stem}.{ab[0]}": a, f"{stem}.{ab[1]}": b}
        if factors.m is not None:
            arrays[f"{stem}.lora_magnitude_vector"] = factors.m
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.get("source"),
        "r": rank,
        "lora_alpha": scale * (math.sqrt(rank) if config.rank_stabilized else rank),
        "use_rslora": config.rank_stabilized,
        "use_dora": any(f.m is not None for f in modules.values()),
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": [name for name, f in modules.items() if f.b.ndim == 2],
        "target_parameters": [name for name, f in modules.items() if f.b.ndim == 3] or None,
    }
    write(folder, PEFT_FILE, arrays, about, {"format": "pt", _BASE: json.dumps(dict(base))})


def _bare(name: str) -> str:
    """`base_model.model.model.layers.0.q_proj.lora_A.weight` -> `model.layers.0.q_proj.lora_A`."""
    name = name.removeprefix(_PREFIX)
    name = re.sub(r"\.(lora_\w+)\.default\b", r".\1", name)
    return name.removesuffix(".weight") if ".lora_" in name else name


def _parameter(name: str, parameters: list[str]) -> tuple[str, bool]:
    """(the parameter that a wrapper is for, True), or a module's own name.

    The wrapper of the parameter that PEFT met first, gate_up_proj, is inside that of the other.
    """
    if not any(parameter.rpartition(".")[0].endswith("experts") for parameter in parameters):
        return name, False
    if name.endswith(f".experts{_WRAPPED}"):
        return f"{name.removesuffix(_WRAPPED)}.gate_up_proj", True
    if name.endswith(".experts"):
        both = all(any(p.endswith(end) for p in parameters) for end in ("gate_up_proj", "down_proj"))
        which = "down_proj" if both or any(p.endswith("down_proj") for p in parameters) else "gate_up_proj"
        return f"{name}.{which}", True
    return name, False


def _wrapper(name: str) -> str:
    """The inverse of `_parameter`, where both parameters have an adapter."""
    module, _, which = name.rpartition(".")
    return f"{module}{_WRAPPED}" if which == "gate_up_proj" else module


def _scale(config: Mapping[str, Any], name: str) -> float:
    rank, alpha = (_setting(config, *keys, name) for keys in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _setting(config: Mapping[str, Any], patterns: str, key: str, name: str) -> Any:
    """A module's own value, or the one for all. A pattern is the end of a name, or an expression for it."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return config[key]

"""Prepare a decoder for training: what is trained is trainable, everything else frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxgen.config.adapter import AdapterConfig
from mlxgen.decoder import Decoder
from mlxgen.errors import ConfigError
from mlxgen.passes.adapted import Adapted, adapted, flat, share
from mlxgen.passes.low_rank import Factors, initial_factors, weight_shape
from mlxgen.passes.targets import adaptable, chosen, layer_of

DEFAULT = "default"
# Learned by other means than gradients: which experts are chosen is adjusted by a rule while a model is pretrained.
_NOT_BY_GRADIENT = ("select_bias",)


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What is trained: dotted paths of modules (of parameters, where the model's own are trained), and how many."""

    paths: tuple[str, ...]
    trained: int
    total: int


def attach(decoder: Decoder, config: AdapterConfig, *, key: mx.array, name: str = DEFAULT) -> Attached:
    """Freeze a decoder but for what `config` trains; put the modules in place that this takes.

    Before its first step the decoder computes what it did before, bit for bit. `decoder.trainable_parameters()` are
    what is trained. The projections must not be fused. key: of the first values.
    Raises ConfigError for targets that fit nothing, a rank above a dimension, quantized weights to be trained.
    """
    decoder.freeze()
    if config.kind == "none":
        raise ConfigError("`adapter.kind` must be one that trains something, but is none. Choose e.g. adapter=lora.")
    loaded = [path for path, module in adapted(decoder) if name in module["adapters"]]
    if loaded and config.kind != "full":
        paths = _go_on(decoder, config, loaded, name)
    else:
        paths = _full(decoder, config) if config.kind == "full" else _low_rank(decoder, config, key, name)
    parts = flat(decoder.trainable_parameters()), flat(decoder.parameters())
    trained, total = (sum(value.size for value in part.values()) for part in parts)
    return Attached(paths=tuple(paths), trained=trained, total=total)


def _go_on(decoder: nn.Module, config: AdapterConfig, paths: list[str], name: str) -> list[str]:
    """Train an adapter on that was loaded (`adapter.path`): its own rank, scale and targets stay."""
    for path in paths:
        adapter = find(decoder, path)["adapters"][name]
        adapter.unsettle()
        adapter.dropout, adapter.ratio = config.dropout, config.learning_rate_ratio
        adapter.unfreeze()
    return paths


def _low_rank(decoder: Decoder, config: AdapterConfig, key: mx.array, name: str) -> list[str]:
    modules = adaptable(decoder)
    paths = chosen(list(modules), config.patterns, config.layers, len(decoder.layers))
    for path in paths:
        *_, rows, columns = weight_shape(modules[path])
        if config.rank > min(rows, columns):
            raise ConfigError(
                f"`adapter.rank` must be at most {min(rows, columns)} for {path} ({rows} x {columns}), but is "
                f"{config.rank}. Lower it, or leave that module out of `adapter.targets`."
            )
    keys = mx.random.split(key, len(paths))
    dora = config.kind == "dora"
    for path, own_key in zip(paths, keys, strict=True):
        factors = initial_factors(modules[path], config.rank, config.factor, own_key, dora=dora)
        put(decoder, path, name, factors, dropout=config.dropout, ratio=config.learning_rate_ratio)
    finish(decoder)
    for _, module in adapted(decoder):
        module["adapters"][name].unfreeze()
    return paths


def put(decoder: nn.Module, path: str, name: str, factors: Factors, **options: Any) -> None:
    """A change of one module, in place. Call `finish` after the last."""
    module = find(decoder, path)
    if not isinstance(module, Adapted):
        training, module = module.training, Adapted(module)
        module.train(training)
        decoder.update_modules(tree_unflatten([(path, module)]))
    adapter = module.add(name, factors, **options)
    adapter.train(module.training)
    adapter.freeze()


def finish(decoder: nn.Module) -> None:
    """All changes are in place: evaluate them, and let them share what they must."""
    share(decoder)
    mx.eval(
        [
            list(module["adapters"][n].parameters().values())
            for _, module in adapted(decoder)
            for n in module["adapters"]
        ]
    )


def find(decoder: nn.Module, path: str) -> Any:
    """The module of a dotted path."""
    module: Any = decoder
    for part in path.split("."):
        module = module[int(part)] if isinstance(module, list) else module[part]
    return module


def _full(decoder: Decoder, config: AdapterConfig) -> list[str]:
    names = list(flat(decoder.parameters()))
    packed = next((name for name in names if name.endswith(".scales")), None)
    if packed is not None:
        raise ConfigError(
            f"`adapter=full` must have plain weights, but {packed.removesuffix('.scales')} is quantized. "
            "Set model.dequantize=true, or choose adapter=lora."
        )
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if config.targets is not None:
        wanted = set(chosen(modules, config.patterns, config.layers, len(decoder.layers)))
    elif config.layers is not None:
        wanted = set(chosen([m for m in modules if layer_of(m) is not None], ["*"], config.layers, len(decoder.layers)))
    else:
        wanted = set(modules)
    kept = [n for n in names if n.rpartition(".")[0] in wanted and n.rpartition(".")[2] not in _NOT_BY_GRADIENT]
    unfreeze(decoder, kept)
    return kept


def unfreeze(decoder: nn.Module, names: Iterable[str]) -> None:
    """Make exactly these parameters of a frozen decoder trainable."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = find(decoder, path) if path else decoder
        module.unfreeze(keys=[leaf], recurse=False)

"""Adapters of a decoder: saved to a folder, loaded from one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxgen.checkpoint.names import NameMap
from mlxgen.checkpoint.save import mlx_arrays, mlx_ops
from mlxgen.checkpoint.tensor import Tensor
from mlxgen.config.adapter import AdapterConfig
from mlxgen.decoder import Decoder
from mlxgen.errors import ConfigError, ModelError
from mlxgen.passes.adapted import adapted, flat, set_weights
from mlxgen.passes.adapter_file import AdapterFile, read_adapter, write_full, write_mlx
from mlxgen.passes.adapter_names import AdapterNames
from mlxgen.passes.attach import DEFAULT, finish, put
from mlxgen.passes.low_rank import Factors, weight_shape
from mlxgen.passes.merge import merge
from mlxgen.passes.peft_file import write_peft
from mlxgen.passes.targets import adaptable, layer_of

_NO_BASE: Mapping[str, Any] = {}
_ALONE = "`adapter.paths.{}` replaces the model's own weights, so it must be the only one, without a weight."


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """What was loaded: the modules it changes (none: whole parameters were replaced), and its fingerprint.

    weight: how much it counts where a request does not say.
    """

    name: str
    paths: tuple[str, ...]
    fingerprint: str
    weight: float = 1.0


def save_adapter(
    decoder: Decoder,
    folder: Path,
    config: AdapterConfig,
    rules: Mapping[str, Any],
    *,
    base: Mapping[str, Any] = _NO_BASE,
    name: str = DEFAULT,
    parameters: Mapping[str, mx.array] | None = None,
) -> None:
    """Write what `attach` made trainable: for mlx-lm, and with `config.format` peft for PEFT.

    rules: the blueprint's `weights`. base: what it was trained on (`fingerprint`, `model_type`, `source`).
    parameters: values to write instead of the decoder's own, by dotted path, such as an average of them.
    Raises ModelError where the disk refuses, ConfigError for what a format can't hold.
    """
    values = flat(decoder.trainable_parameters()) | dict(parameters or {})
    if config.kind == "full":
        if config.format == "peft":
            raise ConfigError("`adapter.format` must be mlx for adapter.kind=full: PEFT has no form for it.")
        write_full(folder, mlx_arrays(values, rules), config, base)
        return
    layout = config.format
    names = AdapterNames(rules, layout, _shapes(decoder))
    modules = names.write(factors_of(decoder, name, values))
    embedding = _is_embedding(decoder, names)
    if layout == "peft":
        write_peft(folder, modules, config, base, embedding)
    else:
        numbers = sorted({layer for path, _ in adapted(decoder) if (layer := layer_of(path)) is not None})
        write_mlx(folder, modules, config, (numbers, len(decoder.layers)), base, embedding)


def factors_of(decoder: nn.Module, name: str, values: Mapping[str, mx.array] = _NO_BASE) -> dict[str, Factors]:
    """The changes that an adapter consists of, by path; `values` instead of parameters of their names."""
    out = {}
    for path, module in adapted(decoder):
        adapter = module["adapters"].get(name)
        if adapter is None:
            continue
        stem = f"{path}.adapters.{name}."
        own = {leaf: values.get(stem + leaf, adapter.get(leaf)) for leaf in ("lora_a", "lora_b", "m")}
        a, b = adapter.stored(own["lora_a"], own["lora_b"], back=True)
        out[path] = Factors(a=a, b=b, scale=adapter.scale, m=own["m"], use=adapter.use)
    return out


def load_adapter(
    decoder: nn.Module,
    folder: Path,
    rules: Mapping[str, Any],
    *,
    name: str = DEFAULT,
    base: Mapping[str, Any] = _NO_BASE,
    strict: bool = True,
) -> LoadedAdapter:
    """Put an adapter of mlxgen's, mlx-lm's or PEFT's on a decoder whose projections are not fused, ready to be used.

    base: what the decoder is; an adapter that says that it was trained on another is refused, unless not `strict`.
    Raises ModelError for an adapter that is broken, of another method, or for another model.
    """
    shapes = _shapes(decoder)
    names = {layout: AdapterNames(rules, layout, shapes) for layout in ("mlx", "peft")}
    file = read_adapter(folder, _is_embedding(decoder, names["mlx"]))
    _check_base(file, base, strict)
    if file.weights and any(True for _ in adapted(decoder)):
        raise ConfigError(_ALONE.format(name))
    if file.weights:
        _replace(decoder, file, rules)
        return LoadedAdapter(name=name, paths=(), fingerprint=file.fingerprint)
    modules = names[file.layout].read(file.modules)
    _check(file, modules, shapes)
    for path, factors in modules.items():
        put(decoder, path, name, factors)
    finish(decoder)
    for path, module in adapted(decoder):
        if path in modules:
            module["adapters"][name].settle(module["base"])
    return LoadedAdapter(name=name, paths=tuple(modules), fingerprint=file.fingerprint)


def load_adapters(
    decoder: nn.Module, config: AdapterConfig, rules: Mapping[str, Any], base: Mapping[str, Any] = _NO_BASE
) -> tuple[LoadedAdapter, ...]:
    """Load what `config.path` or `config.paths` name, each with its weight; with `config.merge`, merge all."""
    loaded = tuple(
        load_adapter(decoder, Path(folder).expanduser(), rules, name=name, base=base, strict=config.strict)
        for name, folder in config.folders.items()
    )
    whole = next((adapter for adapter in loaded if not adapter.paths), None)
    if whole is not None and (len(loaded) > 1 or config.weights):
        raise ConfigError(_ALONE.format(whole.name))
    loaded = tuple(replace(adapter, weight=config.weights.get(adapter.name, 1.0)) for adapter in loaded)
    set_weights(decoder, {adapter.name: adapter.weight for adapter in loaded})
    if config.merge:
        merge(decoder)
    return loaded


def _shapes(decoder: nn.Module) -> dict[str, tuple[int, ...]]:
    return {path: weight_shape(module) for path, module in adaptable(decoder).items()}


def _is_embedding(decoder: nn.Module, names: AdapterNames) -> Callable[[str], bool]:
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    found = {path for path, module in adaptable(decoder).items() if isinstance(module, kinds)}
    return lambda name: names.ours(name) in found


def _check_base(file: AdapterFile, base: Mapping[str, Any], strict: bool) -> None:
    theirs, ours = file.base.get("model_type"), base.get("model_type")
    if theirs and ours and theirs != ours:
        raise ModelError(f"the adapter in {file.folder} is for another model: trained on {theirs}, not {ours}.")
    theirs, ours = file.base.get("fingerprint"), base.get("fingerprint")
    if theirs and ours and theirs != ours:
        source = f" ({file.base['source']})" if file.base.get("source") else ""
        text = f"the adapter in {file.folder} was trained on other weights than these{source}"
        if strict:
            raise ModelError(f"{text}. If they are the same model's, as after quantization, set adapter.strict=false.")
        warnings.warn(f"{text}.", stacklevel=3)


def _check(file: AdapterFile, modules: Mapping[str, Factors], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not modules:
        raise ModelError(f"the adapter in {file.folder} is empty.")
    unknown = [path for path in modules if path not in shapes]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelError(f"the adapter in {file.folder} is for another model: this one has no {unknown[0]}{more}.")
    for path, factors in modules.items():
        made = (*factors.b.shape[:-1], factors.a.shape[-1])
        fits = made == shapes[path] and factors.a.shape[-2] == factors.b.shape[-1]
        if not fits or (factors.m is not None and factors.m.shape != made[:-1]):
            want, have = (" x ".join(map(str, shape)) for shape in (shapes[path], made))
            text = f"{path} must be {want}, but its matrices {factors.b.shape} and {factors.a.shape} make {have}"
            raise ModelError(f"the adapter in {file.folder} is for another model: {text}.")


def _replace(decoder: nn.Module, file: AdapterFile, rules: Mapping[str, Any]) -> None:
    shapes = {name: value.shape for name, value in flat(decoder.parameters()).items()}
    names = NameMap(rules["rename"], rules["aliases"])
    tensors = {names.ours(n): Tensor(shape=a.shape, load=_giving(a)) for n, a in file.weights.items()}
    for op in mlx_ops(rules):
        tensors = op.load(tensors, shapes)
    for name, tensor in tensors.items():
        if shapes.get(name) != tensor.shape:
            have = "no such parameter" if name not in shapes else f"{shapes[name]} there"
            raise ModelError(
                f"the adapter in {file.folder} is for another model, or for plain weights (model.dequantize=true): "
                f"it has {name} {tensor.shape}, but this model has {have}."
            )
    kept = {name: value.dtype for name, value in flat(decoder.parameters()).items()}
    decoder.update(tree_unflatten([(n, t.load().astype(kept[n])) for n, t in tensors.items()]))
    mx.eval(decoder.parameters())


def _giving(array: mx.array) -> Callable[[], mx.array]:
    return lambda: array

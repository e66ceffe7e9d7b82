"""From an opened checkpoint to a decoder with weights: names, shapes and quantization first, values last.

Values are read layer by layer, so that the peak of memory is the weights plus one layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxgen.blueprint.text_part import text_name
from mlxgen.checkpoint.names import NameMap
from mlxgen.checkpoint.ops import build_ops
from mlxgen.checkpoint.packed import dequantized
from mlxgen.checkpoint.quantized import decoded
from mlxgen.checkpoint.tensor import Tensor, Tensors
from mlxgen.errors import WeightsError


class Source(Protocol):
    """What loading needs of an opened checkpoint."""

    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    tensors: Mapping[str, Any]  # name -> something with a `shape` and a `dtype`
    baked: frozenset[str]  # labels of blueprint operations that the file has been through already

    def load(self, name: str) -> mx.array: ...


def load_weights(
    decoder: nn.Module,
    source: Source,
    rules: Mapping[str, Any],
    *,
    dtype: mx.Dtype | None = None,
    dequantize: bool = False,
    finish: Callable[[nn.Module], None] = lambda layer: None,
) -> None:
    """Fill `decoder` with the tensors of `source`, renamed and rearranged by a blueprint's `weights` rules.

    dtype: what to convert floating point values to; None keeps the checkpoint's.
    dequantize: turn quantized modules into plain ones of `dtype`.
    finish: called with each layer once it has its weights, before they are evaluated.
    Raises WeightsError naming what is missing, too much or of another shape, before anything is read.
    """
    shapes = {name: value.shape for name, value in tree_flatten(decoder.parameters())}
    tensors = decoded(_renamed(source, rules), source.config, dtype, exact=dequantize)
    for op in build_ops(rules["ops"], source.baked):
        tensors = op.load(tensors, shapes)
    if "lm_head.weight" not in shapes:  # a tied head: what the file has besides the embedding is a copy
        tensors = {n: t for n, t in tensors.items() if not n.startswith("lm_head.") or n in shapes}
    if dequantize:
        tensors = dequantized(tensors)
    else:
        _quantize_modules(decoder, tensors)
    _check(tensors, {name: value.shape for name, value in tree_flatten(decoder.parameters())})
    _fill(decoder, tensors, dtype, finish)


def _renamed(source: Source, rules: Mapping[str, Any]) -> Tensors:
    names = NameMap(rules["rename"], rules["aliases"])
    ignored = [_ignores(rule) for rule in rules["ignore"].values()]
    out: Tensors = {}
    for name, info in source.tensors.items():
        text = text_name(name)
        if text is None or 0 in info.shape or any(ignores(text, names.ours(text)) for ignores in ignored):
            continue
        out[names.ours(text)] = Tensor(
            shape=tuple(info.shape),
            load=_loader(source, name),
            quantization=_quantization(source, name),
            dtype=str(info.dtype),
        )
    return out


def _ignores(rule: str | Mapping[str, Any]) -> Callable[[str, str], bool]:
    """Whether a tensor (its name in the checkpoint, and ours) is left out: by a part of its name, or for standing in a
    layer from the number `from` on, as those that some checkpoints add to predict several tokens at once; there it
    may be some `modules` only.
    """
    if isinstance(rule, str):
        return lambda name, ours: rule in name
    start, modules = rule["from"], rule.get("modules", [""])

    def ignores(name: str, ours: str) -> bool:
        parts = ours.split(".")
        return parts[0] == "layers" and int(parts[1]) >= start and any(m in ours for m in modules)

    return ignores


def _loader(source: Source, name: str) -> Callable[[], mx.array]:
    return lambda: source.load(name)


def _quantization(source: Source, name: str) -> Mapping[str, Any] | None:
    """The settings of a packed weight: its own entry in the config, or the one for the whole model."""
    module, _, suffix = name.rpartition(".")
    if suffix != "weight" or f"{module}.scales" not in source.tensors:
        return None
    settings = source.quantization
    if settings is None:
        raise WeightsError(f"{name} is quantized, but config.json has no `quantization`.")
    own = settings.get(module)
    chosen = own if isinstance(own, Mapping) else settings
    return {
        "group_size": chosen.get("group_size", settings.get("group_size", 64)),
        "bits": chosen.get("bits", settings.get("bits", 4)),
        "mode": chosen.get("mode", settings.get("mode", "affine")),
    }


def _quantize_modules(decoder: nn.Module, tensors: Tensors) -> None:
    """Replace the modules whose weights are packed by their quantized kind; nothing is computed."""

    def settings(path: str, module: nn.Module) -> Any:
        tensor = tensors.get(f"{path}.weight")
        return dict(tensor.quantization) if tensor is not None and tensor.quantization is not None else False

    if any(t.quantization for t in tensors.values()):
        nn.quantize(decoder, class_predicate=settings)


def _check(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(set(shapes) - set(tensors))
    extra = sorted(set(tensors) - set(shapes))
    if missing:
        raise WeightsError(f"the checkpoint lacks {_listed(missing)}; is it complete, and of this architecture?")
    if extra:
        raise WeightsError(f"the checkpoint has tensors that this architecture does not use: {_listed(extra)}.")
    for name, shape in shapes.items():
        if (tensors[name].dtype or "").startswith("float8"):
            raise WeightsError(f"{name} is stored in 8 bits, but no scales or `quantization_config` explain it.")
        if tuple(tensors[name].shape) != tuple(shape):
            raise WeightsError(f"{name} must have shape {tuple(shape)}, but has {tuple(tensors[name].shape)}.")


def _listed(names: list[str], most: int = 4) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _fill(
    decoder: nn.Module, tensors: Tensors, dtype: mx.Dtype | None, finish: Callable[[nn.Module], None]
) -> None:
    groups: dict[int | None, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        layer = int(parts[1]) if parts[0] == "layers" else None
        groups.setdefault(layer, {})[name if layer is None else ".".join(parts[2:])] = tensor
    # The largest tensors, embedding and head, come first: what unpacking them takes is free again for the layers.
    for layer in sorted(groups, key=lambda layer: -1 if layer is None else layer):
        module = decoder if layer is None else decoder.layers[layer]
        for name, tensor in groups[layer].items():
            array = _converted(tensor.load(), dtype)
            if layer is None:
                mx.eval(array)
            module.update(tree_unflatten([(name, array)]))
        if layer is not None:
            finish(module)
            mx.eval(module.parameters())


def _converted(value: mx.array, dtype: mx.Dtype | None) -> mx.array:
    floating = mx.issubdtype(value.dtype, mx.floating)
    return value.astype(dtype) if dtype is not None and floating else value


def names_of(source: Source, rules: Mapping[str, Any]) -> Iterable[str]:
    """The checkpoint's tensor names, in our terms before operations: what a blueprint may ask for."""
    names = NameMap(rules["rename"], rules["aliases"])
    return [names.ours(text) for name in source.tensors if (text := text_name(name)) is not None]

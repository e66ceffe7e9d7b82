"""Load-time operations of a blueprint: what a checkpoint stores in another layout than the decoder's modules.

Each works on lazy tensors, so nothing is read before the names and shapes are known to fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxgen.errors import ConfigError, WeightsError


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that is known but not read. `quantization` is set on the packed weight of a quantized module."""

    shape: tuple[int, ...]
    load: Callable[[], mx.array]
    quantization: Mapping[str, Any] | None = None


Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def apply_ops(ops: Mapping[str, Mapping[str, Any]], tensors: Tensors, shapes: Shapes, done: frozenset[str]) -> Tensors:
    """Run a blueprint's `weights.ops` in their order; those labelled in `done` the checkpoint has been through already.

    `shapes` are the shapes of the decoder's parameters before quantization.
    """
    for label, node in ops.items():
        arguments = dict(node)
        name = arguments.pop("op", None)
        if name not in _OPS:
            raise ConfigError(f"`weights.ops.{label}.op` must be one of {', '.join(_OPS)}, but is {name!r}.")
        if label not in done:
            tensors = _OPS[name](tensors, shapes, **arguments)
    return tensors


def _split(tensors: Tensors, shapes: Shapes, *, into: list[str], **rest: str) -> Tensors:
    """Rows of one fused projection become several: [a + b + c, in] -> [a, in], [b, in], [c, in].

    Packed weights, scales and biases of a quantized module are split along the same axis, without loss.
    """
    source = rest["from"]
    out: Tensors = {}
    for name, tensor in tensors.items():
        before, found, suffix = name.partition(f".{source}.")
        if not found:
            out[name] = tensor
            continue
        targets = [f"{before}.{part}" for part in into]
        sizes = [shapes[f"{t}.weight"][0] for t in targets if f"{t}.weight" in shapes]
        if len(sizes) != len(into) or sum(sizes) != tensor.shape[0]:
            raise WeightsError(f"{name} must have {' + '.join(map(str, sizes))} rows, but has {tensor.shape[0]}.")
        start = 0
        for target, size in zip(targets, sizes, strict=True):
            out[f"{target}.{suffix}"] = _rows(tensor, start, start + size)
            start += size
    return out


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return replace(tensor, shape=(stop - start, *tensor.shape[1:]), load=lambda: tensor.load()[start:stop])


def _stack(tensors: Tensors, shapes: Shapes, *, path: str, modules: list[str]) -> Tensors:
    """One tensor per expert, `path.0.gate_proj.weight`, ... becomes one for all, `path.gate_proj.weight` [E, out, in]."""
    pattern = re.compile(rf"^(.*\.)?{re.escape(path)}\.(\d+)\.({'|'.join(map(re.escape, modules))})\.(\w+)$")
    out: Tensors = {}
    groups: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = pattern.match(name)
        if match is None:
            out[name] = tensor
            continue
        before, expert, module, suffix = match.groups()
        groups.setdefault(f"{before or ''}{path}.{module}.{suffix}", {})[int(expert)] = tensor
    for name, experts in groups.items():
        missing = sorted(set(range(len(experts))) - set(experts))
        if missing:
            raise WeightsError(f"{name}: expert {missing[0]} is missing from the checkpoint.")
        parts = [experts[i] for i in range(len(experts))]
        odd = next((i for i, p in enumerate(parts) if p.shape != parts[0].shape), None)
        if odd is not None:
            raise WeightsError(f"{name}: expert {odd} must have shape {parts[0].shape}, but has {parts[odd].shape}.")
        out[name] = replace(parts[0], shape=(len(parts), *parts[0].shape), load=_stacked(parts))
    return out


def _stacked(parts: list[Tensor]) -> Callable[[], mx.array]:
    return lambda: mx.stack([p.load() for p in parts])


def _offset(tensors: Tensors, shapes: Shapes, *, modules: list[str], add: float) -> Tensors:
    """Norm weights that are stored minus one. Added in float32, as the authors' code does at run time."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        parts = name.split(".")
        if len(parts) > 1 and parts[-1] == "weight" and parts[-2] in modules:
            out[name] = replace(tensor, load=_plus(tensor, add))
    return out


def _plus(tensor: Tensor, add: float) -> Callable[[], mx.array]:
    return lambda: tensor.load().astype(mx.float32) + add


_OPS: dict[str, Callable[..., Tensors]] = {"split": _split, "stack": _stack, "offset": _offset}

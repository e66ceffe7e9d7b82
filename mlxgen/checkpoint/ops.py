"""Load-time operations of a blueprint: what a checkpoint stores in another layout than the decoder's modules.

Each works on lazy tensors, so nothing is read before the names and shapes are known to fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx

from mlxgen.errors import ConfigError, WeightsError
from mlxgen.schema import parse


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that is known but not read. `quantization` is set on the packed weight of a quantized module."""

    shape: tuple[int, ...]
    load: Callable[[], mx.array]
    quantization: Mapping[str, Any] | None = None


Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Arrays = dict[str, mx.array]


class Op(Protocol):
    """One operation, both ways: `load` when a checkpoint is read, `save` when one is written."""

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors: ...

    def save(self, arrays: Arrays) -> Arrays: ...


def build_ops(nodes: Mapping[str, Mapping[str, Any]], done: frozenset[str] = frozenset()) -> list[Op]:
    """A blueprint's `weights.ops` in their order, without those labelled in `done`."""
    ops = []
    for label, node in nodes.items():
        arguments = dict(node)
        kind = _OPS.get(arguments.pop("op", None))
        if kind is None:
            raise ConfigError(f"`weights.ops.{label}.op` must be one of {', '.join(_OPS)}, but is {node.get('op')!r}.")
        if label not in done:
            ops.append(parse(kind, arguments, f"weights.ops.{label}"))
    return ops


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows of one fused projection become several: `source` [a + b + c, in] -> `into` [a, in], [b, in], [c, in].

    Packed weights, scales and biases of a quantized module are split along the same axis, without loss.
    """

    source: str
    into: tuple[str, ...]

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            before, found, suffix = name.partition(f".{self.source}.")
            if not found:
                out[name] = tensor
                continue
            targets = [f"{before}.{part}" for part in self.into]
            sizes = [shapes[f"{t}.weight"][0] for t in targets if f"{t}.weight" in shapes]
            if len(sizes) != len(targets) or sum(sizes) != tensor.shape[0]:
                raise WeightsError(f"{name} must have {' + '.join(map(str, sizes))} rows, but has {tensor.shape[0]}.")
            start = 0
            for target, size in zip(targets, sizes, strict=True):
                out[f"{target}.{suffix}"] = _rows(tensor, start, start + size)
                start += size
        return out

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            before, found, suffix = name.partition(f".{self.into[0]}.")
            parts = [f"{before}.{part}.{suffix}" for part in self.into]
            if found and all(part in arrays for part in parts):
                out[f"{before}.{self.source}.{suffix}"] = mx.concatenate([arrays[p] for p in parts])
            elif not any(f".{part}." in name and self._is_part(name, part, arrays) for part in self.into[1:]):
                out[name] = array
        return out

    def _is_part(self, name: str, part: str, arrays: Arrays) -> bool:
        before, _, suffix = name.partition(f".{part}.")
        return f"{before}.{self.into[0]}.{suffix}" in arrays


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return replace(tensor, shape=(stop - start, *tensor.shape[1:]), load=lambda: tensor.load()[start:stop])


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A tensor for each expert, `path.0.gate_proj.weight`, becomes one for all, `path.gate_proj.weight` [E, out, in]."""

    path: str
    modules: tuple[str, ...]

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        choice = "|".join(map(re.escape, self.modules))
        pattern = re.compile(rf"^(.*\.)?{re.escape(self.path)}\.(\d+)\.({choice})\.(\w+)$")
        out: Tensors = {}
        groups: dict[str, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            match = pattern.match(name)
            if match is None:
                out[name] = tensor
                continue
            before, expert, module, suffix = match.groups()
            groups.setdefault(f"{before or ''}{self.path}.{module}.{suffix}", {})[int(expert)] = tensor
        return {**out, **{name: _stacked(name, experts) for name, experts in groups.items()}}

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            before, found, rest = name.partition(f"{self.path}.")
            if found and rest.split(".")[0] in self.modules:
                out |= {f"{before}{self.path}.{i}.{rest}": array[i] for i in range(array.shape[0])}
            else:
                out[name] = array
        return out


def _stacked(name: str, experts: Mapping[int, Tensor]) -> Tensor:
    missing = sorted(set(range(len(experts))) - set(experts))
    if missing:
        raise WeightsError(f"{name}: expert {missing[0]} is missing from the checkpoint.")
    parts = [experts[i] for i in range(len(experts))]
    for i, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise WeightsError(f"{name}: expert {i} must have shape {parts[0].shape}, but has {part.shape}.")
    shape = (len(parts), *parts[0].shape)
    return replace(parts[0], shape=shape, load=lambda: mx.stack([part.load() for part in parts]))


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Norm weights that are stored minus `add`. Added in float32, as the authors' code does at run time."""

    modules: tuple[str, ...]
    add: float

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        return {n: self._plus(t) if self._concerns(n) else t for n, t in tensors.items()}

    def save(self, arrays: Arrays) -> Arrays:
        return {n: a.astype(mx.float32) - self.add if self._concerns(n) else a for n, a in arrays.items()}

    def _concerns(self, name: str) -> bool:
        parts = name.split(".")
        return len(parts) > 1 and parts[-1] == "weight" and parts[-2] in self.modules

    def _plus(self, tensor: Tensor) -> Tensor:
        return replace(tensor, load=lambda: tensor.load().astype(mx.float32) + self.add)


_OPS: dict[str | None, type[Any]] = {"split": Split, "stack": Stack, "offset": Offset}

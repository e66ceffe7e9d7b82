"""Load-time operations of a blueprint: what a checkpoint stores in another layout than the decoder's modules.

Each works on lazy tensors, so nothing is read before the names and shapes are known to fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxgen.checkpoint.block_ops import FlatExperts, FusedExperts, SplitLatent
from mlxgen.checkpoint.recurrent_ops import FixedDecay, Join, Move, ScaleRows, UnitAxes
from mlxgen.checkpoint.tensor import Arrays, Op, Shapes, Tensor, Tensors, around
from mlxgen.checkpoint.ternary import Ternary
from mlxgen.checkpoint.value_ops import Offset, Scale, Squeeze, ZeroRow
from mlxgen.errors import ConfigError, WeightsError
from mlxgen.schema import parse


def build_ops(nodes: Mapping[str, Mapping[str, Any]], done: frozenset[str] = frozenset()) -> list[Op]:
    """A blueprint's `weights.ops` in their order, without those labelled in `done`; null takes one away."""
    ops = []
    for label, node in nodes.items():
        if node is None:
            continue
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

    groups: how many times the parts alternate: with one group for each head, the rows are q, k, v of the first
    head, then of the second, and so on. axis: 1 where experts stand in front, [E, a + b, in].
    Packed weights, scales and biases of a quantized module are split along the same axis, without loss.
    """

    source: str
    into: tuple[str, ...]
    groups: int = 1
    axis: int = 0

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            before, found, suffix = around(name, self.source)
            if not found:
                out[name] = tensor
                continue
            targets = [f"{before}{part}" for part in self.into]
            sizes = [shapes[f"{t}.weight"][self.axis] for t in targets if f"{t}.weight" in shapes]
            rows = tensor.shape[self.axis]
            if len(sizes) != len(targets) or sum(sizes) != rows:
                raise WeightsError(f"{name} must have {' + '.join(map(str, sizes))} rows, but has {rows}.")
            start = 0
            for target, size in zip(targets, sizes, strict=True):
                out[f"{target}{suffix}"] = self._part(tensor, start // self.groups, size // self.groups)
                start += size
        return out

    def _part(self, tensor: Tensor, start: int, size: int) -> Tensor:
        """`size` rows from `start` on of every group."""
        axis, shape = self.axis, tensor.shape

        def load() -> mx.array:
            grouped = tensor.load().reshape(*shape[:axis], self.groups, -1, *shape[axis + 1 :])
            where = (slice(None),) * (axis + 1) + (slice(start, start + size),)
            return grouped[where].reshape(result)

        result = (*shape[:axis], size * self.groups, *shape[axis + 1 :])
        return replace(tensor, shape=result, load=load)

    def save(self, arrays: Arrays) -> Arrays:
        out, whole = dict(arrays), {}
        for name in arrays:
            before, found, suffix = around(name, self.into[0])
            parts = [f"{before}{part}{suffix}" for part in self.into]
            if found and all(part in arrays for part in parts):  # the first part may have the name of the whole
                if len({arrays[part].dtype == mx.uint32 for part in parts}) > 1:
                    text = "some are quantized and some are not, but they are one tensor in a file"
                    raise WeightsError(f"{', '.join(parts)}: {text}; write all of them plain, or all quantized.")
                whole[f"{before}{self.source}{suffix}"] = self._joined([out.pop(part) for part in parts])
        return out | whole

    def _joined(self, parts: list[mx.array]) -> mx.array:
        axis, shape = self.axis, parts[0].shape
        grouped = [part.reshape(*shape[:axis], self.groups, -1, *shape[axis + 1 :]) for part in parts]
        return mx.concatenate(grouped, axis=axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])


@dataclass(frozen=True, kw_only=True)
class Transpose:
    """Weights that are stored [in, out] become [out, in].

    MLX's converted checkpoints have them turned already: quantized tensors are left alone, and all are if one
    that is not square fits as it is.
    """

    modules: tuple[str, ...]

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        ours = {n: t for n, t in tensors.items() if self._concerns(n) and t.quantization is None}
        if any(t.shape == shapes.get(n) and t.shape[-1] != t.shape[-2] for n, t in ours.items()):
            return tensors
        return tensors | {n: _turned(t) for n, t in ours.items()}

    def save(self, arrays: Arrays) -> Arrays:
        return {n: a.swapaxes(-1, -2) if self._concerns(n) else a for n, a in arrays.items()}

    def _concerns(self, name: str) -> bool:
        return any(name.endswith(f".{module}.weight") for module in self.modules)


def _turned(tensor: Tensor) -> Tensor:
    *front, rows, columns = tensor.shape
    return replace(tensor, shape=(*front, columns, rows), load=lambda: tensor.load().swapaxes(-1, -2))


@dataclass(frozen=True, kw_only=True)
class SwapHalves:
    """The two halves of every head's rows change places: rope then turns the other way. `size` is the head's."""

    modules: tuple[str, ...]
    size: int

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        return {n: self._swapped(t) if self._concerns(n) else t for n, t in tensors.items()}

    def save(self, arrays: Arrays) -> Arrays:
        return {n: self._swap(a) if self._concerns(n) else a for n, a in arrays.items()}

    def _concerns(self, name: str) -> bool:
        return any(around(name, module)[1] for module in self.modules)

    def _swapped(self, tensor: Tensor) -> Tensor:
        return replace(tensor, load=lambda: self._swap(tensor.load()))

    def _swap(self, rows: mx.array) -> mx.array:
        return rows.reshape(-1, 2, self.size // 2, *rows.shape[1:])[:, ::-1].reshape(rows.shape)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A tensor for each expert, `path.0.up_proj.weight`, becomes one for all, `path.up_proj.weight` [E, out, in].

    Without `modules` it is `path.0.weight` that becomes `path.weight`.
    """

    path: str
    modules: tuple[str, ...] = ()

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        choice = "|".join(re.escape(f"{module}.") for module in self.modules)
        pattern = re.compile(rf"^(.*\.)?{re.escape(self.path)}\.(\d+)\.({choice})(\w+)$")
        out: Tensors = {}
        groups: dict[str, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            match = pattern.match(name)
            if match is None:
                out[name] = tensor
                continue
            before, expert, module, suffix = match.groups()
            groups.setdefault(f"{before or ''}{self.path}.{module}{suffix}", {})[int(expert)] = tensor
        return {**out, **{name: _stacked(name, experts) for name, experts in groups.items()}}

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            before, found, after = around(name, self.path)
            if found and (after.split(".")[1] in self.modules or not self.modules):
                out |= {f"{before}{self.path}.{i}{after}": array[i] for i in range(array.shape[0])}
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


_OPS: dict[str | None, type[Any]] = {
    "split": Split,
    "transpose": Transpose,
    "swap_halves": SwapHalves,
    "stack": Stack,
    "offset": Offset,
    "squeeze": Squeeze,
    "scale": Scale,
    "zero_row": ZeroRow,
    "fused_experts": FusedExperts,
    "flat_experts": FlatExperts,
    "split_latent": SplitLatent,
    "ternary": Ternary,
    "unit_axes": UnitAxes,
    "join": Join,
    "move": Move,
    "fixed_decay": FixedDecay,
    "scale_rows": ScaleRows,
}

"""Load-time operations on the numbers of single tensors: constants that the authors' code adds or multiplies by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxgen.checkpoint.tensor import Arrays, Shapes, Tensor, Tensors, around


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Norm weights that are stored minus `add`. Added in float32, as the authors' code does at run time.

    not_after_turn: a convolution that MLX's converted checkpoints store as [C, K, 1]; those have the offset already.
    """

    modules: tuple[str, ...]
    add: float
    not_after_turn: str | None = None

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        turned = [t for n, t in tensors.items() if self.not_after_turn and around(n, self.not_after_turn)[1]]
        if any(t.shape[-1] == 1 for t in turned):
            return tensors
        return {n: self._plus(t) if self._concerns(n) else t for n, t in tensors.items()}

    def save(self, arrays: Arrays) -> Arrays:
        return {n: a.astype(mx.float32) - self.add if self._concerns(n) else a for n, a in arrays.items()}

    def _concerns(self, name: str) -> bool:
        parts = name.split(".")
        return len(parts) > 1 and parts[-1] == "weight" and parts[-2] in self.modules

    def _plus(self, tensor: Tensor) -> Tensor:
        return replace(tensor, load=lambda: tensor.load().astype(mx.float32) + self.add)


@dataclass(frozen=True, kw_only=True)
class Squeeze:
    """Tensors that are stored with an axis of length 1 in front become ones without."""

    names: tuple[str, ...]

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        return {n: _first(t) if self._concerns(n) and t.shape[0] == 1 else t for n, t in tensors.items()}

    def save(self, arrays: Arrays) -> Arrays:
        return {n: a[None] if self._concerns(n) else a for n, a in arrays.items()}

    def _concerns(self, name: str) -> bool:
        return any(name.endswith(f".{ending}") for ending in self.names)


def _first(tensor: Tensor) -> Tensor:
    return replace(tensor, shape=tensor.shape[1:], load=lambda: tensor.load()[0])


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Linear maps whose result the authors' code multiplies by a constant: it goes into the weight and the bias.

    Of a packed weight, it goes into scales and biases.
    """

    modules: tuple[str, ...]
    by: float

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        return {n: self._times(t) if self._concerns(n, tensors) else t for n, t in tensors.items()}

    def save(self, arrays: Arrays) -> Arrays:
        return {n: _times(a, 1 / self.by) if self._concerns(n, arrays) else a for n, a in arrays.items()}

    def _concerns(self, name: str, present: Mapping[str, Any]) -> bool:
        path, _, suffix = name.rpartition(".")
        packed = f"{path}.scales" in present
        which = ("scales", "biases", "bias") if packed else ("weight", "bias")
        return suffix in which and any(path.endswith(f".{module}") for module in self.modules)

    def _times(self, tensor: Tensor) -> Tensor:
        return replace(tensor, load=lambda: _times(tensor.load(), self.by))


def _times(array: mx.array, by: float) -> mx.array:
    return (array.astype(mx.float32) * by).astype(array.dtype)


@dataclass(frozen=True, kw_only=True)
class ZeroRow:
    """A row of a table that the authors' code sets to zero when it loads, whatever the checkpoint holds."""

    module: str
    row: int | None  # None: no such row

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        return {n: self._zeroed(t) if n.rpartition(".")[0] == self.module else t for n, t in tensors.items()}

    def save(self, arrays: Arrays) -> Arrays:
        return arrays

    def _zeroed(self, tensor: Tensor) -> Tensor:
        def load() -> mx.array:
            array = tensor.load()
            array[self.row] = 0
            return array

        return tensor if self.row is None else replace(tensor, load=load)

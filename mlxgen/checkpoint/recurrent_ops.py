"""Load-time operations for recurrent mixers: axes of size 1, and convolutions that are stored one for each input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from mlxgen.checkpoint.tensor import Arrays, Shapes, Tensor, Tensors, around
from mlxgen.errors import WeightsError


@dataclass(frozen=True, kw_only=True)
class UnitAxes:
    """Tensors that are stored with further `axes` of size 1, as a convolution of single channels: [C, 1, K] for [C, K].

    MLX's converted checkpoints have [C, K, 1]: where the ones stand does not matter.
    refuse_turned: why those of this family can't be used.
    """

    tensors: tuple[str, ...]  # ends of names
    axes: tuple[int, ...]
    refuse_turned: str | None = None

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        return {n: self._squeezed(t, shapes[n]) if self._concerns(n) and n in shapes else t for n, t in tensors.items()}

    def _squeezed(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if [d for d in tensor.shape if d > 1] != [d for d in shape if d > 1]:
            return tensor  # the check of shapes reports it
        if self.refuse_turned and tensor.shape != mx.expand_dims(mx.zeros(shape), self.axes).shape:
            raise WeightsError(f"MLX's converted checkpoints of this family {self.refuse_turned}; use the original.")
        return replace(tensor, shape=shape, load=lambda: tensor.load().reshape(shape))

    def save(self, arrays: Arrays) -> Arrays:
        return {n: mx.expand_dims(a, self.axes) if self._concerns(n) else a for n, a in arrays.items()}

    def _concerns(self, name: str) -> bool:
        return any(f".{name}".endswith(f".{end}") for end in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Join:
    """Tensors that are stored one by one, `parts` [rows_i, ...], become one of all rows, `into`.

    Only the sum of the rows matters when they are read: transformers 5 cuts what it writes into equal parts.
    """

    parts: tuple[str, ...]
    into: str
    rows: tuple[int, ...]

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            before, found, suffix = around(name, self.parts[0])
            if found:
                parts = [f"{before}{part}{suffix}" for part in self.parts]
                out[f"{before}{self.into}{suffix}"] = self._joined(parts, tensors)
            elif not any(around(name, part)[1] for part in self.parts):
                out[name] = tensor
        return out

    def _joined(self, names: list[str], tensors: Tensors) -> Tensor:
        if missing := [name for name in names if name not in tensors]:
            raise WeightsError(f"{missing[0]} is missing from the checkpoint.")
        parts = [tensors[name] for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return replace(parts[0], shape=shape, load=lambda: mx.concatenate([part.load() for part in parts]))

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            before, found, suffix = around(name, self.into)
            if not found:
                out[name] = array
                continue
            ends = [sum(self.rows[: i + 1]) for i in range(len(self.rows) - 1)]
            pieces = mx.split(array, ends)
            out |= {f"{before}{part}{suffix}": piece for part, piece in zip(self.parts, pieces, strict=True)}
        return out


@dataclass(frozen=True, kw_only=True)
class Move:
    """Layers whose one norm stands elsewhere: `module` becomes `to` in layers that have `to` and no `module`."""

    module: str
    to: str

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            other = _instead(name, self.module, self.to)
            stays = _plain(name) in shapes or _plain(other) not in shapes
            out[name if stays else other] = tensor
        return out

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            other = _instead(name, self.to, self.module)
            out[name if other in arrays else other] = array
        return out


def _plain(name: str) -> str:
    """The weight that a packed weight's scales belong to."""
    module, _, suffix = name.rpartition(".")
    return f"{module}.weight" if suffix in ("scales", "biases") else name


def _instead(name: str, old: str, new: str) -> str:
    before, found, suffix = around(name, old)
    return f"{before}{new}{suffix}" if found else name


@dataclass(frozen=True, kw_only=True)
class ScaleRows:
    """A linear map whose result is multiplied by constants, one for each part of it: `rows` of the parts, and `by`."""

    module: str
    rows: tuple[int, ...]
    by: tuple[float, ...]

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        scaled = {n: self._times(t, self.by) for n, t in tensors.items() if self._concerns(n, tensors)}
        return tensors | scaled

    def save(self, arrays: Arrays) -> Arrays:
        inverse = tuple(1 / factor for factor in self.by)
        return {n: self._scaled(a, inverse) if self._concerns(n, arrays) else a for n, a in arrays.items()}

    def _concerns(self, name: str, present: Tensors | Arrays) -> bool:
        before, found, suffix = around(name, self.module)
        packed = found and f"{before}{self.module}.scales" in present
        return found and suffix in ((".scales", ".biases", ".bias") if packed else (".weight", ".bias"))

    def _times(self, tensor: Tensor, by: tuple[float, ...]) -> Tensor:
        return replace(tensor, load=lambda: self._scaled(tensor.load(), by))

    def _scaled(self, array: mx.array, by: tuple[float, ...]) -> mx.array:
        factors = mx.concatenate([mx.full((rows,), factor) for rows, factor in zip(self.rows, by, strict=True)])
        factors = factors.reshape(-1, *[1] * (array.ndim - 1))
        return (array.astype(mx.float32) * factors).astype(array.dtype)


@dataclass(frozen=True, kw_only=True)
class FixedDecay:
    """Decays that the architecture fixes and a checkpoint stores all the same: `tensor` [H, 1, 1], one for each head.

    They are 2^(-8h/H) for head h, times a factor that falls from 1 to 0 over `layers`. A file that says something else
    is refused, as it is no checkpoint of this architecture.
    """

    tensor: str
    layers: int

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        stored = [name for name in tensors if name.endswith(f".{self.tensor}")]
        for name in stored:
            values = tensors[name].load().astype(mx.float32).flatten()
            layer, heads = int(name.split(".")[1]), values.size
            scale = 1 - layer / (self.layers - 1 + 1e-5) + 1e-5
            wanted = mx.power(2.0, mx.arange(1, heads + 1) * (-8 / heads)) * scale
            if not mx.allclose(values, wanted, rtol=1e-2, atol=1e-6):  # they may have been rounded to bfloat16
                raise WeightsError(f"{name} must hold the decays that this architecture fixes, but holds others.")
        return {name: tensor for name, tensor in tensors.items() if name not in stored}

    def save(self, arrays: Arrays) -> Arrays:
        return arrays

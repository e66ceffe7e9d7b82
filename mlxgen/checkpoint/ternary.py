"""BitNet's checkpoints: weights of -1, 0 and 1, four in a byte, and one scale for each matrix.

Format: transformers integrations/bitnet. Byte r of R in a column holds rows r, r + R, r + 2R and r + 3R, each plus 1,
from the lowest bits on.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxgen.checkpoint.tensor import Arrays, Shapes, Tensor, Tensors, around
from mlxgen.errors import WeightsError

_SHIFTS = (0, 2, 4, 6)


@dataclass(frozen=True, kw_only=True)
class Ternary:
    """`weight` [out / 4, in] in bytes, or [out, in], and `weight_scale` [1] of each of `modules` become a plain weight.

    divided: the weight is divided by the scale, instead of multiplied.
    """

    modules: tuple[str, ...]
    divided: bool = False

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        out = dict(tensors)
        for name in tensors:
            stem = name.removesuffix("weight_scale")
            weight = f"{stem}weight"
            if stem != name and weight in tensors and self._concerns(weight):
                out[weight] = self._plain(tensors[weight], tensors[name], shapes.get(weight, ()))
                del out[name]
        return out

    def _plain(self, weight: Tensor, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        packed = len(shape) == 2 and weight.shape == (shape[0] // 4, shape[1])

        def load() -> mx.array:
            s, w = scale.load(), weight.load()
            if packed:
                w = mx.concatenate([(w.astype(mx.uint8) >> shift) & 3 for shift in _SHIFTS]).astype(s.dtype) - 1
            return w / s if self.divided else w * s

        return Tensor(shape=shape if packed else weight.shape, load=load)

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            if not self._concerns(name):
                out[name] = array
                continue
            scale = mx.maximum(mx.abs(array).max(), 1e-20)
            signs = array / scale
            if array.shape[0] % 4 or mx.abs(signs - mx.round(signs)).max().item() > 0.01:
                raise WeightsError(f"{name} must hold -1, 0 and 1 times one scale to be stored in BitNet's format.")
            parts = mx.split((mx.round(signs) + 1).astype(mx.uint8), 4)
            out[name] = sum(part << shift for part, shift in zip(parts[1:], _SHIFTS[1:], strict=True)) + parts[0]
            out[f"{name}_scale"] = (1 / scale if self.divided else scale).astype(array.dtype)[None]
        return out

    def _concerns(self, name: str) -> bool:
        return name.endswith(".weight") and any(around(name, module)[1] for module in self.modules)

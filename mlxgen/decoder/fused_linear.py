"""Several linear maps of the same input as one: the rows of their weights below each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# From this many rows on, each group is a product of its own: the cost of a kernel no longer counts, and what comes
# out is contiguous, which the element by element operations behind it are faster on.
_APART_FROM = 32


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where the groups of outputs end, and how the weights are packed."""

    stops: tuple[int, ...]
    quantization: dict[str, Any] = field(default_factory=dict)


class FusedLinear(nn.Module):
    """Maps x [T, in] to the results of all maps; every number is the same dot product as before.

    Built from plain or quantized linear modules of one kind; of quantized ones each row has its own scales. `groups`
    says how many maps belong together: `parts` gives the results of one group side by side.
    """

    def __init__(self, linears: Sequence[Any], groups: Sequence[int]):
        super().__init__()
        for name in linears[0]:
            self[name] = mx.concatenate([linear[name] for linear in linears], axis=0)
        if not isinstance(linears[0], nn.QuantizedLinear):
            self["weight"] = self["weight"].T  # [in, out]: turned once (the same memory), not at every step
        rows, stops = iter(linears), [0]
        for count in groups:
            stops.append(stops[-1] + sum(next(rows).weight.shape[0] for _ in range(count)))
        self.layout = _Layout(stops=tuple(stops), quantization=_quantization(linears[0]))

    def __call__(self, x: mx.array) -> mx.array:
        """[T, in] -> [T, the sum of all widths]."""
        if self.layout.quantization:
            y = self._quantized(x, self["weight"], self["scales"], self.get("biases"))
        else:
            y = x @ self["weight"]
        return y + self["bias"] if "bias" in self else y

    def parts(self, x: mx.array) -> list[mx.array]:
        """[T, in] -> for each group [T, its width]."""
        stops = self.layout.stops
        if x.shape[0] >= _APART_FROM:
            return [self._rows(x, a, b) for a, b in pairwise(stops)]
        return mx.split(self(x), stops[1:-1], axis=-1)

    def _rows(self, x: mx.array, start: int, stop: int) -> mx.array:
        """The outputs start..stop."""
        if self.layout.quantization:
            y = self._quantized(
                x, *(self[n][start:stop] if n in self else None for n in ("weight", "scales", "biases"))
            )
        else:
            y = x @ self["weight"][:, start:stop]
        return y + self["bias"][start:stop] if "bias" in self else y

    def _quantized(self, x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **self.layout.quantization)


def _quantization(linear: Any) -> dict[str, Any]:
    if not isinstance(linear, nn.QuantizedLinear):
        return {}
    return {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}

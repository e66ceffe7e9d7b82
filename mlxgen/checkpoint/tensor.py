"""Tensors that are known but not read, and what a load-time operation is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that is known but not read.

    quantization: set on the packed weight of a quantized module. dtype: of what the checkpoint stores, where known.
    decoded: `load` computes float32 from something else.
    """

    shape: tuple[int, ...]
    load: Callable[[], mx.array]
    quantization: Mapping[str, Any] | None = None
    dtype: str | None = None
    decoded: bool = False


Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Arrays = dict[str, mx.array]


class Op(Protocol):
    """One operation, both ways: `load` when a checkpoint is read, `save` when one is written."""

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors: ...

    def save(self, arrays: Arrays) -> Arrays: ...


def around(name: str, module: str) -> tuple[str, bool, str]:
    """What stands before and after a module's dotted path in a tensor's name; whether it is there at all."""
    before, found, after = f".{name}".partition(f".{module}.")
    return (f"{before}."[1:] if found else "", bool(found), f".{after}")

"""Fuse projections that read the same input: q, k and v into one, gate and up into one.

The rows of the weights are put below each other, so every result is the same dot product as before; for quantized
weights too, since each row has its own scales. One matrix product instead of three: fewer kernels, less host time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.nn as nn

from mlxgen.decoder.fused_linear import FusedLinear

# Where, the fused module, what it replaces, and which of them are used side by side.
_GROUPS = (
    ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"), (2, 1)),
    ("mixer", "in_proj", ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), (6,)),
    ("mixer", "in_proj", ("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj"), (6,)),
    ("mlp", "gate_up_proj", ("gate_proj", "up_proj"), (1, 1)),
)


def fuse_projections(layer: Any) -> None:
    """Fuse the projections of one decoder layer in place, where they are of one kind; else leave them."""
    for module, fused, names, groups in fusable(layer):
        parts = [module[name] for name in names]
        if alike(parts):
            replace_parts(module, names, fused, FusedLinear(parts, groups))


def fusable(layer: Any) -> Iterator[tuple[Any, str, tuple[str, ...], tuple[int, ...]]]:
    """The modules of a layer that have all projections of a group: (module, fused name, their names, groups)."""
    for parent, fused, names, groups in _GROUPS:
        module = layer.get(parent)
        if module is not None and all(name in module for name in names) and "fused" in module.__dict__:
            yield module, fused, names, groups


def replace_parts(module: Any, names: Sequence[str], fused: str, whole: nn.Module) -> None:
    """Put the fused module in the place of its parts."""
    module[fused] = whole
    for name in names:
        del module[name]
    module.fused = True


def alike(parts: list[nn.Module]) -> bool:
    """Whether linear maps can be put below each other."""

    def kind(m: Any) -> tuple[Any, ...]:
        settings = (m.group_size, m.bits, m.mode) if isinstance(m, nn.QuantizedLinear) else ()
        return (type(m), settings, sorted(m))

    plain = all(type(m) in (nn.Linear, nn.QuantizedLinear) for m in parts)
    return plain and all(kind(m) == kind(parts[0]) for m in parts)

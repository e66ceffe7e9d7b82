"""Fuse projections that have adapters on them: one product for the frozen maps, and two for all their changes.

The changes of the parts become one of the whole: their ranks add up, and the second matrix is made of blocks.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxgen.decoder.fused_linear import FusedLinear
from mlxgen.passes.adapted import Adapted
from mlxgen.passes.fuse_projections import alike, fusable, replace_parts
from mlxgen.passes.low_rank import Factors, LowRank


def fuse_adapted(layer: Any) -> None:
    """Fuse those projections of one decoder layer that only LoRA keeps apart; DoRA knows the lengths of its rows."""
    for module, fused, names, groups in fusable(layer):
        parts = [module[name] for name in names]
        changed = [part for part in parts if isinstance(part, Adapted)]
        bases = [part["base"] if isinstance(part, Adapted) else part for part in parts]
        lengths = any("m" in adapter for part in changed for adapter in part["adapters"].values())
        if not changed or lengths or not alike(bases):
            continue
        whole = Adapted(FusedLinear(bases, groups))
        whole.shared = changed[0].shared
        for name in dict.fromkeys(name for part in changed for name in part["adapters"]):
            changes = [part["adapters"].get(name) if isinstance(part, Adapted) else None for part in parts]
            whole.add(name, _joined(changes, [base["weight"].shape[0] for base in bases]))
        replace_parts(module, names, fused, whole.freeze().eval())


def _joined(changes: list[LowRank | None], rows: list[int]) -> Factors:
    present = [change for change in changes if change is not None]
    ranks = [change["lora_a"].shape[1] for change in present]
    blocks, start = [], 0
    for change, count in zip(changes, rows, strict=True):
        if change is None:
            blocks.append(mx.zeros((count, sum(ranks))))
            continue
        b = change["lora_b"].T * change.scale
        blocks.append(mx.pad(b, [(0, 0), (start, sum(ranks) - start - b.shape[1])]))
        start += b.shape[1]
    a = mx.concatenate([change["lora_a"].T for change in present])
    return Factors(a=a, b=mx.concatenate(blocks), scale=1.0)

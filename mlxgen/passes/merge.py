"""Put adapters into the weights they change, so that nothing is left to compute beside them.

Packed weights are unpacked, changed and packed again, which rounds: how much of the change is lost is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxgen.decoder.bitnet import RoundedLinear
from mlxgen.decoder.moe import ExpertLinear, QuantizedExpertLinear
from mlxgen.errors import ModelError
from mlxgen.passes.adapted import Adapted, adapted
from mlxgen.passes.low_rank import LowRank, plain_weight

_ROWS = 4096  # changed at once


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What has become of the adapter in a module's weight: squared sizes of the change that was wanted, and of what is
    wrong with the one that was made; and how much of the one is in the other.
    """

    path: str
    wanted: float
    missed: float
    shared: float

    @property
    def kept(self) -> float:
        """The part of the wanted change that was made: 1 for all of it."""
        return self.shared / self.wanted if self.wanted else 1.0

    @property
    def noise(self) -> float:
        """The size of what is wrong, relative to the wanted change: of rounding, as a rule without a direction."""
        return math.sqrt(self.missed / self.wanted) if self.wanted else 0.0


def merge(decoder: nn.Module, packed: Literal["repack", "plain"] = "repack") -> list[Merged]:
    """Merge all adapters of a decoder, each with its weight, and take them off.

    packed: what becomes of quantized weights that have an adapter: quantized as before, or plain ones, which keep the
    change whole. Raises ModelError for weights that are rounded at run time.
    """
    report, modules = [], []
    for path, module in sorted(adapted(decoder)):
        if isinstance(module["base"], RoundedLinear):
            raise ModelError(f"the adapter can't be merged: the weights of {path} are rounded while they are used.")
        new, one = _merged(path, module, packed)
        mx.eval(new.parameters())
        modules.append((path, new))
        report.append(one)
    decoder.update_modules(tree_unflatten(modules))
    return report


def overall(report: list[Merged]) -> Merged:
    """All modules as one."""
    sizes = {name: sum(getattr(one, name) for one in report) for name in ("wanted", "missed", "shared")}
    return Merged(path="all", **sizes)


def _merged(path: str, module: Adapted, packed: str) -> tuple[nn.Module, Merged]:
    base = module["base"]
    if any(adapter.use != "both" for adapter in module["adapters"].values()):
        raise ModelError(f"the adapter can't be merged: of {path}, which is embedding and output head, it changes one.")
    quantized = "scales" in base
    weights = [(a, module.shared.weights.get(name, 1.0)) for name, a in module["adapters"].items()]
    count = base["weight"].shape[0]
    step = max(1, _ROWS // math.prod(base["weight"].shape[1:-1]))
    dtype = base["scales"].dtype if quantized else base["weight"].dtype
    if not mx.issubdtype(dtype, mx.floating):
        dtype = mx.bfloat16
    settings = {"group_size": base.group_size, "bits": base.bits, "mode": base.mode} if quantized else {}
    pieces: list[tuple[mx.array, ...]] = []
    wanted = missed = shared = 0.0
    for start in range(0, count, step):
        rows = slice(start, start + step)
        old = plain_weight(base, rows).astype(mx.float32)
        change = _change(base, weights, rows, old)
        if quantized and packed == "repack":
            piece = tuple(mx.quantize((old + change).astype(dtype), **settings))
            now = mx.dequantize(*piece, **settings).astype(mx.float32)  # type: ignore[arg-type]
        else:
            piece = ((old + change).astype(dtype),)
            now = piece[0].astype(mx.float32)
        made = now - old
        sizes = mx.stack([change.square().sum(), (made - change).square().sum(), (made * change).sum()])
        mx.eval(*piece, sizes)
        wanted, missed, shared = (a + b for a, b in zip((wanted, missed, shared), sizes.tolist(), strict=True))  # type: ignore[arg-type]
        pieces.append(piece)
    arrays = [mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True)]
    new = base if len(arrays) > 1 or not quantized else _plain_module(base)
    for name, array in zip(("weight", "scales", "biases"), arrays, strict=False):
        new[name] = array
    return new, Merged(path=path, wanted=wanted, missed=missed, shared=shared)


def _change(base: nn.Module, weights: list[tuple[LowRank, Any]], rows: slice, old: mx.array) -> mx.array:
    """What the adapters add to some rows (or experts) of a weight, float32."""
    total = mx.zeros_like(old)
    for adapter, weight in weights:
        a, b = adapter.stored(adapter["lora_a"], adapter["lora_b"], back=True)
        change = adapter.scale * (b[rows] @ (a[rows] if a.ndim == 3 else a))
        if "m" in adapter:
            change = (old + change) * adapter.gain(base)[rows][..., None] - old
        total = total + weight * change
    return total


def _plain_module(packed: nn.Module) -> nn.Module:
    """An empty module of the plain kind, with the bias of the packed one."""
    if isinstance(packed, nn.QuantizedEmbedding):
        new: nn.Module = nn.Embedding(1, 1)
    elif isinstance(packed, QuantizedExpertLinear):
        new = ExpertLinear(1, 1, 1, bias=False)
    else:
        new = nn.Linear(1, 1, bias=False)
    if "bias" in packed:
        new["bias"] = packed["bias"]
    return new

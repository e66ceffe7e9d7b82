"""Spec of a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxgen.errors import require


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Root mean square norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    weight: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.eps >= 0, "eps", "at least 0", self.eps)

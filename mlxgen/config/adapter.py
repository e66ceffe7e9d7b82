"""What is trained on top of a model, and which trained parts are loaded. conf/adapter says what the fields are for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from mlxgen.config.words import read_list
from mlxgen.errors import ConfigError, require

ALL_LINEAR = "all_linear"
_ALPHA = 16.0


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """`adapter=...`: LoRA (arXiv:2106.09685), rsLoRA (arXiv:2312.03732), DoRA (arXiv:2402.09353), LoRA+
    (arXiv:2402.12354), or the model's own weights.
    """

    kind: Literal["none", "lora", "dora", "full"] = "none"
    rank: int = 8
    alpha: float | None = None
    scale: float | None = None
    rank_stabilized: bool = False
    dropout: float = 0.0
    targets: tuple[str, ...] | str | None = None
    layers: int | tuple[int, ...] | None = None
    learning_rate_ratio: float = 1.0
    format: Literal["mlx", "peft"] = "mlx"
    path: str | None = None
    paths: dict[str, str] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    merge: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank", "at least 1", self.rank)
        require(0 <= self.dropout < 1, "dropout", "in [0, 1)", self.dropout)
        require(self.alpha is None or self.alpha > 0, "alpha", "above 0", self.alpha)
        require(self.scale is None or self.scale > 0, "scale", "above 0", self.scale)
        require(self.learning_rate_ratio > 0, "learning_rate_ratio", "above 0", self.learning_rate_ratio)
        require(not isinstance(self.layers, int) or self.layers >= 1, "layers", "at least 1", self.layers)
        if self.alpha is not None and self.scale is not None:
            raise ConfigError("`alpha` and `scale` must not be given together: the scale is alpha / rank.")
        if self.path is not None and self.paths:
            raise ConfigError("`path` and `paths` must not be given together: several adapters need a name each.")
        for name in self.weights:
            if name not in self.folders:
                known = ", ".join(self.folders) or "none"
                raise ConfigError(f"`weights.{name}` must be the name of an adapter, but they are: {known}.")
        for name in self.paths:
            require(name != "none", f"paths.{name}", "named otherwise", name)

    @property
    def factor(self) -> float:
        """What the product of the two matrices is multiplied by."""
        if self.scale is not None:
            return self.scale
        alpha = _ALPHA if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The targets, one by one."""
        if self.targets is None:
            return (ALL_LINEAR,)
        return tuple(read_list(self.targets)) if isinstance(self.targets, str) else self.targets

    @property
    def folders(self) -> dict[str, str]:
        """Name -> folder, of the adapters that are loaded."""
        return dict(self.paths) if self.path is None else {"default": self.path}

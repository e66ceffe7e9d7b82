"""What a model learns from, and how it is cut into batches. conf/data says what the fields are for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mlxgen.errors import ConfigError, require

SHAPES = ("chat", "completion", "alpaca", "sharegpt", "text")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`data.path=...` and what belongs to it."""

    path: str | None = None
    paths: dict[str, str] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    subset: str | None = None
    shape: Literal["auto", "chat", "completion", "alpaca", "sharegpt", "text"] = "auto"
    learn: Literal["answers", "all"] = "answers"
    max_length: int = 2048
    too_long: Literal["drop", "cut", "error"] = "drop"
    strict: bool = True
    validation: float = 0.05
    limit: int | None = None
    batch_size: int = 4
    packing: bool = False

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "max_length", "at least 2", self.max_length)
        require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        require(self.limit is None or self.limit >= 1, "limit", "at least 1", self.limit)
        whole = self.validation == int(self.validation)
        require(
            0 <= self.validation < 1 or (whole and self.validation >= 1),
            "validation",
            "a share in [0, 1) or a number of examples",
            self.validation,
        )
        if self.path is not None and self.paths:
            raise ConfigError("`path` and `paths` must not be given together: several sources need a name each.")
        for name, weight in self.weights.items():
            if name not in self.paths:
                known = ", ".join(self.paths) or "none"
                raise ConfigError(f"`weights.{name}` must be the name of a source, but they are: {known}.")
            require(weight > 0, f"weights.{name}", "above 0", weight)

    @property
    def sources(self) -> dict[str, str]:
        """Name -> file, folder or hub id; a single source has the name ""."""
        return {"": self.path} if self.path is not None else dict(self.paths)

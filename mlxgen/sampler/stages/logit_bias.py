"""A number added to the logits of chosen tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from mlxgen.errors import ConfigError, require
from mlxgen.sampler.stage import Context, Stage


@dataclass(frozen=True, kw_only=True)
class LogitBias(Stage):
    """Adds biases[i] to the logit of token ids[i]; -inf bans it. In the config a mapping of id to bias."""

    ids: tuple[int, ...]
    biases: tuple[float, ...]

    name: ClassVar[str] = "logit_bias"
    rank: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for token, bias in zip(self.ids, self.biases, strict=True):
            require(token >= 0, str(token), "a token id >= 0", token)
            require(bias < math.inf, str(token), "a number below infinity", bias)

    def check_vocabulary(self, vocab_size: int, path: str) -> None:
        for token in self.ids:
            rule = f"a token id below the vocabulary size {vocab_size}"
            require(token < vocab_size, f"{path}.{token}", rule, token)

    def is_neutral(self, vocab_size: int | None) -> bool:
        return not any(self.biases)

    @property
    def batch_key(self) -> tuple[Any, ...]:
        return (LogitBias,)

    @classmethod
    def stack(cls, stages: Sequence[LogitBias]) -> LogitBias:
        longest = max(len(stage.ids) for stage in stages)
        ids = [[*stage.ids, *[0] * (longest - len(stage.ids))] for stage in stages]
        biases = [[*stage.biases, *[0.0] * (longest - len(stage.ids))] for stage in stages]
        return stages[0]._with(ids=mx.array(ids), biases=mx.array(biases))

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        rows = mx.arange(logits.shape[0])[:, None]
        return logits.at[rows, mx.array(self.ids)].add(mx.array(self.biases))

    @classmethod
    def from_config(cls, value: Any, path: str) -> LogitBias:
        require(isinstance(value, Mapping), path, "a mapping of token id to bias", value)
        biases: dict[int, float] = {}
        for key, bias in value.items():
            whole = str(key).isascii() and str(key).isdigit()
            require(whole, f"{path}.{key}", "a token id", key)
            a_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            require(a_number and bias < math.inf, f"{path}.{key}", "a number below infinity", bias)
            if int(key) in biases:
                raise ConfigError(f"`{path}.{key}` must be given once, but is given twice.")
            biases[int(key)] = float(bias)
        return cls(ids=tuple(biases), biases=tuple(biases.values()))

"""What a stage of the chain is: a frozen dataclass that maps logits to logits.

Shapes: B rows of the batch, V vocabulary, N tokens of history, M numbers of memory.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import mlx.core as mx

from mlxgen.errors import ConfigError
from mlxgen.sampler.draw import uniform
from mlxgen.schema import parse

S = TypeVar("S", bound="Stage")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a stage may know besides the logits, one entry per row."""

    seeds: tuple[int, ...]
    steps: tuple[int, ...]  # tokens generated so far
    eos_ids: tuple[int, ...] = ()
    # For stages with needs_history: [B, N] int32, prompt and generated tokens, left-padded with -1.
    history: mx.array = None  # type: ignore[assignment]
    # For stages with a memory, what it holds: [B, M].
    memory: mx.array = None  # type: ignore[assignment]

    def uniform(self, label: str, count: int = 1) -> mx.array:
        """Numbers in [0, 1) that depend on seed, step and label alone, [B, count]."""
        rows = zip(self.seeds, self.steps, strict=True)
        return mx.array([uniform(seed, step, label, count) for seed, step in rows])


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the chain. Derive a frozen dataclass from it to add your own.

    `__call__` must be pure and lazy (no eval, no `.item()`), and no row may look at another. Numeric fields
    are Python numbers when built; where rows differ, `stack` replaces them by [B, 1] float32 arrays.
    """

    name: ClassVar[str] = ""  # its key in the sampler's config
    main: ClassVar[str] = ""  # the field that a bare number sets
    rank: ClassVar[int] = 0  # its place in the default order
    absorbs: ClassVar[str] = ""  # the stage in whose place it runs, and whose main value it takes
    needs_history: ClassVar[bool] = False
    keeps_argmax: ClassVar[bool] = False  # never changes which token is the most likely one

    def __call__(self, logits: mx.array, context: Context) -> mx.array:
        """Float32 logits [B, V] -> logits [B, V], with -inf for what is dropped."""
        raise NotImplementedError

    def is_neutral(self, vocab_size: int | None) -> bool:
        """Whether the stage changes nothing, so that the chain can do without it."""
        return False

    @property
    def greedy(self) -> bool:
        """Whether the stage asks for the most likely token instead of a drawn one."""
        return False

    def check_vocabulary(self, vocab_size: int, path: str) -> None:
        """Raise ConfigError, with keys below `path`, if a token id is outside the vocabulary."""

    def start(self) -> tuple[float, ...]:
        """The memory of a request that begins; () for a stage without."""
        return ()

    def update(self, memory: mx.array, logits: mx.array, tokens: mx.array) -> mx.array:
        """The memory [B, M] after `tokens` [B] were picked from the processed `logits` [B, V]."""
        return memory

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """Stages with equal keys can be stacked: same type, same fields but for numbers."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return (type(self), *(v for v in values if isinstance(v, bool) or not isinstance(v, int | float)))

    @classmethod
    def stack(cls: type[S], stages: Sequence[S]) -> S:
        """One stage for many rows."""
        differ = {}
        for field in dataclasses.fields(cls):
            values = [getattr(stage, field.name) for stage in stages]
            if any(value != values[0] for value in values):
                differ[field.name] = mx.array(values, dtype=mx.float32)[:, None]
        return stages[0]._with(**differ)

    def _with(self: S, **arrays: mx.array) -> S:
        """A copy with arrays in place of numbers, which were checked when each stage was built."""
        if not arrays:
            return self
        stage = copy.copy(self)
        for key, value in arrays.items():
            object.__setattr__(stage, key, value)
        return stage

    @classmethod
    def from_config(cls: type[S], value: Any, path: str) -> S:
        """Build from a config value: the main field alone, or a mapping of fields (null: not given).

        Raises ConfigError with the key path for unknown and missing fields, wrong types and ranges.
        """
        if isinstance(value, Mapping):
            return parse(cls, {key: item for key, item in value.items() if item is not None}, path)
        try:
            return parse(cls, {cls.main: value}, path)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"`{path}.{cls.main}`", f"`{path}`", 1)) from None

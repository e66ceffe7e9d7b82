"""Frozen modules with changes on them, and what all of a decoder's have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxgen.passes.low_rank import Factors, LowRank, Shared, adapter_class


class Adapted(nn.Module):
    """A frozen map, and any number of named changes of it: their sum, each with its weight.

    Takes the place of a linear map, of the linear maps of all experts, or of an embedding.
    """

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base
        self.adapters: dict[str, LowRank] = {}
        self.shared = Shared()

    def add(self, name: str, factors: Factors, *, dropout: float = 0.0, ratio: float = 1.0) -> LowRank:
        """Another change; of a name that is there already, its new values."""
        adapter = adapter_class(self["base"])(factors, dropout=dropout, ratio=ratio)
        adapter.shared = self.shared
        if factors.m is not None:
            adapter.measure(self["base"])
        self["adapters"][name] = adapter
        return adapter

    @property
    def weight(self) -> mx.array:
        """The frozen map's own, as it is stored."""
        return self["base"]["weight"]

    def __call__(self, x: mx.array, *rest: Any) -> mx.array:
        base = self["base"]
        out = y = base(x, *rest)
        for name, adapter in self["adapters"].items():
            weight = self.shared.weights.get(name, 1.0)
            if isinstance(weight, float) and weight == 1.0:
                out = adapter.onto(out, base, y, x, *rest)
            else:
                out = _plus(out, weight, lambda a=adapter: a(base, y, x, *rest), rest)
        return out

    def parts(self, x: mx.array) -> list[mx.array]:
        """Of fused projections: x [T, in] -> for each group [T, its width]."""
        return mx.split(self(x), self["base"].layout.stops[1:-1], axis=-1)  # type: ignore[return-value]

    def as_linear(self, x: mx.array) -> mx.array:
        """The output head that is tied to an embedding."""
        base = self["base"]
        out = y = base.as_linear(x)
        for name, adapter in self["adapters"].items():
            out = _plus(out, self.shared.weights.get(name, 1.0), lambda a=adapter: a.as_linear(base, y, x), ())
        return out


def _plus(out: mx.array, weight: float | mx.array, change: Callable[[], mx.array], rest: tuple[Any, ...]) -> mx.array:
    """out plus a change times its weight, which is one number or one for each row."""
    if isinstance(weight, mx.array):
        return out + change() * _by_row(weight, out, rest)
    if weight == 0.0:
        return out
    return out + (change() if weight == 1.0 else change() * weight)


def _by_row(weight: mx.array, y: mx.array, rest: tuple[Any, ...]) -> mx.array:
    """One number for each row [T], shaped to be multiplied with y [T, ...] or [B, L, ...]."""
    weight = weight.astype(y.dtype)
    if len(rest) > 1 and rest[1] is not None:  # experts have put the rows into another order
        weight = weight[rest[1]]
    front = (weight.size,) if y.shape[0] == weight.size else y.shape[:2]
    return weight.reshape(*front, *[1] * (y.ndim - len(front)))


def adapted(decoder: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """(dotted path, module) of all that has changes on it."""
    for path, module in decoder.named_modules():
        if isinstance(module, Adapted):
            yield path, module


def flat(parameters: Any) -> dict[str, mx.array]:
    """Parameters by dotted path."""
    return dict(tree_flatten(parameters))  # type: ignore[arg-type]


def share(decoder: nn.Module) -> Shared:
    """Let all changes in a decoder share one object, and tell their modules apart."""
    modules = [module for _, module in adapted(decoder)]
    shared = next((module.shared for module in modules if module.shared.weights or module["adapters"]), Shared())
    number = 0
    for module in modules:
        module.shared = shared
        for adapter in module["adapters"].values():
            adapter.shared, adapter.number = shared, number
            number += 1
    return shared


def set_dropout_key(decoder: nn.Module, key: mx.array) -> None:
    """The randomness of the next step's dropout. Inside a compiled function the key must be one of its inputs."""
    adapters = [adapter for _, module in adapted(decoder) for adapter in module["adapters"].values()]
    if any(adapter.dropout for adapter in adapters):
        adapters[0].shared.keys = mx.random.split(key, len(adapters))


def set_weights(decoder: nn.Module, weights: Mapping[str, float | mx.array]) -> None:
    """How much each adapter counts: a number, or one for each row [T]. Those not named: not at all."""
    found = [module for _, module in adapted(decoder)]
    if found:
        names = {name for module in found for name in module["adapters"]}
        found[0].shared.weights = {name: weights.get(name, 0.0) for name in names}


class Selection:
    """Which adapters each row of the next forward pass is computed with: call it before.

    A choice is the weights of some adapters, by name in pairs; None stands for the usual ones.
    """

    def __init__(self, decoder: nn.Module, usual: Mapping[str, float]):
        self._decoder, self._usual = decoder, dict(usual)
        self._current: tuple[Any, ...] = (None,)

    def __call__(self, choices: Sequence[tuple[tuple[str, float], ...] | None]) -> None:
        alike = choices[:1] if all(choice == choices[0] for choice in choices) else choices
        if tuple(alike) == self._current:
            return
        self._current = tuple(alike)
        rows = [self._usual if choice is None else dict(choice) for choice in alike]
        if len(rows) == 1:
            set_weights(self._decoder, rows[0])
        else:
            names = {name for row in rows for name in row}
            set_weights(self._decoder, {name: mx.array([row.get(name, 0.0) for row in rows]) for name in names})


def learning_rate_scale(decoder: nn.Module) -> dict[str, float]:
    """Dotted path -> how much faster than the rest it learns, for every trained parameter (LoRA+, arXiv:2402.12354)."""
    ratios = {
        f"{path}.adapters.{name}.lora_b": adapter.ratio
        for path, module in adapted(decoder)
        for name, adapter in module["adapters"].items()
    }
    return {name: ratios.get(name, 1.0) for name in flat(decoder.trainable_parameters())}

"""Optimizers of mlx.optimizers, and which parameters each of them updates, how fast, and with which decay.

Parameters are flat here: {dotted name: array}. They fall into groups: vectors (norms, biases) do not decay, some learn
faster than others (LoRA+), and Muon takes matrices only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from mlxgen.errors import require

Arrays = dict[str, mx.array]
_NOT_HIDDEN = ("embed", "lm_head")  # matrices that Muon is not made for


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """learning_rate: the peak. weight_decay: decoupled from the gradient, of matrices only."""

    learning_rate: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate", "above 0", self.learning_rate)
        require(self.weight_decay >= 0, "weight_decay", "at least 0", self.weight_decay)

    def make(self) -> optim.Optimizer:
        raise NotImplementedError

    def of(self, name: str, parameter: mx.array) -> OptimizerConfig:
        """The optimizer of one parameter: itself, unless it does not suit."""
        return self if parameter.ndim >= 2 else replace(self, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerConfig):
    """arXiv:1711.05101; with weight_decay=0 it is Adam."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: bool = True

    def make(self) -> optim.Optimizer:
        return optim.AdamW(
            self.learning_rate,
            betas=list(self.betas),
            eps=self.eps,
            weight_decay=self.weight_decay,
            bias_correction=self.bias_correction,
        )


@dataclass(frozen=True, kw_only=True)
class Muon(OptimizerConfig):
    """Momentum made orthogonal, for hidden matrices (kellerjordan.github.io/posts/muon); AdamW for the rest."""

    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    adamw_learning_rate: float = 3e-4

    def make(self) -> optim.Optimizer:
        return optim.Muon(
            self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            ns_steps=self.newton_schulz_steps,
        )

    def of(self, name: str, parameter: mx.array) -> OptimizerConfig:
        if parameter.ndim >= 2 and not name.startswith(_NOT_HIDDEN):
            return self
        rest = AdamW(learning_rate=self.adamw_learning_rate, weight_decay=self.weight_decay)
        return rest.of(name, parameter)


@dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerConfig):
    """Second moments in rows and columns: little memory (arXiv:1804.04235)."""

    clip_threshold: float = 1.0
    decay_rate: float = -0.8
    scale_parameter: bool = False

    def make(self) -> optim.Optimizer:
        return optim.Adafactor(
            self.learning_rate,
            clip_threshold=self.clip_threshold,
            decay_rate=self.decay_rate,
            weight_decay=self.weight_decay,
            scale_parameter=self.scale_parameter,
            relative_step=False,
        )


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerConfig):
    """Signs of the momentum (arXiv:2302.06675); a third to a tenth of AdamW's learning rate."""

    betas: tuple[float, float] = (0.9, 0.99)

    def make(self) -> optim.Optimizer:
        return optim.Lion(self.learning_rate, betas=list(self.betas), weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerConfig):
    momentum: float = 0.0
    nesterov: bool = False

    def make(self) -> optim.Optimizer:
        return optim.SGD(
            self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )


@dataclass(kw_only=True)
class _Group:
    optimizer: optim.Optimizer
    peak: float
    names: list[str]


class GroupedOptimizer:
    """The optimizers of all parameters; one update of all at a time."""

    def __init__(self, config: OptimizerConfig, parameters: Arrays, scales: Mapping[str, float] | None = None):
        """scales: how much faster than the rest some parameters learn, by name."""
        groups: dict[Any, _Group] = {}
        for name, parameter in parameters.items():
            own, scale = config.of(name, parameter), (scales or {}).get(name, 1.0)
            group = groups.setdefault(
                (own, scale), _Group(optimizer=own.make(), peak=own.learning_rate * scale, names=[])
            )
            group.names.append(name)
        self.peak = config.learning_rate
        self._groups = list(groups.values())
        for group in self._groups:
            group.optimizer.init({name: parameters[name] for name in group.names})

    def update(self, parameters: Arrays, gradients: Arrays, factor: float) -> Arrays:
        """The parameters after one update, in their order. factor: of the peak learning rate, from the schedule."""
        new: Arrays = {}
        for group in self._groups:
            group.optimizer.learning_rate = group.peak * factor
            own = [{name: tree[name] for name in group.names} for tree in (gradients, parameters)]
            new |= group.optimizer.apply_gradients(*own)
        return {name: new[name] for name in parameters}

    @property
    def arrays(self) -> Arrays:
        """All of the state, flat, for a checkpoint."""
        flat: Arrays = {}
        for number, group in enumerate(self._groups):
            for key, value in group.optimizer.state.items():
                leaves = {f"{key}/{leaf}": array for leaf, array in value.items()} if isinstance(value, dict) else None
                flat |= {f"{number}/{path}": array for path, array in (leaves or {key: value}).items()}
        return flat

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take over what `arrays` gave."""
        states: list[dict[str, Any]] = [{} for _ in self._groups]
        for path, array in arrays.items():
            number, key, *leaf = path.split("/")
            if leaf:
                states[int(number)].setdefault(key, {})[leaf[0]] = array
            else:
                states[int(number)][key] = array
        for group, state in zip(self._groups, states, strict=True):
            group.optimizer.state = state

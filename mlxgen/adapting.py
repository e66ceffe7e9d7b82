"""Which adapters a request is answered with: those that the configuration names, or its own choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlxgen.config import AdapterConfig
from mlxgen.errors import ConfigError, RequestError, did_you_mean

if TYPE_CHECKING:
    from mlxgen.loading import LoadedModel

Choice = tuple[tuple[str, float], ...]  # names and weights; None: what the configuration says
NONE = "none"


def check_adapter(config: AdapterConfig) -> None:
    """Raise ConfigError for an adapter that is to be trained, where one must have been trained."""
    if config.kind != "none" and not config.folders:
        raise ConfigError(f"`adapter.path` must be given: without one, adapter.kind={config.kind} changes nothing.")


def open_selection(loaded: LoadedModel) -> Any:
    """What tells the decoder which adapters each row of a step has; None where there is no choice."""
    if not selectable(loaded):
        return None
    from mlxgen.passes.adapted import Selection

    return Selection(loaded.decoder, {adapter.name: adapter.weight for adapter in loaded.adapters})


def selectable(loaded: LoadedModel) -> list[str]:
    """The names of the adapters that stand beside the weights: not merged, and no whole parameters."""
    return [adapter.name for adapter in loaded.adapters if adapter.paths and not loaded.merged]


def choose_adapter(loaded: LoadedModel, value: Any) -> Choice | None:
    """A request's `adapter`: a name, a mapping of names to weights, or none. Raises RequestError."""
    if value is None:
        return None
    names = selectable(loaded)
    if not names:
        raise RequestError(
            f"`adapter` must be left out, but is {value!r}: no adapters are loaded to choose from "
            "(adapter.paths.NAME=DIR, without adapter.merge)."
        )
    weights = {} if value == NONE else {value: 1.0} if isinstance(value, str) else value
    numbers = list(weights.values()) if isinstance(weights, Mapping) else [None]
    if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise RequestError(f"`adapter` must be a name or a mapping of names to weights, but is {value!r}.")
    for name in weights:
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise RequestError(f"`adapter` must be {NONE} or one of {', '.join(names)}, but is {name!r}.{hint}")
    return tuple(sorted((name, float(weight)) for name, weight in weights.items()))

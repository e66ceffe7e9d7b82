"""Which modules of a decoder an adapter is put on: parts, names, globs and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import mlx.nn as nn

from mlxgen.decoder.fused_linear import FusedLinear
from mlxgen.errors import ConfigError, did_you_mean
from mlxgen.passes.adapted import Adapted
from mlxgen.passes.low_rank import ADAPTABLE

_SHOWN = 24


def _inside(*parts: str, but: tuple[str, ...] = ()) -> re.Pattern[str]:
    names = "|".join(re.escape(part) for part in parts)
    without = "".join(rf"(?!.*\.{re.escape(name)}(\.|$))" for name in but)
    return re.compile(rf"layers\.\d+\.{without}(?:{names})\.")


_GATES = ("router", "shared_expert_gate")  # which expert sees a token
PARTS: Mapping[str, re.Pattern[str]] = {
    "all_linear": _inside("self_attn", "mixer", "mlp", but=_GATES),
    "attention": _inside("self_attn", but=_GATES),
    "mixer": _inside("mixer"),
    "mlp": _inside("mlp", but=("experts", *_GATES)),
    "experts": _inside("mlp.experts"),
    "router": re.compile(r"layers\.\d+\.(?:.*\.)?(?:router|shared_expert_gate)(?:\.|$)"),
    "embeddings": re.compile(r"embed_\w+"),
    "head": re.compile(r"lm_head"),
}
_ALSO = {"all-linear": "all_linear", "embedding": "embeddings"}


def adaptable(decoder: nn.Module) -> dict[str, nn.Module]:
    """Dotted path -> module, of all that an adapter can be put on, in the order of the decoder.

    Of what has one already, it is the frozen map. Raises ConfigError for a decoder whose projections are fused.
    """
    found = {}
    for path, module in decoder.named_modules():
        if isinstance(module, FusedLinear):
            raise ConfigError(f"`model.fuse` must be false to put an adapter on a model, but {path} is fused.")
        if isinstance(module, Adapted):
            found[path] = module["base"]
        elif isinstance(module, ADAPTABLE) and not path.endswith(".base"):
            found[path] = module
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def chosen(paths: Sequence[str], patterns: Sequence[str], layers: int | Sequence[int] | None, count: int) -> list[str]:
    """The paths that a pattern fits, of the layers in question; `count` layers there are.

    Raises ConfigError for a pattern that fits none, naming those that there are, and for layers that do not exist.
    """
    allowed = _layers(layers, count)
    found: set[str] = set()
    for pattern in patterns:
        matched = [path for path in paths if _fits(pattern, path)]
        if not matched:
            raise ConfigError(_nothing(pattern, paths))
        inside = [path for path in matched if layer_of(path) is None or layer_of(path) in allowed]
        if not inside:
            raise ConfigError(f"`adapter.targets`: {pattern!r} fits nothing in `adapter.layers` {layers}.")
        found |= set(inside)
    if not found:
        raise ConfigError("`adapter.targets` must name at least one module, but is empty.")
    return [path for path in paths if path in found]


def layer_of(path: str) -> int | None:
    """The number of the layer that a module stands in."""
    parts = path.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def _layers(layers: int | Sequence[int] | None, count: int) -> set[int]:
    if layers is None:
        return set(range(count))
    if isinstance(layers, int):
        if layers > count:
            raise ConfigError(f"`adapter.layers` must be at most the model's {count}, but is {layers}.")
        return set(range(count - layers, count))
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong or not layers:
        raise ConfigError(f"`adapter.layers` must name layers from 0 to {count - 1}, but has {wrong or 'none'}.")
    return {layer % count for layer in layers}


def _fits(pattern: str, path: str) -> bool:
    part = PARTS.get(_ALSO.get(pattern, pattern))
    if part is not None:
        return part.match(path) is not None
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], path) is not None
        except re.error as error:
            raise ConfigError(f"`adapter.targets`: {pattern[3:]!r} is no regular expression: {error}.") from None
    if any(mark in pattern for mark in "*?["):
        return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")
    return path == pattern or path.endswith(f".{pattern}")


def _nothing(pattern: str, paths: Sequence[str]) -> str:
    short = list(dict.fromkeys(re.sub(r"^layers\.\d+\.", "", path) for path in paths))
    parts = [part for part, rule in PARTS.items() if any(rule.match(path) for path in paths)]
    near = did_you_mean(pattern, [*short, *{name.rpartition(".")[2] for name in short}, *parts])
    more = f" and {len(short) - _SHOWN} more" if len(short) > _SHOWN else ""
    names = f"{', '.join(short[:_SHOWN])}{more}; parts: {', '.join(parts)}"
    return f"`adapter.targets`: {pattern!r} fits no module. This model has {names}.{near}"


def _order(path: str) -> tuple[int, int]:
    layer = layer_of(path)
    if layer is None:
        return (0, 0) if path.startswith("embed") else (2, 0)
    return (1, layer)

"""From a flat mapping (YAML, a request, generation_config.json) to a chain of stages.

    {temperature: 0.7, top_p: 0.9, xtc: {probability: 0.5, threshold: 0.1}, seed: 7, order: [...]}

A number is a stage's main field, a mapping gives its fields by name, null means "not chosen".
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.errors import ConfigError, did_you_mean, require
from mlxgen.sampler import stages as stage_modules
from mlxgen.sampler.stage import Stage
from mlxgen.schema import join

# What holds where neither the request, the user nor the model says anything: greedy, as in mlx-lm.
BUILT_IN: Mapping[str, Any] = {"temperature": 0.0}
Builder = Callable[[Mapping[str, Any], str], Any]  # config node, its key path -> stage
_OTHER_KEYS = ("seed", "order", "model_defaults")
_LATE = ("dynamic_temperature", "temperature", "mirostat")
_MODEL_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@functools.cache
def known_stages() -> dict[str, type[Stage]]:
    """The stages of mlxgen by name, in the default order."""
    found = []
    for module in pkgutil.iter_modules(stage_modules.__path__, f"{stage_modules.__name__}."):
        members = vars(importlib.import_module(module.name)).values()
        found += [m for m in members if isinstance(m, type) and issubclass(m, Stage) and m.name]
    return {stage.name: stage for stage in sorted(found, key=lambda stage: stage.rank)}


@dataclass(frozen=True, kw_only=True)
class Effective:
    """The sampling values that hold, for `Sampler.from_config`, and who said so.

    sources: field, as `top_p` or `xtc.threshold` -> "request", "user", "model" or "built-in".
    """

    values: dict[str, Any]
    sources: dict[str, str]


def effective(
    request: Mapping[str, Any] | None = None,
    user: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> Effective:
    """Merge field by field: request over user config over the model's values over built-in ones.

    The model's values are its generation_config.json, and over that what its own YAML file says (`model`).
    null means "not said". With `model_defaults: false` in the user's config the model's values do not count.
    Nothing is validated here; unknown names pass on to `Sampler.from_config`.
    """
    user = dict(user or {})
    model = {**_from_model(generation_config or {}), **(model or {})} if user.pop("model_defaults", True) else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = {"built-in": BUILT_IN, "model": model, "user": user, "request": request or {}}
    for source, layer in layers.items():
        for name, value in layer.items():
            for field, item in _leaves(name, value):
                if item is None:
                    continue
                sources[f"{name}.{field}" if field else name] = source
                if field:
                    values.setdefault(name, {})[field] = item
                else:
                    values[name] = item
    return Effective(values=values, sources=sources)


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """(field, value) for a stage of several fields, ("", value) for all else."""
    stage = known_stages().get(name)
    if stage is None or not stage.main or len(dataclasses.fields(stage)) == 1:
        return [("", value)]
    return list(value.items()) if isinstance(value, Mapping) else [(stage.main, value)]


def _from_model(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of generation_config.json that are sampling stages here; do_sample: false is greedy."""
    values = {key: generation_config[key] for key in _MODEL_KEYS if generation_config.get(key) is not None}
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    elif generation_config.get("do_sample") is True:
        values.setdefault("temperature", 1.0)  # what transformers takes if only do_sample is given
    return values


def with_token_ids(mapping: Mapping[str, Any], token_of: Callable[[str], int | None] | None) -> dict[str, Any]:
    """The mapping with texts in lists of tokens, as in `dry.sequence_breakers`, replaced by token ids."""
    out = dict(mapping)
    for name, value in mapping.items():
        if not isinstance(value, Mapping) or "_target_" in value:
            continue
        out[name] = {
            key: _token_ids(item, token_of) if isinstance(item, list | tuple) else item for key, item in value.items()
        }
    return out


def _token_ids(items: Sequence[Any], token_of: Callable[[str], int | None] | None) -> list[Any]:
    found = [token_of(item) if isinstance(item, str) and token_of else item for item in items]
    return [item for item in dict.fromkeys(found) if item is not None and not isinstance(item, str)]


def build_chain(
    mapping: Mapping[str, Any],
    vocab_size: int | None,
    build: Builder | None,
    path: str,
) -> tuple[Stage, ...]:
    """The stages in use, checked and in order. Raises ConfigError with the key path."""
    said = {k: v for k, v in mapping.items() if k not in _OTHER_KEYS and not _is_empty(v)}
    chosen = {**BUILT_IN, **said}
    built = {name: _build_stage(name, value, build, join(path, name)) for name, value in chosen.items()}
    if vocab_size is not None:
        for name, stage in built.items():
            stage.check_vocabulary(vocab_size, join(path, name))
    in_use = {name: stage for name, stage in built.items() if not stage.is_neutral(vocab_size)}
    for name, stage in list(in_use.items()):
        if other := built.get(stage.absorbs):
            in_use[name] = dataclasses.replace(stage, **{stage.absorbs: getattr(other, other.main)})
            in_use.pop(stage.absorbs, None)
    order = _order(mapping.get("order"), mapping, in_use, path)
    return tuple(in_use[name] for name in order if name in in_use)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(item is None for item in value.values()))


def _build_stage(name: str, value: Any, build: Builder | None, path: str) -> Stage:
    known = known_stages()
    if isinstance(value, Mapping) and "_target_" in value:
        if name in known or build is None:
            rule = "a stage of mlxgen's own" if build is None else "under a name that mlxgen does not use"
            raise ConfigError(f"`{path}` must be {rule}, but has a `_target_`.")
        stage = build(value, path)
        require(isinstance(stage, Stage), path, "a mlxgen.sampler.Stage", stage)
        return stage
    if name not in known:
        names = [*known, *_OTHER_KEYS]
        hint = did_you_mean(name, names)
        raise ConfigError(f"`{path}` is not a key of the sampler; known: {', '.join(names)}.{hint}")
    absorbed = known[name].absorbs
    if absorbed and isinstance(value, Mapping) and value.get(absorbed) is not None:
        raise ConfigError(f"`{path}.{absorbed}` must be left out. Set the sampler's `{absorbed}` instead.")
    return known[name].from_config(value, path)


def _order(order: Any, mapping: Mapping[str, Any], in_use: Mapping[str, Stage], path: str) -> list[str]:
    """The order of the stages. Stages from outside that it does not name run just before the temperature."""
    known, path = list(known_stages()), join(path, "order")
    names = known if order is None else order
    require(isinstance(names, Sequence) and not isinstance(names, str), path, "a list of stage names", names)
    names = [str(name) for name in names]
    for i, name in enumerate(names):
        require(name not in names[:i], path, "a list without repeats", names)
        if name not in known and name not in mapping:
            raise ConfigError(f"`{path}` must name stages, but has {name!r}.{did_you_mean(name, known)}")
    missing = [name for name in in_use if name not in names]
    for name in missing:
        if name in known:
            raise ConfigError(f"`{path}` must name every stage in use, but lacks `{name}`.")
    place = next((i for i, name in enumerate(names) if name in _LATE), len(names))
    return names[:place] + missing + names[place:]

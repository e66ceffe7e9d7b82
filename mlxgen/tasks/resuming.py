"""`resume=DIR`: the configuration of a run that goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxgen.config import Config
from mlxgen.errors import ConfigError
from mlxgen.schema import parse
from mlxgen.yaml_text import read_yaml, write_yaml

# What may differ from the run's beginning: it does not touch what has been computed.
_FREE = ("task.epochs", "task.steps", "task.patience", "task.loggers", "task.keep", "output", "stats", "debug")
_CALLER = ("trust", "config_dirs", "variant", "given", "resume")


def as_yaml(config: Config) -> str:
    """A configuration as it is kept in a run's folder."""
    return write_yaml(_data(config))


def resumed(config: Config, saved_yaml: str) -> Config:
    """The saved configuration, with what the command line says besides.

    Raises ConfigError for a value that would make another run of it.
    """
    saved = read_yaml(saved_yaml)
    ours, theirs = dict(leaves_of(config)), dict(_leaves(saved))
    named = [key for key in config.given if key not in ("task", "resume")]
    for key, value in ours.items():
        if value == theirs.get(key) or not any(key == name or key.startswith(f"{name}.") for name in named):
            continue
        if key not in _FREE:
            raise ConfigError(
                f"`{key}` must stay {theirs.get(key)!r} in a run that goes on, but is {value!r}; start a new one with "
                "out=DIR."
            )
        _set(saved, key, value)
    kept = {name: getattr(config, name) for name in _CALLER}
    return parse(Config, {**saved, **kept}, "")


def leaves_of(config: Config) -> Iterator[tuple[str, Any]]:
    """(key path, value) of all that a run is configured with."""
    return _leaves(_data(config))


def _data(config: Config) -> dict[str, Any]:
    return {k: _plain(v) for k, v in dataclasses.asdict(config).items() if k not in _CALLER}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data[parent]
    data[leaf] = value

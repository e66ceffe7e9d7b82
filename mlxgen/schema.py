"""From plain data (YAML, JSON, keywords) to a frozen dataclass: names, types and nesting are checked here.

Ranges are checked by the dataclass itself, in `__post_init__`, with `errors.require`. Every message carries the
key path, so `{sampler: {top_p: high}}` is answered with "`sampler.top_p` must be a number, but is 'high'."
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from mlxgen.errors import ConfigError, did_you_mean

T = TypeVar("T")
_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false", Path: "a path"}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def parse(cls: type[T], node: Mapping[str, Any], path: str) -> T:
    """Build the dataclass `cls` from a mapping; `path` is the key path of the mapping, for messages.

    Raises ConfigError for unknown and missing keys and for values of another type.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"`{path}` must be a mapping of {cls.__name__} fields, but is {node!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in node:
        if key not in fields:
            raise ConfigError(
                f"`{join(path, str(key))}` is not a key here; known: {', '.join(sorted(fields))}."
                + did_you_mean(str(key), fields)
            )
    values = {}
    for name, field in fields.items():
        if name in node:
            values[name] = convert(_hints(cls)[name], node[name], join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"`{join(path, name)}` must be given.")
    try:
        return cls(**values)
    except ConfigError as error:  # a range check knows its key only by the field's name
        raise ConfigError(_prefix(str(error), path)) from None


def convert(kind: Any, value: Any, path: str) -> Any:
    """Check `value` against the type `kind` and convert where nothing is lost (int to float, list to tuple)."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(kind, value, path)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            hint = did_you_mean(str(value), map(str, choices))
            raise ConfigError(f"`{path}` must be one of {', '.join(map(str, choices))}, but is {value!r}.{hint}")
        return value
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else parse(kind, value, path)  # type: ignore[arg-type]
    if origin in (list, tuple, Sequence):
        return _convert_sequence(kind, origin, value, path)
    if origin in (dict, Mapping):
        _expect(isinstance(value, Mapping), path, "a mapping", value)
        item = typing.get_args(kind)[1]
        return {str(k): convert(item, v, join(path, str(k))) for k, v in value.items()}
    return _convert_scalar(kind, value, path)


def _convert_union(kind: Any, value: Any, path: str) -> Any:
    members = typing.get_args(kind)
    if value is None and type(None) in members:
        return None
    members = [m for m in members if m is not type(None)]
    error: ConfigError | None = None
    for member in members:
        try:
            return convert(member, value, path)
        except ConfigError as e:
            error = error or e
    if len(members) == 1:
        raise error or ConfigError(path)
    rule = " or ".join(_NAMES.get(m, getattr(m, "__name__", str(m))) for m in members)
    raise ConfigError(f"`{path}` must be {rule}, but is {value!r}.")


def _convert_sequence(kind: Any, origin: Any, value: Any, path: str) -> Any:
    _expect(isinstance(value, list | tuple), path, "a list", value)
    args = [a for a in typing.get_args(kind) if a is not Ellipsis]
    item = args[0] if args else Any
    items = [convert(item, v, f"{path}[{i}]") for i, v in enumerate(value)]
    return items if origin is list else tuple(items)


def _convert_scalar(kind: Any, value: Any, path: str) -> Any:
    rule = _NAMES.get(kind, getattr(kind, "__name__", str(kind)))
    if kind is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), path, rule, value)
        return float(value)
    if kind is int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        _expect(whole and not isinstance(value, bool), path, rule, value)
        return int(value)
    if kind is Path:
        _expect(isinstance(value, str | Path), path, rule, value)
        return Path(value).expanduser()
    _expect(isinstance(value, kind), path, rule, value)
    return value


def _expect(ok: bool, path: str, rule: str, value: Any) -> None:
    if not ok:
        raise ConfigError(f"`{path}` must be {rule}, but is {value!r}.")


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _prefix(message: str, path: str) -> str:
    """Put `path` in front of the first key a message names, unless it is there already."""
    if not path or not message.startswith("`") or message.startswith(f"`{path}"):
        return message
    return f"`{path}." + message[1:]

"""From plain data (YAML, JSON, keywords) to a frozen dataclass: names, types and nesting are checked here.

Ranges are checked by the dataclass itself, in `__post_init__`, with `errors.require`. Every message carries
the key path: `{sampler: {top_p: high}}` gives "`sampler.top_p` must be a number, but is 'high'."
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NewType, TypeVar, Union

from mlxgen.errors import ConfigError, did_you_mean

T = TypeVar("T")
Bytes = NewType("Bytes", int)
"""A size: a number of bytes, or text such as 512MB, 1.5 GB or 2GiB."""
_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    Bytes: "a size such as 512MB",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kMGT]?)(i?)B)?", re.IGNORECASE)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def parse(cls: type[T], node: Mapping[str, Any], path: str) -> T:
    """Build the dataclass `cls` from a mapping; `path` is the key path of the mapping, for messages.

    Raises ConfigError for unknown and missing keys and for values of another type.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"`{path}` must be a mapping with {', '.join(_hints(cls))}, but is {node!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in node:
        if key not in fields:
            raise unknown_key(join(path, str(key)), fields)
    must = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [f"`{join(path, name)}`" for name in must if name not in node]:
        raise ConfigError(f"{', '.join(missing)} must be given.")
    values = {name: convert(_hints(cls)[name], value, join(path, name)) for name, value in node.items()}
    try:
        return cls(**values)
    except ConfigError as error:  # a range check knows its key only by the field's name
        raise ConfigError(_prefix(str(error), path)) from None


def convert(kind: Any, value: Any, path: str) -> Any:
    """Check `value` against the type `kind`; convert where nothing is lost (int to float, list to tuple)."""
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
    members = [m for m in typing.get_args(kind) if m is not type(None)]
    if value is None and len(members) < len(typing.get_args(kind)):
        return None
    errors = []
    for member in members:
        try:
            return convert(member, value, path)
        except ConfigError as error:
            errors.append(error)
    # Of several kinds, one that fits but for something inside it has the better message.
    inside = [error for error in errors if not str(error).startswith(f"`{path}` ")]
    if len(members) == 1 or inside:
        raise (inside or errors)[0]
    raise ConfigError(f"`{path}` must be {' or '.join(map(_rule, members))}, but is {value!r}.")


def _convert_sequence(kind: Any, origin: Any, value: Any, path: str) -> Any:
    _expect(isinstance(value, list | tuple), path, "a list", value)
    args = [a for a in typing.get_args(kind) if a is not Ellipsis]
    item = args[0] if args else Any
    items = [convert(item, v, f"{path}[{i}]") for i, v in enumerate(value)]
    return items if origin is list else tuple(items)


def _convert_scalar(kind: Any, value: Any, path: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _expect(number and (isinstance(value, float) or abs(value) < 2**1023), path, _rule(kind), value)
        return float(value)
    if kind is int:
        _expect(number and value == value // 1, path, _rule(kind), value)
        return int(value)
    if kind is Bytes:
        return _bytes(value, path)
    if kind is Path:
        _expect(isinstance(value, str | Path), path, _rule(kind), value)
        return Path(str(value)).expanduser()
    hint = f" Write {value!r} in quotes." if kind is str and isinstance(value, int | float) else ""
    _expect(isinstance(value, kind), path, _rule(kind), value, hint)
    return value


def _bytes(value: Any, path: str) -> Bytes:
    found = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
    _expect(found is not None, path, _rule(Bytes), value)
    assert found is not None
    number, prefix, binary = found.groups()
    base = 1024 if binary else 1000
    return Bytes(round(float(number) * base ** " kmgt".index((prefix or " ").lower())))


def _rule(kind: Any) -> str:
    """A type in words."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if origin in (list, tuple, Sequence):
        return "a list"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(kind):
        return "a mapping"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _expect(ok: bool, path: str, rule: str, value: Any, hint: str = "") -> None:
    if not ok:
        raise ConfigError(f"`{path}` must be {rule}, but is {value!r}.{hint}")


def unknown_key(path: str, known: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist; `known` are the names that it could have had at its place."""
    near = did_you_mean(path.rpartition(".")[2], known)
    names = "" if near else f"; known here: {', '.join(sorted(known)) or 'none'}"
    return ConfigError(f"`{path}` is not a key{names}.{near}")


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _prefix(message: str, path: str) -> str:
    """Put `path` in front of the first key a message names, unless it is there already."""
    known = any(message.startswith(f"`{path}{end}") for end in ".[`")
    if not path or known or not message.startswith("`"):
        return message
    return f"`{path}." + message[1:]

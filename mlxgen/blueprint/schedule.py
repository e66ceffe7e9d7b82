"""Which layer gets which variant: a schedule names one variant for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxgen.errors import ConfigError, did_you_mean

Node = Mapping[str, Any]


def layer_schedule(node: Node, count: int, path: str) -> list[str]:
    """The variant's name for each of `count` layers.

    {kind: all, hit}                     every layer
    {kind: every, n, hit, miss, except}  layers n-1, 2n-1, ... but not those listed in `except`; layers `at`,
                                         at+n, ... where that is given; and those listed in `also`
    {kind: from, start, hit, miss}       layers from `start` on
    {kind: runs, runs, map}              the checkpoint's own list of [layer types, how often they repeat]
    {kind: list, list, map, else}        the checkpoint's own list of layer types, or text with a letter for each;
                                         `else` where it has none
    """
    kind = node.get("kind")
    if kind not in _KINDS:
        raise ConfigError(f"`{path}.kind` must be one of {', '.join(_KINDS)}, but is {kind!r}.")
    return _KINDS[kind](node, count, path)


def _all(node: Node, count: int, path: str) -> list[str]:
    return [node["hit"]] * count


def _every(node: Node, count: int, path: str) -> list[str]:
    n, skip = node["n"], node.get("except") or []
    at = node.get("at", n - 1)
    hits = {i for i in range(count) if n and i % n == at and i not in skip} | set(node.get("also") or [])
    return [node["hit"] if i in hits else node["miss"] for i in range(count)]


def _from(node: Node, count: int, path: str) -> list[str]:
    return [node["hit"] if i >= node["start"] else node["miss"] for i in range(count)]


def _runs(node: Node, count: int, path: str) -> list[str]:
    names = [name for kinds, times in node["runs"] for name in kinds * times]
    return _list({"list": names, "map": node["map"]}, count, path)


def _list(node: Node, count: int, path: str) -> list[str]:
    names, table = node["list"], node["map"]
    names = list(names) if isinstance(names, str) else names
    if names is None:
        return layer_schedule(node["else"], count, f"{path}.else")
    if not isinstance(names, list) or len(names) != count:
        size = len(names) if isinstance(names, list) else names
        raise ConfigError(f"config.json: the list of layer types must have {count} entries, but has {size}.")
    for name in names:
        if name not in table:
            hint = did_you_mean(str(name), map(str, table))
            known = ", ".join(map(str, table))
            raise ConfigError(f"config.json: a layer type must be one of {known}, but is {name!r}.{hint}")
    return [table[name] for name in names]


_KINDS: dict[str, Callable[[Node, int, str], list[str]]] = {
    "all": _all,
    "every": _every,
    "from": _from,
    "runs": _runs,
    "list": _list,
}

"""From a config node with `_target_` to an object: only from trusted packages, only with arguments it takes.

A YAML file that a stranger sends must not be able to run code: `_target_` may name what lives in mlxgen, or in a
package that the caller trusts by name (`trust=[my_package]` on the command line, `trust=` in Python; never in YAML).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mlxgen.errors import ConfigError, did_you_mean
from mlxgen.schema import join, parse


def build(node: Mapping[str, Any], path: str, trust: Sequence[str] = ()) -> Any:
    """Call the node's `_target_` with the node's other keys.

    path: the node's key path, for messages. Raises ConfigError for a target that is not trusted, does not exist or
    fails, and for arguments it does not take.
    """
    arguments = {k: v for k, v in node.items() if k != "_target_"}
    target = node.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(f"`{path}` must name a part with `_target_`, but has none.")
    part = _find(target, join(path, "_target_"), trust)
    if dataclasses.is_dataclass(part) and isinstance(part, type):
        return parse(part, arguments, path)
    _check_signature(part, arguments, path)
    try:
        return part(**arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"`{path}` could not be built: {type(error).__name__}: {error}") from error


def _find(target: str, path: str, trust: Sequence[str]) -> Any:
    roots = ("mlxgen", *trust)
    module_name, _, name = target.rpartition(".")
    if target.split(".")[0] not in roots or not module_name:
        raise ConfigError(
            f"`{path}` must be in a trusted package ({', '.join(roots)}), but is {target!r}; "
            f"trust another with trust=[{target.split('.')[0]}] on the command line."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"`{path}`: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"`{path}`: {module_name} has no {name!r}.{did_you_mean(name, known)}")
    part = getattr(module, name)
    home = getattr(part, "__module__", "") or ""
    if home.split(".")[0] not in roots or not callable(part):  # a trusted module may import os
        raise ConfigError(f"`{path}` must name a class or function of {module_name} itself, but is {target!r}.")
    return part


def _check_signature(part: Any, arguments: Mapping[str, Any], path: str) -> None:
    parameters = inspect.signature(part).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in arguments:
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            raise ConfigError(f"`{join(path, key)}` is not a key here; known: {known}.{did_you_mean(key, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(f"`{join(path, name)}` must be given.")

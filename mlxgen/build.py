"""From a config node with `_target_` to an object: only trusted parts, only with arguments they take.

A YAML file that a stranger sends must not be able to run code. `_target_` may name a dataclass of mlxgen, as
building one does nothing but check its fields, or what lives in a package that the caller trusts by name:
`trust=[my_package]` on the command line, `trust=` in Python, never in YAML.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mlxgen.errors import ConfigError, MlxgenError, did_you_mean
from mlxgen.schema import join, parse, unknown_key


def build(node: Mapping[str, Any], path: str, trust: Sequence[str] = ()) -> Any:
    """Call the node's `_target_` with the node's other keys.

    path: the node's key path, for messages. Raises ConfigError for a target that is not trusted, is
    missing or fails, and for arguments it does not take.
    """
    arguments = {k: v for k, v in node.items() if k != "_target_"}
    target = node.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(f"`{path}` must name a part with `_target_`, but has {target!r}.")
    part = _find(target, join(path, "_target_"), trust)
    try:
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return parse(part, arguments, path)
        _check_signature(part, arguments, path)
        return part(**arguments)
    except MlxgenError:
        raise
    except Exception as error:
        raise ConfigError(f"`{path}` could not be built: {type(error).__name__}: {error}") from error


def _find(target: str, path: str, trust: Sequence[str]) -> Any:
    module_name, _, name = target.rpartition(".")
    package = target.split(".")[0]
    if not module_name or package not in ("mlxgen", *trust):
        raise ConfigError(
            f"`{path}` must be in a trusted package ({', '.join(('mlxgen', *trust))}), but is {target!r}. "
            f"If you trust it, add trust=[{package}] to the command line."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and package != "mlxgen"
        hint = " Install it, or set PYTHONPATH." if absent else ""
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConfigError(f"`{path}`: importing {module_name} failed with {reason}.{hint}") from error
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"`{path}`: {module_name} has no {name!r}.{did_you_mean(name, known)}")
    part = getattr(module, name)
    home = str(getattr(part, "__module__", ""))
    # A trusted module may import os, and mlxgen has functions that run what they are given: `build` is one.
    own = home.startswith("mlxgen.") and isinstance(part, type) and dataclasses.is_dataclass(part)
    if not own and not (home.split(".")[0] in trust and callable(part)):
        rule = "a dataclass of mlxgen" if package == "mlxgen" else f"a class or function of {package} itself"
        raise ConfigError(f"`{path}` must name {rule}, but is {target!r}.")
    return part


def _check_signature(part: Any, arguments: Mapping[str, Any], path: str) -> None:
    parameters = inspect.signature(part).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in arguments:
        if key not in named and not open_ended:
            raise unknown_key(join(path, key), named)
    must = [name for name, p in named.items() if p.default is p.empty]
    if missing := [f"`{join(path, name)}`" for name in must if name not in arguments]:
        raise ConfigError(f"{', '.join(missing)} must be given.")

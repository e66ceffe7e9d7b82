"""Shell completion: a script for the shell, and what the word before the cursor may become. Hydra is not needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mlxgen.blueprint.blueprint import read_blueprint
from mlxgen.config.compose import leaves
from mlxgen.config.folders import GROUPS, choices, config_dirs
from mlxgen.config.run import Config
from mlxgen.errors import EXIT_OK, ConfigError
from mlxgen.yaml_text import read_yaml

_BASH = r"""
_mlxgen() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n'
    COMPREPLY=($(COMP_LINE="$line" mlxgen -sc query=bash))
    # Where the shell breaks words at "=", what stands before it is there already.
    if [[ ${line##* } == *=* && $COMP_WORDBREAKS == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#*=}"); fi
}
complete -o nospace -o default -F _mlxgen mlxgen"""
_SCRIPTS = {
    "bash": _BASH,
    "zsh": "autoload -U +X bashcompinit && bashcompinit" + _BASH,
    "fish": "complete -c mlxgen -a '(COMP_LINE=(commandline -cp) mlxgen -sc query=fish)'",
}


def shell_completion(command: str) -> int:
    """`install=SHELL` prints a script for the shell; the script asks `query=SHELL`, with the line in COMP_LINE."""
    verb, _, shell = command.partition("=")
    if verb not in ("install", "query") or shell not in _SCRIPTS:
        raise ConfigError(f"`-sc` must be install= or query= with {', '.join(_SCRIPTS)}, but is {command!r}.")
    if verb == "install":
        print(_SCRIPTS[shell].strip())
    else:
        print(*candidates(os.environ.get("COMP_LINE", "")), sep="\n")
    return EXIT_OK


def candidates(line: str) -> list[str]:
    """What the last word of a command line may become: a task, a group with its choices, a key."""
    *before, last = line.split(" ")[1:] or [""]
    name, equals, _ = last.partition("=")
    key, dirs = name.lstrip("+"), config_dirs(None)
    if equals:
        known = choices(key, dirs) if key in GROUPS else _values(get_type_hints(Config).get(key))
        found = [f"{name}={value}" for value in known]
    else:
        plus = name[: len(name) - len(key)]
        pairs = [word.lstrip("+").partition("=") for word in before]
        chosen = {group: choice for group, _, choice in pairs if choice in choices(group, dirs)}
        found = choices("task", dirs) if all(equals for _, equals, _ in pairs) else []
        found += [f"{plus}{path}=" for path in (*GROUPS, *_keys(chosen, dirs)) if ("." in path) == ("." in key)]
    return [word for word in found if word.startswith(last)]


def _values(kind: Any) -> list[str]:
    """What a key of this type may be, where that can be listed."""
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for member in get_args(kind) for value in _values(member)]


def _keys(chosen: Mapping[str, str], dirs: Sequence[Path]) -> list[str]:
    """The key paths of the root and of the chosen files."""
    tree: dict[str, Any] = read_yaml((dirs[-1] / "config.yaml").read_text(encoding="utf-8"))
    for entry in tree.pop("defaults"):
        if isinstance(entry, dict):
            chosen = {**entry, **chosen}
    for group in GROUPS:
        tree[group] = read_blueprint(chosen[group], [folder / group for folder in dirs]).tree
    return [path for path, value in leaves(tree) if not isinstance(value, dict) and "_target_" not in path]

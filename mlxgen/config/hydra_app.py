"""What is left to Hydra's own application: `--info`, and the scripts of shell completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mlxgen.config.compose import compose, leaves
from mlxgen.config.folders import GROUPS, choices, conf_dir, config_dirs
from mlxgen.config.words import read_overrides
from mlxgen.errors import EXIT_OK, ConfigError


def show_info(topic: str, words: Sequence[str], config_dir: Path | None) -> int:
    """Hydra's report on a configuration: where it searches, what it found, what it composed."""
    overrides = read_overrides(words, config_dir)
    return _hydra(["--info", topic, *overrides.hydra_words], overrides.config_dir)


def shell_completion(command: str) -> int:
    """`install=bash` prints a script, which calls `query=bash` with the line so far in COMP_LINE."""
    verb, _, shell = command.partition("=")
    if verb not in ("install", "uninstall", "query") or shell not in ("bash", "zsh", "fish"):
        raise ConfigError(f"`-sc` must be install=, uninstall= or query= with bash, zsh or fish, but is {command!r}.")
    if verb != "query":
        return _hydra(["-sc", command], None)
    print(*candidates(os.environ.get("COMP_LINE", "")), sep="\n" if shell == "fish" else " ")
    return EXIT_OK


def candidates(line: str) -> list[str]:
    """What the last word of a command line may become: tasks, groups with their choices, keys."""
    words = line.split(" ")[1:] or [""]
    *before, last = words
    name, equals, _ = last.partition("=")
    key, dirs = name.lstrip("+"), config_dirs(None)
    if equals:
        found = [f"{name}={choice}" for choice in choices(key, dirs)] if key in GROUPS else []
    else:
        plus = name[: len(name) - len(key)]
        pairs = [word.lstrip("+").partition("=") for word in before]
        chosen = [f"{group}={name}" for group, _, name in pairs if name in choices(group, dirs)]
        known = leaves(compose(read_overrides(chosen)))
        found = [*(f"{plus}{group}=" for group in GROUPS)]
        found += [f"{plus}{path}=" for path, value in known if not isinstance(value, dict)]
        found += choices("task", dirs) if all("=" in word for word in before) else []
    return [word for word in found if word.startswith(last)]


def _hydra(arguments: list[str], config_dir: Path | None) -> int:
    """Call Hydra's application; it reads sys.argv, sets up logging, and ends the process if something is wrong."""
    import logging

    import hydra

    dirs = config_dirs(config_dir)
    extra = ["--config-dir", str(dirs[0])] if len(dirs) > 1 else []
    root = logging.getLogger()
    before = sys.argv, root.handlers, root.level
    sys.argv, root.handlers = ["mlxgen", *arguments, *extra], []
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(lambda cfg: None)()
    finally:
        sys.argv, root.handlers, root.level = before
    return EXIT_OK

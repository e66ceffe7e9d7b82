"""Where things lie: the shipped conf/, a folder of YAML of the user's own, and what can be made again."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mlxgen.errors import ConfigError

GROUPS = (
    "model", "architecture", "tokenizer", "cache", "sampler", "adapter",
    "data", "optimizer", "schedule", "speculation", "prefix", "task", "experiment",
)  # fmt: skip
PARENTS = ("base", "source")  # files that others inherit from; not meant to be chosen
_USER_CONF = "MLXGEN_CONFIG_DIR"


def conf_dir() -> Path:
    """The shipped conf/: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    # An editable install leaves a stale copy of conf elsewhere, so only places beside the package count.
    return inside if (inside / "config.yaml").is_file() else package.parent / "conf"


def cache_folder() -> Path:
    """MLXGEN_CACHE, else the platform's folder for caches and `mlxgen` in it."""
    if chosen := os.environ.get("MLXGEN_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxgen"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxgen"


def config_dirs(user: Path | None) -> tuple[Path, ...]:
    """Folders that are searched for YAML, the user's own first: `user`, or else MLXGEN_CONFIG_DIR.

    Raises ConfigError if that is no folder, or has a file of a shipped name: Hydra would silently take ours.
    """
    source = "--config-dir" if user else _USER_CONF
    own = user or os.environ.get(_USER_CONF)
    if not own:
        return (conf_dir(),)
    folder = Path(own).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"`{source}` must be a folder, but {folder} is none.")
    for path in sorted(folder.glob("*/*.yaml")):
        if (conf_dir() / path.parent.name / path.name).is_file():
            raise ConfigError(f"{path} has the name of a shipped file; give it another.")
    return (folder, conf_dir())


def options(group: str, dirs: Sequence[Path]) -> dict[str, str]:
    """The names of a group, each with the first comment line of its file."""
    found: dict[str, str] = {}
    for folder in dirs:
        for path in sorted((folder / group).glob("*.yaml")):
            with path.open(encoding="utf-8", errors="replace") as file:
                heading = itertools.takewhile(lambda line: line.startswith("#"), file)
                about = [line.strip("# \n") for line in heading if "@package" not in line]
            found.setdefault(path.stem, about[0] if about else "")
    return found


def choices(group: str, dirs: Sequence[Path]) -> list[str]:
    """The names that a person may choose from, sorted."""
    return sorted(name for name in options(group, dirs) if name not in PARENTS)

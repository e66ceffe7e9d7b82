"""`mlxgen --help`: read from the YAML files' own first lines, so it can't go stale. Imports nothing heavy."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlxgen.config import GROUPS, config_dirs, options

_HEAD = """mlxgen: language models as one declarative graph.

  mlxgen prompt="Why is the sky blue?"                       answer with the default model
  mlxgen chat model=qwen3_0_6b sampler=top_p                 talk with another one
  pbpaste | mlxgen prompt="Summarize in one line:" | pbcopy  inside scripts

usage: mlxgen [TASK] [GROUP=NAME ...] [KEY=VALUE ...]        +GROUP=NAME means the same
"""

_TAIL = """
flags
  --config-dir DIR   a folder of your own, laid out like conf/ (or MLXGEN_CONFIG_DIR)
  --cfg job          show the composed configuration and stop
  --multirun, -m     one run for each value: sampler.temperature=0,0.5,1
  --info             what Hydra found where
  -sc install=SHELL  shell completion (bash, zsh, fish)
  --version, --help

exit codes: 0 done, 2 configuration, 3 model or data, 4 memory, 130 interrupted"""


def show_help(words: Sequence[str]) -> int:
    dirs = config_dirs(None)
    lines = [_HEAD]
    for group in ("task", *(g for g in GROUPS if g != "task")):
        lines.append(f"{group}=")
        names = {k: v for k, v in options(group, dirs).items() if k not in ("base", "source")}
        if group == "architecture":
            lines.append("  " + " ".join(names))
            continue
        width = max(map(len, names), default=0)
        lines += [f"  {name:<{width}}  {line}".rstrip() for name, line in names.items()]
    lines.append("keys")
    lines += _root_keys(dirs[-1])
    print("\n".join([*lines, _TAIL]), file=sys.stdout)
    return 0


def _root_keys(folder) -> list[str]:  # noqa: ANN001
    """The keys of config.yaml with their comments."""
    keys = []
    for line in (folder / "config.yaml").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith((" ", "#", "defaults", "hydra")):
            value, _, comment = line.partition("#")
            keys.append(f"  {value.strip().replace(': ', '='):<22}{comment.strip()}")
    return keys

"""`mlxgen --help`: read from the YAML files' own comments, so it can't go stale. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxgen.config.folders import GROUPS, PARENTS, config_dirs, options
from mlxgen.errors import EXIT_OK

_HEAD = """mlxgen: language models as one declarative graph.

  mlxgen prompt="Why is the sky blue?"                       answer with the default model
  mlxgen prompt="Name a colour." sampler.temperature=1 max_tokens=20
  mlxgen chat model=qwen3_0_6b sampler=top_p                 talk with another one
  pbpaste | mlxgen prompt="Summarize in one line:" | pbcopy  inside scripts

usage: mlxgen [TASK] [GROUP=NAME ...] [KEY=VALUE ...]        +GROUP=NAME means the same
       mlxgen GROUP=NAME --help                              the keys of one choice
"""

_TAIL = """
flags
  --config-dir DIR   a folder of your own, laid out like conf/ (or MLXGEN_CONFIG_DIR)
  --cfg job          show the composed configuration and stop
  --multirun, -m     one run for each value: sampler.temperature=0,0.5,1
  --info [TOPIC]     what was found where: searchpath, defaults, config, ...
  -sc install=SHELL  shell completion, for bash, zsh or fish: eval "$(mlxgen -sc install=bash)"
  --version, --help

exit codes: 0 done, 2 configuration, 3 model or data, 4 memory, 130 interrupted"""


def show_help(words: Sequence[str]) -> int:
    """Help on the choices that the words name, or else on everything."""
    dirs = config_dirs(_config_dir(words))
    chosen = [choice for word in words if (choice := _choice(word, dirs))]
    print("\n\n".join(_about(group, name, dirs) for group, name in chosen) if chosen else _overview(dirs))
    return EXIT_OK


def _config_dir(words: Sequence[str]) -> Path | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("--config-dir", "-cd") and following:
            return Path(following)
        if word.startswith("--config-dir="):
            return Path(word.partition("=")[2])
    return None


def _choice(word: str, dirs: Sequence[Path]) -> tuple[str, str] | None:
    group, equals, name = word.lstrip("+").partition("=")
    if not equals:
        group, name = "task", word
    return (group, name) if group in GROUPS and name in options(group, dirs) else None


def _overview(dirs: Sequence[Path]) -> str:
    lines = [_HEAD]
    for group in ("task", *(g for g in GROUPS if g != "task")):
        names = {name: about for name, about in options(group, dirs).items() if name not in PARENTS}
        width = max(map(len, names), default=0)
        lines.append(f"{group}=")
        if group == "architecture":
            lines.append("  " + " ".join(names))
        else:
            lines += [f"  {name:<{width}}  {about}".rstrip() for name, about in names.items()]
    lines += ["keys", *_root_keys(dirs[-1] / "config.yaml"), _TAIL]
    return "\n".join(lines)


def _root_keys(path: Path) -> list[str]:
    """The keys of config.yaml with their comments."""
    keys = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith((" ", "#", "defaults")):
            value, _, comment = line.partition("#")
            keys.append(f"  {value.strip().replace(': ', '='):<22}{comment.strip()}")
    return keys


def _about(group: str, name: str, dirs: Sequence[Path]) -> str:
    """The file of one choice, and what it inherits from, as they stand: comments are the documentation."""
    files = (folder / group / f"{name}.yaml" for folder in dirs)
    path = next(file for file in files if file.is_file())
    text = path.read_text(encoding="utf-8").rstrip()
    parents = [parent for parent in PARENTS if f"[{parent}, _self_]" in text]
    inherited = [_about(group, parent, dirs) for parent in parents]
    return "\n\n".join([f"{group}={name}    set a key with {group}.KEY=VALUE\n\n{text}", *inherited])

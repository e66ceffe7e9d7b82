"""The words of a command line: a task, groups, literal text, and values for Hydra to read.

`+model=x` and `model=x` mean the same, and so do `+max_tokens=5` and `max_tokens=5`: what may not be there is
found by the check of the composed whole, not by a sign in front. Of a key given twice the last counts. A key of the
task's own file needs no `task.` in front.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxgen.config.folders import GROUPS, choices, config_dirs, options
from mlxgen.errors import ConfigError, did_you_mean, require

TEXTS = ("prompt", "system", "prefill", "regex")  # taken literally, byte for byte
FILES = ("json_schema", "grammar")  # texts, or the names of files that hold them
LISTS = ("stop", "choice")  # texts, in a list of their own grammar
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_SIMPLE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")  # a number or a word: Hydra's grammar has no other reading of it
# YAML writes .inf what Hydra's grammar writes inf.
_YAML_INFINITY = re.compile(r"(?:(?<=[\[{,:\s])|^)([-+]?)\.(inf|nan)(?=[\]},\s]|$)")
# One item of a list: in single quotes, where two stand for one, in double quotes, or as it stands.
_ITEM = re.compile(r"""\s*(?:'((?:[^']|'')*)'|"([^"]*)"|([^,]*?))\s*(?:,|$)""")


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What was asked for: groups and values, which Hydra composes, and what must not pass through it."""

    groups: Mapping[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    literal: Mapping[str, Any] = field(default_factory=dict)
    trust: tuple[str, ...] = ()
    config_dir: Path | None = None

    @property
    def keys(self) -> list[str]:
        """What is named: groups, and keys of values."""
        return [*self.groups, *(value.lstrip("+").partition("=")[0] for value in self.values), *self.literal]

    @property
    def hydra_words(self) -> list[str]:
        return [*(f"{group}={choice}" for group, choice in self.groups.items()), *self.values]


def read_overrides(words: Sequence[str], config_dir: Path | None = None) -> Overrides:
    """Sort the words. Raises ConfigError for one that can't be meant."""
    dirs = config_dirs(config_dir)
    groups: dict[str, str] = {}
    values: list[str] = []
    literal: dict[str, Any] = {}
    trust: tuple[str, ...] = ()
    source: str | None = None
    bare: str | None = None
    own = _task_keys(words, dirs)
    for word in words:
        name, value = _split(word)
        if name is None:
            groups["task"] = bare = _task(word, bare, dirs)
        elif name in own:
            values.append(_value(f"task.{name}", value))
        elif name in TEXTS:
            literal[name] = value
        elif name in FILES:
            literal[name] = _text_or_file(name, value)
        elif name in LISTS:
            literal[name] = read_list(value)
        elif name == "trust":
            trust = tuple(read_list(value))
        elif name == "model":
            groups["model"], source = _model(value, dirs)
        elif name in GROUPS:
            groups[name] = _choice(name, value, dirs)
        else:
            values.append(_value(name, value))
    if source is not None:
        values.insert(0, f"++model.source={quoted(source)}")
    return Overrides(groups=groups, values=tuple(values), literal=literal, trust=trust, config_dir=config_dir)


def sweep(words: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], tuple[str, ...]]]:
    """`seed=1,2 raw=true,false` as one command line for each combination, with the words that differ."""
    dirs = config_dirs(config_dir)
    alternatives = [_alternatives(word, dirs) for word in words]
    differ = [i for i, found in enumerate(alternatives) if len(found) > 1]
    return [(list(run), tuple(run[i] for i in differ)) for run in itertools.product(*alternatives)]


def _alternatives(word: str, dirs: Sequence[Path]) -> list[str]:
    name, value = _split(word)
    if name is None or name in (*TEXTS, *FILES, *LISTS, "trust") or (name == "model" and Path(value).exists()):
        return [word]
    parsed = _parsed(f"{name}={value}")
    if parsed is None or not parsed.is_sweep_override():
        return [word]
    if not parsed.is_discrete_sweep():
        raise ConfigError(f"`{name}` must be values that can be counted out, but is {value!r}.")
    if hasattr(parsed.value(), "filter"):  # glob(...)
        found = parsed.value().filter(choices(name, dirs))
        require(bool(found), name, "a pattern that fits a name", value)
        return [f"{name}={option}" for option in found]
    return [f"{name}={one}" for one in parsed.sweep_string_iterator()]


def _split(word: str) -> tuple[str | None, str]:
    """(key, value), (None, "") for a bare word. Raises ConfigError for what is neither."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+")
    if word.startswith("-"):
        raise ConfigError(f"{word!r} is not a flag; `mlxgen --help` lists them.")
    if not equals and _KEY.fullmatch(word):
        return None, ""
    if word.startswith("~"):
        raise ConfigError(f"{word!r}: nothing can be deleted; choose none, or set null.")
    if name.startswith(("hydra.", "hydra/")):
        raise ConfigError(f"`{name}` has no effect: mlxgen composes with Hydra, but runs by itself.")
    if not equals or not _KEY.fullmatch(name):
        raise ConfigError(f"{word!r} is not key=value. Give free text as prompt={word!r}.")
    return name, value


def _task(word: str, before: str | None, dirs: Sequence[Path]) -> str:
    """The one bare word there may be. A second one is text without quotes, as a rule."""
    tasks = choices("task", dirs)
    if before is not None:
        raise ConfigError(f"{word!r} follows the task {before}, but is not key=value. Give free text as prompt='...'.")
    if word not in tasks:
        hint = did_you_mean(word, tasks) or " Give free text as prompt='...'."
        raise ConfigError(f"{word!r} is not a task or key=value; tasks: {', '.join(tasks)}.{hint}")
    return word


def _task_keys(words: Sequence[str], dirs: Sequence[Path]) -> frozenset[str]:
    """The keys of the task that the words name: `prompts=` means `task.prompts=` where the task has that."""
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        task = value if name == "task" else name
        for folder in dirs:
            file = folder / "task" / f"{task}.yaml"
            if name in ("task", word) and _KEY.fullmatch(task) and file.is_file():
                keys = re.findall(r"^([a-z]\w*):", file.read_text(encoding="utf-8", errors="replace"), re.M)
                return frozenset(keys) - {"defaults"}
    return frozenset()


def _choice(group: str, value: str, dirs: Sequence[Path]) -> str:
    if value not in options(group, dirs):
        raise ConfigError(f"`{group}` must be one of {_listed(group, dirs)}, but is {_given(group, value, dirs)}")
    return value


def _model(value: str, dirs: Sequence[Path]) -> tuple[str, str | None]:
    """(name in conf/model, None), or ("source", any checkpoint): a folder, a file or a hub id."""
    if value in options("model", dirs):
        return value, None
    if value and ("/" in value or value.endswith(".gguf") or Path(value).is_dir()):
        return "source", value
    raise ConfigError(
        f"`model` must be one of {_listed('model', dirs)}, a folder, a .gguf file or a hub id `org/name`, "
        f"but is {_given('model', value, dirs)}"
    )


def _listed(group: str, dirs: Sequence[Path]) -> str:
    return ", ".join(choices(group, dirs))


def _given(group: str, value: str, dirs: Sequence[Path]) -> str:
    several = all(part in options(group, dirs) for part in value.split(","))
    return f"{value!r}.{' ' + _SWEEP if several else did_you_mean(value, choices(group, dirs))}"


_SWEEP = "Add --multirun for one run with each."


def _value(name: str, value: str) -> str:
    """A word for Hydra. What its grammar can't read is text: `data.path=what's up` needs no quotes."""
    if _SIMPLE.fullmatch(value):
        return f"++{name}={value}"
    value = _YAML_INFINITY.sub(r"\1\2", value)
    parsed = _parsed(f"{name}={value}")
    if parsed is None:
        return f"++{name}={quoted(value)}"
    if parsed.is_sweep_override():
        raise ConfigError(f"`{name}` must be one value, but is {value!r}. {_SWEEP} A text with a comma needs quotes.")
    return f"++{name}={value}"


def _parsed(word: str) -> Any:
    """The word as Hydra's override, None if it is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def quoted(text: str) -> str:
    """Text as one value of Hydra's override grammar."""
    return "'" + re.sub(r"(\\*)(?='|$)", r"\1\1", text).replace("'", r"\'") + "'"


def _text_or_file(name: str, value: str) -> str:
    try:
        found = Path(value).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # a text that can't be a path
        found = False
    return read_file(name, Path(value)) if found else value


def read_file(name: str, path: Path) -> str:
    """The text of a file that the key `name` names. Raises ConfigError."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"`{name}` must be a file that can be read, but {path} can't: {why}.") from None


def read_list(text: str) -> list[str]:
    """`[a, 'b, c']` or a JSON list is several texts; anything else is one, as it stands."""
    if not (text.startswith("[") and text.endswith("]")):
        return [text] if text else []
    try:
        items = json.loads(text)
    except json.JSONDecodeError:
        items = None
    if items is not None and all(isinstance(item, str) for item in items):
        return items
    found = [m.group(1).replace("''", "'") if m[1] else m[2] or m[3] or "" for m in _ITEM.finditer(text[1:-1])]
    return [item for item in found if item]

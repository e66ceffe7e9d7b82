"""Blueprints: the YAML files of conf/architecture, how they inherit, and which one serves a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlxgen.blueprint.build_spec import build_spec, build_weight_rules, merge
from mlxgen.blueprint.config_keys import mentioned, unread
from mlxgen.blueprint.hf_config import HfConfig
from mlxgen.blueprint.spec import DecoderSpec
from mlxgen.errors import ConfigError, ModelError, did_you_mean
from mlxgen.yaml_text import read_yaml

_MODEL_TYPES = re.compile(r"^model_types:\s*\[(.*?)\]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """One family: how its config.json becomes a spec, and how its checkpoint's names become ours."""

    name: str
    tree: Mapping[str, Any]
    own_text: str = ""  # of its file and those it inherits, but for base.yaml, which mentions every family's keys

    def weights(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The rules for this config.json's weights: `ignore`, `rename`, `aliases`, `ops`."""
        return build_weight_rules(self.tree, HfConfig(config))

    def spec(self, config: Mapping[str, Any], weight_names: Iterable[str] | None = None) -> DecoderSpec:
        """The decoder that this config.json describes; `weight_names` are the checkpoint's, where known.

        Raises ConfigError, with the key path, for what is missing, unknown or contradictory.
        """
        return build_spec(self.tree, HfConfig(config), frozenset(weight_names or ()))

    def unread(self, config: Mapping[str, Any], folders: Sequence[Path]) -> tuple[list[str], list[str]]:
        """Keys of this config.json that the blueprint does not read: (known to change the model, unknown to all)."""
        hf = HfConfig(config)
        build_spec(self.tree, hf, frozenset())
        build_weight_rules(self.tree, hf)
        understood = hf.read | mentioned(self.own_text) | set(self.tree["unused"])
        return unread(config, understood, folders)


def supported(folders: Sequence[Path]) -> dict[str, str]:
    """model_type -> name of the blueprint that serves it."""
    found: dict[str, str] = {}
    for folder in reversed(folders):
        for path in sorted(folder.glob("*.yaml")):
            if path.stem in ("base", "auto"):
                continue
            found[path.stem] = path.stem
            aliases = _MODEL_TYPES.search(path.read_text(encoding="utf-8"))
            for alias in aliases.group(1).split(",") if aliases else ():
                if alias.strip():
                    found[alias.strip()] = path.stem
    return found


def find_blueprint(config: Mapping[str, Any], folders: Sequence[Path]) -> Blueprint:
    """The blueprint for this config.json's `model_type`. Raises ModelError naming the nearest supported ones."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"config.json: `model_type` must be text, but is {model_type!r}.")
    if any((folder / f"{model_type}.yaml").is_file() for folder in folders):
        return read_blueprint(model_type, folders)
    known = supported(folders)
    if model_type not in known:
        raise ModelError(
            f"config.json: `model_type` {model_type!r} has no blueprint.{did_you_mean(model_type, known)} "
            f"A new family is a YAML file architecture/{model_type}.yaml in your --config-dir; "
            "`mlxgen architectures` lists the known ones."
        )
    return read_blueprint(known[model_type], folders)


def read_blueprint(name: str, folders: Sequence[Path]) -> Blueprint:
    """The blueprint file `name`.yaml with everything it inherits through `defaults`."""
    texts: dict[str, str] = {}
    tree = _read(name, folders, (), texts)
    texts.pop("base", None)
    return Blueprint(name=name, tree=tree, own_text="\n".join(texts.values()))


def read_file(name: str, folders: Sequence[Path]) -> tuple[str, dict[str, Any]]:
    """(text, content) of one blueprint file as it stands, without what it inherits."""
    path = next((f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").is_file()), None)
    if path is None:
        known = [p.stem for f in folders for p in f.glob("*.yaml")]
        raise ConfigError(f"`architecture` {name!r} is not a blueprint.{did_you_mean(name, known)}")
    text = path.read_text(encoding="utf-8")
    try:
        return text, read_yaml(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _read(name: str, folders: Sequence[Path], children: tuple[str, ...], texts: dict[str, str]) -> dict[str, Any]:
    """The merged content of `name` and its parents; their texts are put into `texts`."""
    if name in children:
        raise ConfigError(f"`architecture.defaults` must not be a circle, but is {' -> '.join((*children, name))}.")
    texts[name], tree = read_file(name, folders)
    merged: dict[str, Any] = {}
    for parent in tree.pop("defaults", ["_self_"]):
        merged = merge(merged, tree if parent == "_self_" else _read(parent, folders, (*children, name), texts))
    return merged

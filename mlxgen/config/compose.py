"""From overrides to a composed, checked configuration: the place where Hydra works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlxgen.config.folders import GROUPS, conf_dir, config_dirs
from mlxgen.config.remembered import remembered
from mlxgen.config.run import FROM_CALLER, Config
from mlxgen.config.words import FILES, LISTS, TEXTS, Overrides, read_overrides
from mlxgen.errors import ConfigError
from mlxgen.schema import parse, unknown_key

# Never interpolated: text is taken as it stands; a blueprint's expressions need the checkpoint's config.json.
_AS_WRITTEN = (*TEXTS, *FILES, *LISTS, "architecture")


def load_config(
    words: Sequence[str],
    *,
    trust: Sequence[str] = (),
    config_dir: Path | None = None,
    variant: Sequence[str] = (),
) -> Config:
    """Words of a command line to a checked Config. Raises ConfigError before anything is loaded.

    trust: packages that `_target_` may name. config_dir: a folder laid out like conf/.
    variant: the words that tell this run of a sweep from the others.
    """
    overrides = read_overrides(words, config_dir)
    return checked(overrides, compose(overrides), trust=trust, variant=variant)


def compose(overrides: Overrides) -> dict[str, Any]:
    """Compose conf/config.yaml with the overrides, as plain data. Raises ConfigError in one line."""
    words = overrides.hydra_words

    def composed() -> dict[str, Any]:
        return _plain(_composed(overrides))

    shipped = len(config_dirs(overrides.config_dir)) == 1  # the YAML of others may ask for anything, the time even
    return {**(remembered(words, composed) if shipped else composed()), **overrides.literal}


def recipe(overrides: Overrides) -> tuple[dict[str, Any], dict[str, Any]]:
    """(composed data, the same with the choices that led to it: as an experiment it composes to it again)."""
    cfg = _composed(overrides)
    data = {**_plain(cfg), **overrides.literal}
    chosen = cfg.hydra.runtime.choices
    defaults = [{f"override /{group}": chosen[group]} for group in GROUPS if group != "experiment"]
    # The task's target comes with its name, so that another task may be named on the command line.
    task = {key: value for key, value in data["task"].items() if key != "_target_"}
    return data, {"defaults": defaults, **data, "task": task}


def _composed(overrides: Overrides) -> Any:
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    dirs = config_dirs(overrides.config_dir)
    words = list(overrides.hydra_words)
    if len(dirs) > 1:
        words.append(f"hydra.searchpath=['file://{dirs[0]}']")
    outer = GlobalHydra.instance().hydra  # the caller may be a Hydra application
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra_compose("config", overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(_one_line(error)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def _plain(cfg: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    data = {}
    try:
        for key in cfg:
            resolve = key not in _AS_WRITTEN
            node = cfg._get_node(key)
            if key == "hydra":
                continue
            if OmegaConf.is_config(node):
                data[key] = OmegaConf.to_container(node, resolve=resolve)
            else:
                data[key] = cfg[key] if resolve else node._value()
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    if missing := [f"`{path}`" for path, value in leaves(data) if value == "???"]:
        raise ConfigError(f"{', '.join(missing)} must be given.")
    return {**data, "architecture": data["architecture"] or {}}


def checked(
    overrides: Overrides, data: Mapping[str, Any], *, trust: Sequence[str] = (), variant: Sequence[str] = ()
) -> Config:
    """Composed data as a Config; names, types and ranges are checked here."""
    for key in FROM_CALLER:
        if key in data:
            raise ConfigError(f"`{key}` must not stand in YAML.")
    names = [field.name for field in fields(Config) if field.name not in FROM_CALLER]
    for key in data:
        if key not in names:
            raise _unknown(str(key), data, names)
    if data["architecture"] and not {"decoder", "layer", "weights"} <= set(data["architecture"]):
        raise ConfigError("`architecture` must be chosen before its values can be set, e.g. architecture=llama.")
    given = {
        "trust": [*overrides.trust, *trust],
        "config_dirs": config_dirs(overrides.config_dir),
        "variant": variant,
        "given": overrides.keys,
    }
    return parse(Config, {**data, **given}, "")


def _unknown(key: str, data: Mapping[str, Any], names: list[str]) -> ConfigError:
    """The error for a root key that does not exist: often one that has its place deeper down."""
    if key == "experiment":
        return ConfigError("an experiment's file must begin with the line `# @package _global_`.")
    homes = [path for path, _ in leaves(data) if path.endswith(f".{key}")]
    if homes:
        nearest = min(homes, key=lambda path: path.count("."))
        return ConfigError(f"`{key}` is not a key. Did you mean `{nearest}`?")
    return unknown_key(key, names)


def leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of every key, at any depth."""
    for key, value in data.items():
        yield f"{path}{key}", value
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")


def _one_line(error: BaseException) -> str:
    """What Hydra, OmegaConf or the YAML reader says, without the search path."""
    import yaml

    while not str(error).strip() and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"{error.problem_mark.name}, line {error.problem_mark.line + 1}"
        return f"{where} is not plain YAML: {error.problem}."
    if isinstance(error, UnicodeDecodeError):
        return f"a YAML file is not UTF-8: {error}."
    text = str(error).partition("Config search path:")[0].partition("object_type=")[0]
    return " ".join(text.split()) or type(error).__name__

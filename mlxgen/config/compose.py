"""From overrides to a composed, checked configuration: the place where Hydra works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlxgen.config.folders import conf_dir, config_dirs
from mlxgen.config.run import FROM_CALLER, Config
from mlxgen.config.words import TEXTS, Overrides, read_overrides
from mlxgen.errors import ConfigError
from mlxgen.schema import parse, unknown_key

# Never interpolated: text is taken as it stands; a blueprint's expressions need the checkpoint's config.json.
_AS_WRITTEN = (*TEXTS, "stop", "architecture")


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
    glob = GlobalHydra.instance()
    outer, glob.hydra = glob.hydra, None  # the caller may be a Hydra application
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            data = _plain(hydra_compose("config", overrides=words))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(_one_line(error)) from error
    finally:
        glob.hydra = outer
    return {**data, **overrides.literal}


def _plain(cfg: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    data = {}
    for key, value in raw.items():
        resolve = key not in _AS_WRITTEN
        section = OmegaConf.is_config(cfg._get_node(key))
        data[key] = (
            OmegaConf.to_container(cfg[key], resolve=resolve) if section else cfg[key] if resolve else value
        )
    if missing := [path for path, value in leaves(data) if value == "???"]:
        raise ConfigError(f"{', '.join(f'`{path}`' for path in missing)} must be given.")
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
    if data["architecture"] and "decoder" not in data["architecture"]:
        raise ConfigError(
            "`architecture` must be chosen before its values can be set, e.g. architecture=llama."
        )
    given = {
        "trust": [*overrides.trust, *trust],
        "config_dirs": config_dirs(overrides.config_dir),
        "variant": variant,
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


def _one_line(error: Exception) -> str:
    """Hydra's message without the search path, which follows in lines of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__

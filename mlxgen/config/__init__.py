"""The configuration of a run: from words to composed YAML to a checked Config.

The one package that knows Hydra, and only while it composes: importing this imports nothing heavy.
"""

from mlxgen.config.adapter import AdapterConfig
from mlxgen.config.compose import checked, compose, load_config, recipe
from mlxgen.config.data import DataConfig
from mlxgen.config.folders import GROUPS, conf_dir, config_dirs, options
from mlxgen.config.run import (
    RULES,
    Config,
    ModelConfig,
    PackageConfig,
    PrefixConfig,
    SpeculationConfig,
    TokenizerConfig,
)
from mlxgen.config.words import Overrides, read_file, read_overrides, sweep

__all__ = [
    "GROUPS",
    "RULES",
    "AdapterConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "Overrides",
    "PackageConfig",
    "PrefixConfig",
    "SpeculationConfig",
    "TokenizerConfig",
    "checked",
    "compose",
    "conf_dir",
    "config_dirs",
    "load_config",
    "options",
    "read_file",
    "read_overrides",
    "recipe",
    "sweep",
]

"""The configuration of a run: from words to composed YAML to a checked Config.

The one package that knows Hydra, and only while it composes: importing this imports nothing heavy.
"""

from mlxgen.config.compose import checked, compose, load_config, recipe
from mlxgen.config.folders import GROUPS, conf_dir, config_dirs, options
from mlxgen.config.run import Config, ModelConfig, PackageConfig, TokenizerConfig
from mlxgen.config.words import Overrides, read_overrides, sweep

__all__ = [
    "GROUPS",
    "Config",
    "ModelConfig",
    "Overrides",
    "PackageConfig",
    "TokenizerConfig",
    "checked",
    "compose",
    "conf_dir",
    "config_dirs",
    "load_config",
    "options",
    "read_overrides",
    "recipe",
    "sweep",
]

"""From a checkpoint's config.json to a DecoderSpec, by way of a YAML blueprint. No mlx here.

    find_blueprint(config, folders) -> Blueprint        which conf/architecture/*.yaml serves this model_type
    blueprint.spec(config, weight_names) -> DecoderSpec
    blueprint.weights(config) -> rules for the names and layouts of its weights
"""

from mlxgen.blueprint.blueprint import Blueprint, find_blueprint, read_blueprint, supported
from mlxgen.blueprint.spec import DecoderSpec

__all__ = ["Blueprint", "DecoderSpec", "find_blueprint", "read_blueprint", "supported"]

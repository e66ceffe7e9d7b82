"""The same float32 weights for both engines: the default model, dequantized and written once into a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mlxgen.blueprint import find_blueprint
from mlxgen.checkpoint.save import save_weights
from mlxgen.config import Config
from mlxgen.loading import load
from mlxgen.tokenizer import open_tokenizer


def float32_folder(config: Config, folder: Path) -> Path:
    """Write the configured model, unfused and in float32, as mlx-lm and transformers read it."""
    model = dataclasses.replace(config.model, fuse=False, dequantize=True, dtype="float32")
    loaded = load(model, dirs=config.config_dirs)
    blueprint = find_blueprint(loaded.checkpoint.config, [d / "architecture" for d in config.config_dirs])
    save_weights(
        loaded.decoder,
        blueprint.weights(loaded.checkpoint.config),
        {**loaded.checkpoint.config, "torch_dtype": "float32"},
        folder,
    )
    open_tokenizer(loaded.checkpoint, config.tokenizer).save(folder)  # type: ignore[attr-defined]
    return folder

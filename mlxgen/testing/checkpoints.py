"""Complete checkpoints of a few hundred kilobytes: the whole pipeline runs on them in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.blueprint import find_blueprint
from mlxgen.checkpoint.save import save_weights
from mlxgen.config import conf_dir
from mlxgen.testing.models import tiny_config, tiny_decoder
from mlxgen.testing.tokenizers import tiny_bpe


def write_tiny(
    folder: Path | str,
    model_type: str = "llama",
    seed: int = 0,
    tokenizer: bool = True,
    generation_config: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a checkpoint with random weights, as the hub has it, and return its folder.

    It holds config.json, model.safetensors under the family's own names, generation_config.json, and unless
    `tokenizer` is false the 298 tokens of `tiny_bpe` with a ChatML template. `config`: keys of config.json
    that differ from `mlxgen.testing.models.TINY`. The same arguments give the same bytes.
    """
    folder = Path(folder)
    full = tiny_config(model_type, **config)
    rules = find_blueprint(full, [conf_dir() / "architecture"]).weights(full)
    save_weights(tiny_decoder(model_type, seed=seed, **config), rules, full, folder)
    (folder / "generation_config.json").write_text(json.dumps(generation_config or {}))
    if tokenizer:
        tiny_bpe().save(folder)
    return folder

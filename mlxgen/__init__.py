"""mlxgen: language models on Apple Silicon as one declarative graph.

    pipe = mlxgen.load("model=smollm2_135m", "sampler=top_p")
    print(pipe.generate("Why is the sky blue?"))

Importing this package imports nothing heavy; names load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxgen.completion import Chunk, Completion
    from mlxgen.decoder import Decoder
    from mlxgen.errors import ConfigError, FitError, MlxgenError, ModelError, RequestError
    from mlxgen.loading import load_model
    from mlxgen.pipeline import Pipeline
    from mlxgen.pipeline import load_pipeline as load

__version__ = "0.1.0"
__all__ = [
    "Chunk",
    "Completion",
    "ConfigError",
    "Decoder",
    "FitError",
    "MlxgenError",
    "ModelError",
    "Pipeline",
    "RequestError",
    "load",
    "load_model",
]

_HOME = {
    "Chunk": "completion",
    "Completion": "completion",
    "ConfigError": "errors",
    "Decoder": "decoder",
    "FitError": "errors",
    "MlxgenError": "errors",
    "ModelError": "errors",
    "Pipeline": "pipeline",
    "RequestError": "errors",
    "load": "pipeline:load_pipeline",
    "load_model": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mlxgen' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(f"mlxgen.{module}"), attribute or name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

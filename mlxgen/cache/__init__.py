"""KV caches: what makes decode cheap, and what its memory costs."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.cache.layer_cache import FullCache, WindowCache
from mlxgen.cache.merge import merge
from mlxgen.cache.policy import Full, Quantized, Window
from mlxgen.cache.recurrent import HybridCache, RecurrentCache
from mlxgen.cache.rows import Rows
from mlxgen.cache.storage import load_caches, save_caches

__all__ = [
    "Full",
    "FullCache",
    "HybridCache",
    "Quantized",
    "RecurrentCache",
    "Rows",
    "Window",
    "WindowCache",
    "load_caches",
    "merge",
    "save_caches",
]

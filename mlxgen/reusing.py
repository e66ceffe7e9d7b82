"""What is kept of computed prompts, by the configuration: `prefix=memory`, or `=disk` for the next run too."""

from __future__ import annotations

from collections.abc import Callable

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.cache import storage
from mlxgen.config import PrefixConfig
from mlxgen.engine import PrefixStore

STRIDE = 256
"""Windows and recurrent memories can't go back by themselves: so many tokens apart, a copy is kept to go on from."""


def open_store(config: PrefixConfig, fingerprint: Callable[[], str]) -> PrefixStore | None:
    """None if nothing is kept. fingerprint: everything that keys and values depend on besides policy and tokens."""
    if not config.memory and config.folder is None:
        return None
    if config.folder is None:
        return PrefixStore(config.memory)
    from mlxgen.engine.shelf import Shelf  # the many runs without one start faster

    return PrefixStore(config.memory, Shelf(config.folder, config.disk, fingerprint, storage))

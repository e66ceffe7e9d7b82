"""What all recurrent mixers have in common."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.decoder.segments import Packed


class RecurrentMixer(nn.Module):
    """A mixer with a memory: `mix` is the same call, for rows that hold one text each."""

    def __call__(self, x: mx.array, batch: int, cache: Any, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        if type(cache) is Packed:
            return cache.mix(self.mix, x, length)
        return self.mix(x, batch, cache, mask, length)

    def mix(self, x: mx.array, batch: int, cache: Any, mask: Any, length: int) -> mx.array:
        raise NotImplementedError

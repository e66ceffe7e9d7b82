"""Rotary position embedding of queries and keys. The frequencies come from blueprint/rope.py."""

from __future__ import annotations

import mlx.core as mx

from mlxgen.blueprint.rope import RopeSpec


class Rope:
    """Rotates the first `dims` elements of each head by position. Not a module: it holds nothing learned."""

    def __init__(self, spec: RopeSpec, head_dim: int):
        self.spec = spec
        self.head_dim = head_dim
        _, self.scale = spec.frequencies()
        # Where the whole head is rotated, the scale of q and k can go into the attention scale instead.
        self.attention_scale = self.scale**2 if spec.dims == head_dim else 1.0
        self._wavelengths: dict[bool | int, mx.array] = {}

    def __call__(self, x: mx.array, offset: int | mx.array, length: int) -> mx.array:
        """x [B, H, L, D] -> rotated; `offset` is the position of its first token, `length` the whole sequence's."""
        if self.scale != 1.0 and self.spec.dims < self.head_dim:
            x = x * self._partial_scale().astype(x.dtype)
        return mx.fast.rope(
            x,
            self.spec.dims,
            traditional=self.spec.interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs(length),
        )

    def _freqs(self, length: int) -> mx.array:
        """What mx.fast.rope calls freqs: positions per radian [dims/2]."""
        spec, key = self.spec, 0
        if spec.changes_at is not None:
            key = int(length > spec.changes_at)
        elif spec.kind == "dynamic" and length > (spec.context or length):
            key = length
        if key not in self._wavelengths:
            inv_freq, _ = spec.frequencies(length)
            self._wavelengths[key] = mx.array([1.0 / f if f else float("inf") for f in inv_freq], mx.float32)
        return self._wavelengths[key]

    def _partial_scale(self) -> mx.array:
        rest = self.head_dim - self.spec.dims
        return mx.array([self.scale] * self.spec.dims + [1.0] * rest)

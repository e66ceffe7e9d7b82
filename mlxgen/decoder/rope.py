"""Rotary position embedding of queries and keys. The frequencies come from blueprint/rope.py."""

from __future__ import annotations

import mlx.core as mx

from mlxgen.blueprint.rope import RopeSpec


class Rope:
    """Rotates the first `dims` elements of each head by position. Not a module: it holds nothing learned.

    Some ropes also scale q and k. Where the whole head is rotated, that is left to the caller, who multiplies the
    scores by `attention_scale`, unless `scaled`.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, scaled: bool = False):
        self.spec = spec
        self.head_dim = head_dim
        _, self.scale = spec.frequencies()
        self._left_out = 1.0 if scaled or spec.dims < head_dim else self.scale
        self.attention_scale = self._left_out**2
        self._tables: dict[bool | int, tuple[mx.array, mx.array | None]] = {}
        self._fixed = None if spec.changes_at is not None or spec.kind == "dynamic" else self._table(0)

    def __call__(self, x: mx.array, offset: int | mx.array, length: int) -> mx.array:
        """x [B, H, L, D] -> rotated; `offset` is the position of its first token, `length` the whole sequence's."""
        wavelengths, factor = self._fixed or self._table(length)
        if factor is not None:
            x = x * factor.astype(x.dtype)
        return mx.fast.rope(
            x,
            self.spec.dims,
            traditional=self.spec.interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=wavelengths,
        )

    def _table(self, length: int) -> tuple[mx.array, mx.array | None]:
        """(positions per radian [dims/2], factor of the head's elements [D] or None)."""
        spec, key = self.spec, 0
        if spec.changes_at is not None:
            key = int(length > spec.changes_at)
        elif spec.kind == "dynamic" and length > (spec.context or length):
            key = length
        if key not in self._tables:
            inv_freq, scale = spec.frequencies(length)
            wavelengths = mx.array([1.0 / f if f else float("inf") for f in inv_freq], mx.float32)
            self._tables[key] = (wavelengths, self._factor(scale))
        return self._tables[key]

    def _factor(self, scale: float) -> mx.array | None:
        """What the rotated elements are multiplied by here."""
        rest = self.head_dim - self.spec.dims
        scale /= self._left_out
        return mx.array([scale] * self.spec.dims + [1.0] * rest) if scale != 1.0 else None

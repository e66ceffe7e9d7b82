"""Differential attention (arXiv:2410.05258): what two softmaxes agree on is noise, and is taken away.

Shapes: B batch, L new tokens, S tokens seen, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxgen.blueprint.special import DifferentialAttentionSpec
from mlxgen.decoder.attention import Attention
from mlxgen.decoder.norm import build_norm


class DifferentialAttention(Attention):
    """Head h of the first half minus lambda times head h of the second, over the values of two key/value heads.

    Reference: transformers models/diffllama.
    """

    def __init__(self, spec: DifferentialAttentionSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self[name] = mx.zeros((spec.head_dim,))
        self.pair_norm = build_norm(spec.norm, 2 * spec.head_dim)
        self.lambda_init = spec.lambda_init

    def attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
        """q [B, H, L, D], keys and values [B, K, S, D] -> [B, H / 2, L, 2 D]."""
        first, second = mx.split(values, 2, axis=1)
        pairs = mx.concatenate([first, second], axis=-1)  # [B, K / 2, S, 2 D]
        out = super().attend(q, keys, mx.concatenate([pairs, pairs], axis=1), mask)  # [B, H, L, 2 D]
        one, two = mx.split(out, 2, axis=1)
        difference = one - self._lambda().astype(out.dtype) * two
        return self.pair_norm(difference) * (1 - self.lambda_init)

    def _lambda(self) -> mx.array:
        def factor(i: int) -> mx.array:
            return mx.exp((self[f"lambda_q{i}"].astype(mx.float32) * self[f"lambda_k{i}"].astype(mx.float32)).sum())

        return factor(1) - factor(2) + self.lambda_init

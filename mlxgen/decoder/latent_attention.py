"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache holds one small vector per token.

A token's latent vector c [R] gives the keys and values of all heads through two matrices. As q . (W c) = (W^T q) . c,
queries can be taken into the latent space instead of keys out of it, and likewise values after the softmax. So keys and
values of the heads are never stored: the cache holds [c, k_rope], which every head shares.

Shapes: B batch, L new tokens, S tokens seen, H heads, R kv_rank, T = B * L rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import LatentAttentionSpec
from mlxgen.decoder.attention import merge_heads, query_temperature, split_heads
from mlxgen.decoder.norm import build_norm
from mlxgen.decoder.rope import Rope
from mlxgen.decoder.segments import Packed
from mlxgen.protocols import LayerCache


class LatentAttention(nn.Module):
    """`embed_q` [H, R, nope] takes queries into the latent space, `unembed_out` [H, v, R] takes results out of it."""

    def __init__(self, spec: LatentAttentionSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        H, R = spec.num_heads, spec.kv_rank
        q_width = H * (spec.nope_dim + spec.rope_dim)
        if spec.q_rank is None:
            self.q_proj = nn.Linear(hidden_size, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, spec.q_rank, bias=spec.bias)
            self.q_a_norm = build_norm(spec.norm, spec.q_rank)
            self.q_b_proj = nn.Linear(spec.q_rank, q_width, bias=False)
        self.kv_a_proj = nn.Linear(hidden_size, R + spec.rope_dim, bias=spec.bias)
        self.kv_a_norm = build_norm(spec.norm, R)
        self.embed_q = HeadLinear(H, spec.nope_dim, R)
        self.unembed_out = HeadLinear(H, R, spec.v_dim)
        self.o_proj = nn.Linear(H * spec.v_dim, hidden_size, bias=spec.o_bias)
        self.rope = Rope(spec.rope, spec.rope_dim) if spec.rope is not None else None
        self.expand_from = _expand_from(spec)

    def __call__(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        return self.attended(x, self.query_latent(x), batch, cache, mask, length)

    def attended(
        self, x: mx.array, q_latent: mx.array, batch: int, cache: Any, mask: Any, length: int
    ) -> mx.array:
        """x [T, hidden] and its `query_latent` -> [T, hidden]; of the cache, `offset` and `attend` are used."""
        spec = self.spec
        q_proj = self["q_proj"] if spec.q_rank is None else self["q_b_proj"]
        q = split_heads(q_proj(q_latent), batch, spec.nope_dim + spec.rope_dim)  # [B, H, L, nope + rope]
        q_nope, q_rope = q[..., : spec.nope_dim], q[..., spec.nope_dim :]
        kv = self["kv_a_proj"](x)
        latent = split_heads(self["kv_a_norm"](kv[:, : spec.kv_rank]), batch, spec.kv_rank)  # [B, 1, L, R]
        k_rope = split_heads(kv[:, spec.kv_rank :], batch, spec.rope_dim)
        q_rope, k_rope = self._rotated(q_rope, cache, length), self._rotated(k_rope, cache, length)
        many = (cache.layout.longest if type(cache) is Packed else q.shape[2]) > self.expand_from
        q = mx.concatenate([q_nope if many else self["embed_q"](q_nope), q_rope], axis=-1)
        if spec.temperature is not None:
            q = q * query_temperature(spec.temperature, cache.offset, q.shape[2]).astype(q.dtype)
        keys = mx.concatenate([latent, k_rope], axis=-1)
        out = cache.attend(q, keys, None, mask, self._attend_expanded if many else self._attend_latent)
        return self["o_proj"](merge_heads(out))

    def _attend_latent(self, q: mx.array, keys: mx.array, values: None, mask: Any) -> mx.array:
        """q [B, H, L, R + rope], keys [B, 1, S, R + rope], whose first R elements are the values -> [B, H, L, v]."""
        values_ = keys[..., : self.spec.kv_rank]
        out = mx.fast.scaled_dot_product_attention(q, keys, values_, scale=self.spec.scale, mask=mask)
        return self["unembed_out"](out)

    def _attend_expanded(self, q: mx.array, keys: mx.array, values: None, mask: Any) -> mx.array:
        """q [B, H, L, nope + rope]: with many queries it costs less to write out the keys and values of the heads."""
        latent, k_rope = keys[..., : self.spec.kv_rank], keys[..., self.spec.kv_rank :]
        k_nope = self["embed_q"].transposed(latent)  # [B, H, S, nope]
        k_rope = mx.broadcast_to(k_rope, (*k_nope.shape[:3], k_rope.shape[-1]))
        k = mx.concatenate([k_nope, k_rope], axis=-1)
        return mx.fast.scaled_dot_product_attention(
            q, k, self["unembed_out"](latent), scale=self.spec.scale, mask=mask
        )

    def query_latent(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> what queries are made of: a latent vector [T, q_rank], or x itself."""
        return x if self.spec.q_rank is None else self["q_a_norm"](self["q_a_proj"](x))

    def _rotated(self, x: mx.array, cache: LayerCache, length: int) -> mx.array:
        if self.rope is None:
            return x
        x = self.rope(x, cache.offset, length)
        return x if self.rope.scale == 1.0 else x * self.rope.scale


def _expand_from(spec: LatentAttentionSpec) -> int:
    """From how many queries on expanding S keys and values, S R (nope + v), costs less than the longer dot products."""
    R, heads = spec.kv_rank, spec.nope_dim + spec.v_dim
    return R * heads // (2 * R - heads) if heads < 2 * R else 0


class HeadLinear(nn.Module):
    """A linear map for each head: [B, H, L, in] -> [B, H, L, out]."""

    def __init__(self, heads: int, input_dims: int, output_dims: int):
        super().__init__()
        self.weight = mx.zeros((heads, output_dims, input_dims))

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight.swapaxes(-1, -2)

    def transposed(self, x: mx.array) -> mx.array:
        """The transposed map: [B, 1 or H, L, out] -> [B, H, L, in]."""
        return x @ self.weight

    def to_quantized(self, group_size: int = 64, bits: int = 4, mode: str = "affine") -> QuantizedHeadLinear:
        return QuantizedHeadLinear(self.weight, group_size, bits, mode)


class QuantizedHeadLinear(nn.Module):
    """HeadLinear with weights in MLX's quantized form."""

    def __init__(self, weight: mx.array, group_size: int, bits: int, mode: str):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(weight, group_size, bits, mode=mode)
        if biases:
            self.biases = biases[0]

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        return mx.quantized_matmul(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    def transposed(self, x: mx.array) -> mx.array:
        return self(x, transpose=False)

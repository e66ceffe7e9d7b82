"""Gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692).

Shapes: B batch, L new tokens, T = B * L rows, G key heads, R value heads for each, N key dim, P value dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import GatedDeltaNetSpec
from mlxgen.decoder.activation import silu, softplus
from mlxgen.decoder.attention import merge_heads, split_heads
from mlxgen.decoder.recurrent.causal_conv import CausalConv
from mlxgen.decoder.recurrent.delta_rule import delta_rule
from mlxgen.decoder.recurrent.gated_norm import GatedNorm
from mlxgen.decoder.recurrent.mixer import RecurrentMixer
from mlxgen.protocols import StateCache

_L2_EPSILON = 1e-6  # the reference code's, for queries and keys


class GatedDeltaNet(RecurrentMixer):
    """project -> convolve -> gated delta rule -> norm and gate -> project.

    `passes.fuse_projections` may replace the projections that read the layer's input by one in_proj.
    """

    def __init__(self, spec: GatedDeltaNetSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        H = spec.num_v_heads
        self.key_width, self.value_width = spec.num_k_heads * spec.k_dim, H * spec.v_dim
        self.q_proj = nn.Linear(hidden_size, self.key_width, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_width, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_width, bias=False)
        self.conv1d = CausalConv(2 * self.key_width + self.value_width, spec.conv_width, bias=False)
        self.b_proj = nn.Linear(hidden_size, H, bias=False)  # how far a value is corrected
        if spec.rank is None:
            self.a_proj = nn.Linear(hidden_size, H, bias=False)  # how fast the memory decays
            self.g_proj = nn.Linear(hidden_size, self.value_width, bias=False)  # the gate
        else:
            self.f_a_proj = nn.Linear(hidden_size, spec.rank, bias=False)
            self.f_b_proj = nn.Linear(spec.rank, H * spec.k_dim, bias=False)
            self.g_a_proj = nn.Linear(hidden_size, spec.rank, bias=False)
            self.g_b_proj = nn.Linear(spec.rank, self.value_width, bias=False)
        self.A_log = mx.zeros((H,))
        self.dt_bias = mx.zeros((H if spec.decay == "head" else H * spec.k_dim,))
        self.o_norm = GatedNorm(spec.norm, spec.v_dim, activation=spec.gate)
        self.o_proj = nn.Linear(self.value_width, hidden_size, bias=False)
        # A norm over N elements, times these, gives vectors of length 1.
        self._q_scale, self._k_scale = (mx.full((spec.k_dim,), spec.k_dim**power) for power in (-1.0, -0.5))
        self.fused = False

    def mix(self, x: mx.array, batch: int, cache: StateCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        spec, T = self.spec, x.shape[0]
        qkv, gate, beta, decay = self._project(x)
        tail, state = cache.read() or (None, self._empty(batch))
        qkv, tail = self["conv1d"](qkv.reshape(batch, T // batch, -1), tail)
        q, k, v = self._heads(silu(qkv.reshape(T, -1)), batch)
        beta = mx.sigmoid(self._grouped(beta.astype(mx.float32), batch, 1))
        if spec.beta_scale != 1.0:
            beta = beta * spec.beta_scale
        y, state = delta_rule(q, k, v, self._log_decay(decay, batch), beta, state)
        cache.write((tail, state), T // batch)
        y = merge_heads(y.flatten(1, 2)).reshape(T, spec.num_v_heads, spec.v_dim)
        y = self["o_norm"](y, gate.reshape(y.shape))
        return self["o_proj"](y.reshape(T, -1))

    def _project(self, x: mx.array) -> list[mx.array]:
        """x [T, hidden] -> queries, keys and values side by side; gate; correction; decay."""
        low_rank = self.spec.rank is not None
        gate, decay = ("g_a_proj", "f_a_proj") if low_rank else ("g_proj", "a_proj")
        if self.fused:
            qkv, heads = 2 * self.key_width + self.value_width, self.spec.num_v_heads
            ends = [qkv, qkv + (self.spec.rank or self.value_width)]
            parts = mx.split(self["in_proj"](x), [*ends, ends[-1] + heads], axis=-1)
        else:
            qkv = mx.concatenate([self[name](x) for name in ("q_proj", "k_proj", "v_proj")], axis=-1)
            parts = [qkv, *(self[name](x) for name in (gate, "b_proj", decay))]
        if low_rank:
            parts[1], parts[3] = self["g_b_proj"](parts[1]), self["f_b_proj"](parts[3])
        return parts

    def _heads(self, qkv: mx.array, batch: int) -> tuple[mx.array, mx.array, mx.array]:
        """qkv [T, ...] -> q and k [B, G, 1, L, N] of length 1 (q then times N^-1/2), v [B, G, R, L, P], float32."""
        spec, dims = self.spec, self.spec.k_dim
        q, k, v = mx.split(qkv.astype(mx.float32), [self.key_width, 2 * self.key_width], axis=-1)
        q = mx.fast.rms_norm(self._grouped(q, batch, dims), self._q_scale, _L2_EPSILON / dims)
        k = mx.fast.rms_norm(self._grouped(k, batch, dims), self._k_scale, _L2_EPSILON / dims)
        return q, k, self._grouped(v, batch, spec.v_dim)

    def _grouped(self, x: mx.array, batch: int, dims: int) -> mx.array:
        """[T, heads * D] -> [B, G, R, L, D]: value heads that share a key head are one group."""
        x = split_heads(x, batch, dims)
        return x.reshape(batch, self.spec.num_k_heads, -1, *x.shape[2:])

    def _log_decay(self, decay: mx.array, batch: int) -> mx.array:
        """decay [T, ...] -> the logarithm of what is kept of the memory, [B, G, R, L, 1 or N]."""
        steps = softplus(decay.astype(mx.float32) + self.dt_bias)
        rate = -mx.exp(self.A_log.astype(mx.float32)).reshape(self.spec.num_k_heads, -1, 1, 1)
        return rate * self._grouped(steps, batch, steps.shape[-1] // self.spec.num_v_heads)

    def _empty(self, batch: int) -> mx.array:
        spec = self.spec
        return mx.zeros((batch, spec.num_k_heads, spec.num_v_heads // spec.num_k_heads, spec.k_dim, spec.v_dim))

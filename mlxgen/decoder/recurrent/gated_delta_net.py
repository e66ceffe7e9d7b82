"""Gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692).

Shapes: B batch, L new tokens, T = B * L rows, H value heads, N key dim, P value dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import GatedDeltaNetSpec
from mlxgen.decoder.activation import silu
from mlxgen.decoder.attention import merge_heads, split_heads
from mlxgen.decoder.recurrent.causal_conv import CausalConv
from mlxgen.decoder.recurrent.delta_rule import delta_rule
from mlxgen.decoder.recurrent.gated_norm import GatedNorm
from mlxgen.protocols import StateCache

_L2_EPSILON = 1e-6  # the reference code's, for queries and keys


class GatedDeltaNet(nn.Module):
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
        self.fused = False

    def __call__(self, x: mx.array, batch: int, cache: StateCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] -> [T, hidden]."""
        spec, T = self.spec, x.shape[0]
        qkv, gate, beta, decay = self._project(x)
        tail, state = cache.read() or (None, mx.zeros((batch, spec.num_v_heads, spec.k_dim, spec.v_dim)))
        qkv, tail = self["conv1d"](qkv.reshape(batch, T // batch, -1), tail)
        q, k, v = self._heads(silu(qkv.reshape(T, -1)), batch)
        beta = mx.sigmoid(split_heads(beta.astype(mx.float32), batch, 1)) * spec.beta_scale
        y, state = delta_rule(q, k, v, self._log_decay(decay, batch), beta, state)
        cache.write((tail, state), T // batch)
        y = merge_heads(y).reshape(T, spec.num_v_heads, spec.v_dim)
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
        """qkv [T, ...] -> q and k [B, H, L, N] of length 1 (q then times N^-1/2), v [B, H, L, P], float32."""
        spec, dims = self.spec, self.spec.k_dim
        q, k, v = mx.split(qkv.astype(mx.float32), [self.key_width, 2 * self.key_width], axis=-1)
        q, k = (mx.fast.rms_norm(split_heads(x, batch, dims), None, _L2_EPSILON / dims) for x in (q, k))
        q, k = q * (1 / dims), k * dims**-0.5
        repeats = spec.num_v_heads // spec.num_k_heads
        if repeats > 1:
            q, k = mx.repeat(q, repeats, axis=1), mx.repeat(k, repeats, axis=1)
        return q, k, split_heads(v, batch, spec.v_dim)

    def _log_decay(self, decay: mx.array, batch: int) -> mx.array:
        """decay [T, ...] -> the logarithm of what is kept of the memory, [B, H, L, 1 or N]."""
        steps = nn.softplus(decay.astype(mx.float32) + self.dt_bias)
        rate = mx.exp(self.A_log.astype(mx.float32))[:, None, None]
        return -rate * split_heads(steps, batch, steps.shape[-1] // self.spec.num_v_heads)

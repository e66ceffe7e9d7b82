"""A decoder-only transformer (arXiv:1706.03762 without the encoder): tokens in, logits out.

Shapes: B batch, L tokens given, hidden the width of the residual stream, V vocabulary.
The family's peculiarities are all in the spec; see conf/architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import DecoderSpec, LayerSpec, MoeSpec
from mlxgen.decoder.attention import Attention
from mlxgen.decoder.mlp import MLP
from mlxgen.decoder.moe import MoE
from mlxgen.decoder.norm import build_norm
from mlxgen.decoder.uncached import Uncached
from mlxgen.protocols import LayerCache


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward block, each added to the residual stream."""

    def __init__(self, spec: LayerSpec, hidden_size: int):
        super().__init__()
        self.self_attn = Attention(spec.attention, hidden_size)
        self.mlp = MoE(spec.ffn, hidden_size) if isinstance(spec.ffn, MoeSpec) else MLP(spec.ffn, hidden_size)
        self.attn_in_norm = build_norm(spec.attn_in_norm, hidden_size)
        self.mlp_in_norm = build_norm(spec.mlp_in_norm, hidden_size)
        if spec.attn_out_norm is not None:
            self.attn_out_norm = build_norm(spec.attn_out_norm, hidden_size)
        if spec.mlp_out_norm is not None:
            self.mlp_out_norm = build_norm(spec.mlp_out_norm, hidden_size)
        self.parallel = spec.parallel
        self.residual_scale = spec.residual_scale
        self.window = spec.attention.window

    def __call__(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [B * L, hidden] -> [B * L, hidden]."""
        scale = self.residual_scale
        attn = self["self_attn"](self["attn_in_norm"](x), batch, cache, mask, length)
        if "attn_out_norm" in self:
            attn = self["attn_out_norm"](attn)
        h = x if self.parallel else x + (attn if scale == 1.0 else attn * scale)
        mlp = self["mlp"](self["mlp_in_norm"](h))
        if "mlp_out_norm" in self:
            mlp = self["mlp_out_norm"](mlp)
        if self.parallel:
            mlp = attn + mlp
        return h + (mlp if scale == 1.0 else mlp * scale)


class Decoder(nn.Module):
    """Embed, pass through the layers, normalize, project to the vocabulary."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if spec.learned_positions is not None:
            self.embed_positions = nn.Embedding(spec.learned_positions, spec.hidden_size)
        self.embed_norm = build_norm(spec.embed_norm, spec.hidden_size)
        self.layers = [DecoderLayer(layer, spec.hidden_size) for layer in spec.layers]
        self.final_norm = build_norm(spec.final_norm, spec.hidden_size)
        if not spec.tie_head:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=spec.head_bias)

    def __call__(
        self, tokens: mx.array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> mx.array:
        """tokens [B, L] -> logits [B, L, V]. With caches, `tokens` continue what the caches have seen."""
        return self.logits(self.hidden(tokens, caches, length=length))

    def hidden(
        self, tokens: mx.array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> mx.array:
        """tokens [B, L] -> hidden states after the last norm [B, L, hidden].

        `length`: how long the sequence is that these tokens belong to, where more of it is still to come; a few
        ropes rotate all positions of a long sequence differently.
        """
        if caches is None:
            caches = [Uncached(layer.window) for layer in self.layers]
        B, L = tokens.shape
        offset = caches[0].offset
        x = self._embed(tokens, offset).reshape(B * L, -1)  # to most of a layer, every token is just a row
        if length is None:
            length = offset + L if isinstance(offset, int) else L
        masks: dict[int | None, Any] = {}  # layers with the same window share one mask
        for layer, cache in zip(self.layers, caches, strict=True):
            if layer.window not in masks:
                masks[layer.window] = cache.make_mask(L)
            x = layer(x, B, cache, masks[layer.window], length)
        return self.final_norm(x).reshape(B, L, -1)

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden [B, L, hidden] -> a score for every candidate of the vocabulary [B, L, V]."""
        spec = self.spec
        out = self.embed_tokens.as_linear(hidden) if spec.tie_head else self.lm_head(hidden)
        if spec.logit_scale != 1.0:
            out = out * spec.logit_scale
        if spec.logit_softcap is not None:
            out = mx.tanh(out / spec.logit_softcap) * spec.logit_softcap
        return out

    @property
    def recompute_at(self) -> int | None:
        """Sequences that grow beyond this length must be computed anew: their rope rotates every position differently."""
        points = [s.attention.rope.changes_at for s in self.spec.layers if s.attention.rope]
        return min((p for p in points if p is not None), default=None)

    def _embed(self, tokens: mx.array, offset: int | mx.array) -> mx.array:
        x = self.embed_tokens(tokens)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        if self.spec.learned_positions is not None:
            positions = mx.arange(tokens.shape[1]) + (offset if isinstance(offset, int) else offset[:, None])
            x = x + self.embed_positions(positions)
        return self.embed_norm(x)

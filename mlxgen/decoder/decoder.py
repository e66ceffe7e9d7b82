"""A decoder-only transformer (arXiv:1706.03762 without the encoder): tokens in, logits out.

Shapes: B batch, L tokens given, hidden the width of the residual stream, V vocabulary.
The family's peculiarities are all in the spec; see conf/architecture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.mixers import attention_of
from mlxgen.blueprint.spec import DecoderSpec
from mlxgen.decoder.gemma3n import AltUpLayer, Streams
from mlxgen.decoder.layer import DecoderLayer
from mlxgen.decoder.layer_inputs import LayerInputs
from mlxgen.decoder.norm import build_norm
from mlxgen.decoder.segments import packed
from mlxgen.decoder.shared_keys import SharedKeys
from mlxgen.decoder.uncached import Uncached
from mlxgen.protocols import LayerCache


class Decoder(nn.Module):
    """Embed, pass through the layers, normalize, project to the vocabulary."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if spec.positions is not None and spec.positions.kind == "learned":
            self.embed_positions = nn.Embedding(spec.positions.rows, spec.hidden_size)
        self.embed_norm = build_norm(spec.embed_norm, spec.hidden_size)
        if spec.layer_inputs is not None:
            self.layer_inputs = LayerInputs(spec.layer_inputs, len(spec.layers), spec.hidden_size)
        self.layers = [(AltUpLayer if s.altup else DecoderLayer)(s, spec.hidden_size) for s in spec.layers]
        if spec.layers[0].altup is not None:
            self.streams = Streams(spec.layers[0].altup, spec.hidden_size)
        self.share_keys = SharedKeys(spec.layers)
        self.final_norm = build_norm(spec.final_norm, spec.hidden_size)
        if not spec.tie_head:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=spec.head_bias)
        elif spec.head_bias:
            self.lm_head = TiedHead(spec.vocab_size)

    def __call__(
        self, tokens: mx.array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> mx.array:
        """tokens [B, L] -> logits [B, L, V]. With caches, `tokens` continue what the caches have seen."""
        return self.logits(self.hidden(tokens, caches, length=length))

    def hidden(
        self,
        tokens: mx.array,
        caches: Sequence[LayerCache] | None = None,
        *,
        length: int | None = None,
        segments: mx.array | None = None,
    ) -> mx.array:
        """tokens [B, L] -> hidden states after the last norm [B, L, hidden].

        `length`: how long the sequence is that these tokens belong to, where more of it is still to come; a few
        ropes rotate all positions of a long sequence differently.
        `segments` [B, L]: which of several texts of its row each token belongs to; they do not see each other.
        """
        if segments is not None:
            caches, length = packed(self.layers, segments)
            return self.hidden(tokens.reshape(-1, 1), caches, length=length).reshape(*tokens.shape, -1)
        if caches is None:
            caches = [Uncached(layer.window, layer.chunk) for layer in self.layers]
        spec, (B, L) = self.spec, tokens.shape
        offset = caches[0].offset
        x = self._embed(tokens, offset).reshape(B * L, -1)  # to most of a layer, every token is just a row
        if length is None:
            length = offset + L if isinstance(offset, int) else L
        inputs = self.layer_inputs(tokens, x) if spec.layer_inputs is not None else [None] * len(self.layers)
        if "streams" in self:
            x = self.streams.split(x)
        masks: dict[Any, Any] = {None: None}  # layers that see alike share one mask
        caches = self.share_keys(caches)
        for layer, cache, layer_input in zip(self.layers, caches, inputs, strict=True):
            kind = layer.mask_kind
            if kind not in masks:
                masks[kind] = cache.make_mask(L)
            x = layer(x, B, cache, masks[kind], length, layer_input)
        if "streams" in self:
            x = self.streams.merge(x)
        return self.final_norm(x).reshape(B, L, -1)

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden [B, L, hidden] -> a score for every candidate of the vocabulary [B, L, V]."""
        spec = self.spec
        out = self.embed_tokens.as_linear(hidden) if spec.tie_head else self.lm_head(hidden)
        if spec.tie_head and spec.head_bias:
            out = self.lm_head(out)
        if spec.logit_scale != 1.0:
            out = out * spec.logit_scale
        if spec.logit_softcap is not None:
            out = mx.tanh(out / spec.logit_softcap) * spec.logit_softcap
        return out

    @property
    def recompute_at(self) -> int | None:
        """Sequences that outgrow this length are computed anew: their rope rotates every position differently."""
        attentions = [attention_of(layer.mixer) for layer in self.spec.layers]
        points = [a.rope.changes_at for a in attentions if a is not None and a.rope is not None]
        return min((p for p in points if p is not None), default=None)

    def _embed(self, tokens: mx.array, offset: int | mx.array) -> mx.array:
        spec = self.spec
        x = self.embed_tokens(tokens)
        if spec.embed_scale != 1.0:
            x = x * spec.embed_scale
        if spec.positions is not None:
            start = offset if isinstance(offset, int) else offset[:, None]
            rows = mx.arange(tokens.shape[1]) + start + spec.positions.shift
            learned = spec.positions.kind == "learned"
            x = x + (self.embed_positions(rows) if learned else sines(rows, spec.hidden_size).astype(x.dtype))
        return self.embed_norm(x)


class TiedHead(nn.Module):
    """What a head has of its own whose matrix is the embedding's: a bias."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.bias = mx.zeros((vocab_size,))

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.bias


def sines(positions: mx.array, dims: int) -> mx.array:
    """Position vectors [..., dims] of sines, then cosines, of falling frequency (arXiv:1706.03762 section 3.5)."""
    half = dims // 2
    frequencies = mx.exp(mx.arange(half) * (-math.log(10000) / (half - 1)))
    angles = positions[..., None] * frequencies
    return mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1)

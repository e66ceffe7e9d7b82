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

from mlxgen.blueprint.mixers import attention_of, recurrent_of
from mlxgen.blueprint.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec, MoeSpec
from mlxgen.blueprint.special import (
    BitNetAttentionSpec,
    BitNetMlpSpec,
    DifferentialAttentionSpec,
    Gemma4AttentionSpec,
    Gemma4MoeSpec,
    IndexedAttentionSpec,
)
from mlxgen.decoder.attention import Attention
from mlxgen.decoder.bitnet import BitNetAttention, BitNetMLP
from mlxgen.decoder.differential_attention import DifferentialAttention
from mlxgen.decoder.gemma4 import Gemma4Attention, Gemma4MoE
from mlxgen.decoder.indexed_attention import IndexedAttention
from mlxgen.decoder.latent_attention import LatentAttention
from mlxgen.decoder.layer_inputs import LayerInput, LayerInputs
from mlxgen.decoder.mlp import MLP
from mlxgen.decoder.moe import MoE
from mlxgen.decoder.norm import build_norm
from mlxgen.decoder.recurrent import RECURRENT_MIXERS
from mlxgen.decoder.shared_keys import share_keys
from mlxgen.decoder.uncached import Uncached
from mlxgen.protocols import LayerCache

MIXERS: dict[type, type[nn.Module]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    BitNetAttentionSpec: BitNetAttention,
    DifferentialAttentionSpec: DifferentialAttention,
    Gemma4AttentionSpec: Gemma4Attention,
    IndexedAttentionSpec: IndexedAttention,
    **RECURRENT_MIXERS,
}
FFNS: dict[type, type[nn.Module]] = {MlpSpec: MLP, MoeSpec: MoE, BitNetMlpSpec: BitNetMLP, Gemma4MoeSpec: Gemma4MoE}


class DecoderLayer(nn.Module):
    """A mixer, then a feed-forward block, each added to the residual stream."""

    def __init__(self, spec: LayerSpec, hidden_size: int):
        super().__init__()
        attention, recurrent = attention_of(spec.mixer), recurrent_of(spec.mixer)
        if attention is not None:
            self.self_attn = MIXERS[type(attention)](attention, hidden_size)
        if recurrent is not None:
            self.mixer = MIXERS[type(recurrent)](recurrent, hidden_size)
        if spec.mixer is not None:
            self.attn_in_norm = build_norm(spec.attn_in_norm, hidden_size)
        if spec.ffn is not None:
            self.mlp = FFNS[type(spec.ffn)](spec.ffn, hidden_size)
            if not spec.shared_in_norm:
                self.mlp_in_norm = build_norm(spec.mlp_in_norm, hidden_size)
        if spec.attn_out_norm is not None:
            self.attn_out_norm = build_norm(spec.attn_out_norm, hidden_size)
        if spec.mlp_out_norm is not None:
            self.mlp_out_norm = build_norm(spec.mlp_out_norm, hidden_size)
        if spec.layer_input is not None:
            self.layer_input = LayerInput(spec.layer_input, hidden_size)
        if spec.scaled:
            self.layer_scale = mx.ones((1,))
        self.spec = spec
        self.mask_kind = (attention.window, attention.chunk) if attention is not None else None

    def __call__(
        self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int, layer_input: mx.array | None = None
    ) -> mx.array:
        """x [T, hidden] -> [T, hidden]; `layer_input` is what this layer alone reads besides."""
        if self.spec.parallel:
            return self._parallel(x, batch, cache, mask, length)
        if self.spec.mixer is None:
            cache.write((), x.shape[0] // batch)  # nothing to remember, but the tokens are counted
        else:
            h = self["attn_in_norm"](x)
            x = self._add(x, h, self._mixed(h, batch, cache, mask, length), "attn_out_norm")
        if "mlp" in self:
            h = self["mlp_in_norm"](x)
            x = self._add(x, h, self["mlp"](h), "mlp_out_norm")
        if layer_input is not None:
            x = x + self["layer_input"](x, layer_input)
        return x * self["layer_scale"] if self.spec.scaled else x

    def _mixed(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] through the layer's mixer, or the sum of its two."""
        names = [name for name in ("self_attn", "mixer") if name in self]
        outputs = [self[name](x, batch, cache, mask, length) for name in names]
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def _add(self, x: mx.array, h: mx.array, y: mx.array, out_norm: str) -> mx.array:
        """The stream x plus y, what a block made of the normalized stream h."""
        scale = self.spec.residual_scale
        if out_norm in self and not self.spec.norm_stream:
            y = self[out_norm](y)
        x = (h if self.spec.norm_stream else x) + (y if scale == 1.0 else y * scale)
        return self[out_norm](x) if out_norm in self and self.spec.norm_stream else x

    def _parallel(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """Mixer and feed-forward block both read the layer's input."""
        normed = self["attn_in_norm"](x)
        attn = self._mixed(normed, batch, cache, mask, length)
        mlp = self["mlp"](normed if self.spec.shared_in_norm else self["mlp_in_norm"](x))
        return x + (attn + mlp) * self.spec.residual_scale


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
        self.layers = [DecoderLayer(layer, spec.hidden_size) for layer in spec.layers]
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
        self, tokens: mx.array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> mx.array:
        """tokens [B, L] -> hidden states after the last norm [B, L, hidden].

        `length`: how long the sequence is that these tokens belong to, where more of it is still to come; a few
        ropes rotate all positions of a long sequence differently.
        """
        if caches is None:
            caches = [Uncached(*(layer.mask_kind or ())) for layer in self.layers]
        spec, (B, L) = self.spec, tokens.shape
        offset = caches[0].offset
        x = self._embed(tokens, offset).reshape(B * L, -1)  # to most of a layer, every token is just a row
        if length is None:
            length = offset + L if isinstance(offset, int) else L
        inputs = self.layer_inputs(tokens, x) if spec.layer_inputs is not None else [None] * len(self.layers)
        masks: dict[Any, Any] = {None: None}  # layers that see alike share one mask
        caches = share_keys(spec.layers, caches)
        for layer, cache, layer_input in zip(self.layers, caches, inputs, strict=True):
            if layer.mask_kind not in masks:
                masks[layer.mask_kind] = cache.make_mask(L)
            x = layer(x, B, cache, masks[layer.mask_kind], length, layer_input)
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
        """Sequences that grow beyond this length must be computed anew: their rope rotates every position differently."""
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

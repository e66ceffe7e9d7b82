"""One layer of a decoder: a mixer, a feed-forward block, and the norms around them.

Shapes: B batch, L tokens, T = B * L rows, hidden the width of the residual stream.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.mixers import attention_of, recurrent_of
from mlxgen.blueprint.spec import LayerSpec
from mlxgen.decoder.blocks import build_block
from mlxgen.decoder.layer_inputs import LayerInput
from mlxgen.decoder.norm import build_norm
from mlxgen.protocols import LayerCache


class DecoderLayer(nn.Module):
    """A mixer, then a feed-forward block, each added to the residual stream."""

    def __init__(self, spec: LayerSpec, hidden_size: int):
        super().__init__()
        attention, recurrent = attention_of(spec.mixer), recurrent_of(spec.mixer)
        if attention is not None:
            self.self_attn = build_block(attention, hidden_size)
        if recurrent is not None:
            self.mixer = build_block(recurrent, hidden_size)
        if spec.mixer is not None:
            self.attn_in_norm = build_norm(spec.attn_in_norm, hidden_size)
        if spec.ffn is not None:
            self.mlp = build_block(spec.ffn, hidden_size)
            if not spec.shared_in_norm:
                self.mlp_in_norm = build_norm(spec.mlp_in_norm, hidden_size)
        if spec.attn_out_norm is not None:
            self.attn_out_norm = build_norm(spec.attn_out_norm, hidden_size)
        if spec.mlp_out_norm is not None:
            self.mlp_out_norm = build_norm(spec.mlp_out_norm, hidden_size)
        if spec.layer_input is not None:
            self.layer_input = LayerInput(spec.layer_input, hidden_size)
        if spec.stream_gains:
            self.attn_gain, self.mlp_gain = mx.ones((hidden_size,)), mx.ones((hidden_size,))
        if spec.scaled:
            self.layer_scale = mx.ones((1,))
        self.spec = spec
        self.mixers = tuple(name for name in ("self_attn", "mixer") if name in self)
        self.window, self.chunk = (attention.window, attention.chunk) if attention is not None else (None, None)
        # Layers with the same text here share a mask. A tuple would be slower to get: nn.Module has it in its dict.
        self.mask_kind = f"{self.window} {self.chunk}" if attention is not None else None
        self.plain_mixer = self.mixers[0] if self._is_plain() else None

    def __call__(
        self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int, layer_input: mx.array | None = None
    ) -> mx.array:
        """x [T, hidden] -> [T, hidden]; `layer_input` is what this layer alone reads besides."""
        if self.plain_mixer is not None:
            x = x + self[self.plain_mixer](self["attn_in_norm"](x), batch, cache, mask, length)
            return x + self["mlp"](self["mlp_in_norm"](x))
        if self.spec.parallel:
            return self._parallel(x, batch, cache, mask, length)
        if self.spec.mixer is None:
            cache.write((), x.shape[0] // batch)  # nothing to remember, but the tokens are counted
        else:
            h = self["attn_in_norm"](x)
            x = self._add(x, h, self._mixed(h, batch, cache, mask, length), "attn")
        if "mlp" in self:
            h = self["mlp_in_norm"](x)
            x = self._add(x, h, self["mlp"](h), "mlp")
        if layer_input is not None:
            x = x + self["layer_input"](x, layer_input)
        return x * self["layer_scale"] if self.spec.scaled else x

    def _is_plain(self) -> bool:
        """Whether the layer is one mixer and one feed-forward block, each with a norm before it and no more."""
        spec = self.spec
        unusual = spec.parallel or spec.norm_stream or spec.stream_gains or spec.scaled or spec.layer_input is not None
        outside = spec.attn_out_norm or spec.mlp_out_norm or spec.residual_scale != 1.0
        return not unusual and not outside and len(self.mixers) == 1 and "mlp" in self

    def _mixed(self, x: mx.array, batch: int, cache: LayerCache, mask: Any, length: int) -> mx.array:
        """x [T, hidden] through the layer's mixer, or the sum of its two."""
        outputs = [self[name](x, batch, cache, mask, length) for name in self.mixers]
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def _add(self, x: mx.array, h: mx.array, y: mx.array, block: str) -> mx.array:
        """The stream x plus y, what a block made of the normalized stream h."""
        scale, out_norm = self.spec.residual_scale, f"{block}_out_norm"
        if self.spec.stream_gains:
            x = x * self[f"{block}_gain"]
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

"""Tiny models for tests: random decoders of every kind, and one that says what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
from mlx.utils import tree_map

from mlxgen.blueprint import DecoderSpec, find_blueprint
from mlxgen.config import conf_dir
from mlxgen.decoder import Decoder
from mlxgen.protocols import LayerCache

TINY: Mapping[str, Any] = {
    "vocab_size": 298,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def tiny_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of 2 layers and 64 hidden units; `changes` are keys of the family's config.json."""
    return {"model_type": model_type, **TINY, **changes}


def tiny_spec(model_type: str = "llama", **changes: Any) -> DecoderSpec:
    config = tiny_config(model_type, **changes)
    return find_blueprint(config, [conf_dir() / "architecture"]).spec(config)


def tiny_decoder(model_type: str = "llama", *, seed: int = 0, **changes: Any) -> Decoder:
    """A decoder with random weights, the same for the same seed."""
    decoder = Decoder(tiny_spec(model_type, **changes))
    keys = iter(mx.random.split(mx.random.key(seed), 4096))

    def fill(p: mx.array) -> mx.array:
        scale = 0.3 if p.ndim == 1 else 1.7 / p.shape[-1] ** 0.5
        return (1.0 if p.ndim == 1 else 0.0) + scale * mx.random.uniform(-1, 1, p.shape, key=next(keys))

    decoder.update(tree_map(fill, decoder.parameters()))
    mx.eval(decoder.parameters())
    return decoder.eval()


class ScriptedModel:
    """A model whose most likely continuation of a prompt of `prompt_length` tokens is `script`, then token `after`.

    It needs a cache to know where it is, and counts the rows that the output head saw in `head_rows`.
    """

    recompute_at = None

    def __init__(self, script: Sequence[int], prompt_length: int, *, vocab_size: int = 298, after: int = 0):
        self.script, self.prompt_length = list(script), prompt_length
        self.vocab_size, self.after = vocab_size, after
        self.head_rows = 0

    def __call__(
        self, tokens: mx.array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> mx.array:
        return self.logits(self.hidden(tokens, caches))

    def hidden(
        self, tokens: mx.array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> mx.array:
        """Here the hidden state is just the id of the token that comes next."""
        assert caches is not None
        B, L = tokens.shape
        start = caches[0].offset
        for cache in caches:
            kv = mx.zeros((B, 1, L, 32))
            cache.attend(kv, kv, kv, cache.make_mask(L), lambda q, k, v, mask: q)
        places = [start + i + 1 - self.prompt_length for i in range(L)]
        ids = [self.script[p] if 0 <= p < len(self.script) else self.after for p in places]
        return mx.broadcast_to(mx.array(ids)[None, :, None], (B, L, 1))

    def logits(self, hidden: mx.array) -> mx.array:
        self.head_rows += hidden.shape[0] * hidden.shape[1]
        return mx.where(mx.arange(self.vocab_size) == hidden, 10.0, 0.0)

"""Decoders with adapters that do something, for tests."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxgen.blueprint import find_blueprint
from mlxgen.config import AdapterConfig, conf_dir
from mlxgen.passes.attach import attach
from mlxgen.testing.models import tiny_config, tiny_decoder

TOKENS = mx.array([[5, 17, 3, 41, 8, 63]])
COMMON = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
    "phi3": {"original_max_position_embeddings": 512, "pad_token_id": 0, "tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}  # fmt: skip
MODES = {"affine": (32, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # mode -> group size, bits


def settings(family, **changes):
    return COMMON | FAMILIES[family] | changes


def rules(family, **changes):
    """The blueprint's `weights`."""
    config = tiny_config(family, **settings(family, **changes))
    return find_blueprint(config, [conf_dir() / "architecture"]).weights(config)


def decoder_of(family, mode=None, **changes):
    decoder = tiny_decoder(family, **settings(family, **changes))
    if mode is not None:
        group_size, bits = MODES[mode]
        nn.quantize(decoder, group_size=group_size, bits=bits, mode=mode)
    return decoder


def stir(decoder, size=0.2):
    """Change what is trained, as training would."""
    keys = iter(mx.random.split(mx.random.key(7), 1000))
    change = tree_map(lambda p: p + size * mx.random.normal(p.shape, key=next(keys)), decoder.trainable_parameters())
    decoder.update(change)


def trained(family, mode=None, **config):
    """(a decoder with an adapter that changes its answers, the adapter's configuration)."""
    decoder = decoder_of(family, mode)
    config = AdapterConfig(**{"kind": "lora", "rank": 2, **config})
    attach(decoder, config, key=mx.random.key(0))
    stir(decoder)
    return decoder, config


def distance(a, b):
    return mx.abs(a - b).max().item()

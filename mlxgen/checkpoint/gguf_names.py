"""What GGUF calls things, and what they are called on the hub: architectures, tensors, config keys.

Facts from the constants and tensor mappings of the gguf package and from llama.cpp's conversion scripts.
Stacked experts get the names that MLX checkpoints have for them (`switch_mlp`); on the hub, each expert is a
tensor of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxgen.errors import WeightsError

# Tensors outside of the layers and in a layer; a family's own names come first. None: not a weight.
TOP: dict[str, str | None] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": None,
    "rope_factors_long": None,
    "rope_factors_short": None,
}
LAYER: dict[str, str | None] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_rot_embd": None,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

# Metadata keys after "<architecture>." and their names in config.json.
KEYS: dict[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one GGUF architecture becomes a hub model.

    names, keys: what differs from LAYER and KEYS. constants: config keys that GGUF does not store.
    rope: the same for the keys of `rope_scaling`, where there is one.
    interleaved: q and k rows are stored in pairs for interleaved rotary embeddings, on the hub in halves.
    norm_offset: norm weights are stored as 1 + w, the hub has w.
    full_attention_every: with a window, each layer of this number attends to everything; 0: no such pattern.
    bias_key: the config key that says q, k and v have biases.
    wide_scale_layers: layers of the one size whose `query_pre_attn_scalar` is hidden_size / heads, where
        all others have head_dim. 0: the family has no such key.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: bool = False
    full_attention_every: int = 0
    bias_key: str | None = "attention_bias"
    wide_scale_layers: int = 0


_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_SILU = {"hidden_act": "silu"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _experts(prefix: str) -> dict[str, str]:
    return {f"ffn_{part}_exps": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}


_LLAMA = Family(model_type="llama", interleaved=True, constants=_SILU)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "internlm2": _LLAMA,  # GGUF holds its fused matrices apart: what is left is a Llama
    "mistral3": Family(
        model_type="ministral3", interleaved=True, constants=_SILU, bias_key=None,
        rope={"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "smollm3": Family(
        model_type="smollm3", interleaved=True, constants={**_SILU, "no_rope_layer_interval": 4},
    ),
    "arcee": Family(model_type="arcee", interleaved=True, constants={"hidden_act": "relu2"}),
    "olmo": Family(model_type="olmo", interleaved=True, constants=_SILU),
    "granite": Family(model_type="granite", interleaved=True, constants=_SILU, keys=_GRANITE),
    "granitemoe": Family(
        model_type="granitemoe", interleaved=True, constants=_SILU, keys={**_GRANITE, **_LOCAL_EXPERTS},
        names={"ffn_gate_inp": "block_sparse_moe.router.layer", **_experts("block_sparse_moe.switch_mlp")},
    ),
    "qwen2": Family(model_type="qwen2", constants=_SILU, bias_key=None),
    "qwen2moe": Family(
        model_type="qwen2_moe", constants={**_SILU, **_SPARSE, "norm_topk_prob": False}, bias_key="qkv_bias",
    ),
    "qwen3": Family(model_type="qwen3", constants=_SILU),
    "qwen3moe": Family(model_type="qwen3_moe", constants={**_SILU, **_SPARSE, "norm_topk_prob": True}),
    "gemma": Family(model_type="gemma", constants=_GELU, norm_offset=True),
    "gemma2": Family(
        model_type="gemma2", constants=_GELU, norm_offset=True, full_attention_every=2, wide_scale_layers=46,
        names={**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
    ),
    "gemma3": Family(
        model_type="gemma3_text", constants={**_GELU, "rope_local_base_freq": 10000.0}, norm_offset=True,
        full_attention_every=6, wide_scale_layers=62, keys={"rope.freq_base_swa": "rope_local_base_freq"},
        names={**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
    ),
    "phi3": Family(
        model_type="phi3", constants=_SILU, bias_key=None, names={"ffn_up": "mlp.gate_up_proj"},
    ),
    "olmo2": Family(model_type="olmo2", constants=_SILU, names=_POST_NORMS, full_attention_every=4),
    "olmoe": Family(
        model_type="olmoe", constants={**_SILU, "norm_topk_prob": False},
        keys={"expert_feed_forward_length": "intermediate_size"},
    ),
    "exaone4": Family(
        model_type="exaone4", constants=_SILU, bias_key=None, names=_POST_NORMS, full_attention_every=4,
    ),
    "starcoder2": Family(
        # The window is the same in all three sizes.
        model_type="starcoder2", bias_key="use_bias", keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        constants={"hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "stablelm": Family(
        model_type="stablelm", constants=_SILU, bias_key="use_qkv_bias",
        names={"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
    ),
    "nemotron": Family(
        model_type="nemotron", norm_offset=True, constants={"hidden_act": "relu2"},
        keys={"attention.layer_norm_epsilon": "norm_eps"},
    ),
    "command-r": Family(model_type="cohere", constants=_SILU),
    "cohere2": Family(model_type="cohere2", constants=_SILU, full_attention_every=4),
    "seed_oss": Family(
        model_type="seed_oss", constants={**_SILU, "attention_out_bias": False},
        names={"post_attention_norm": "post_attention_layernorm"},
    ),
    "ernie4_5": Family(model_type="ernie4_5", constants=_SILU, bias_key="use_bias"),
    "hunyuan-dense": Family(
        model_type="hunyuan_v1_dense", constants={**_SILU, "use_qk_norm": True},
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "glm4": Family(
        model_type="glm4", constants=_SILU,
        names={
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gpt-oss": Family(
        model_type="gpt_oss", keys=_LOCAL_EXPERTS, full_attention_every=2, rope={"truncate": False},
        constants={**_SILU, "swiglu_limit": 7.0},
        names={
            "attn_sinks.weight": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router", **_experts("mlp.experts"),
        },
    ),
}  # fmt: skip

# The llama architecture with experts.
MIXTRAL = Family(
    model_type="mixtral", interleaved=True, constants=_SILU, bias_key=None, keys=_LOCAL_EXPERTS,
    names={"ffn_gate_inp": "block_sparse_moe.gate", **_experts("block_sparse_moe.switch_mlp")},
)  # fmt: skip
_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OLD_EXPERTS = {
    "ffn_gate": "w1",
    "ffn_down": "w2",
    "ffn_up": "w3",
}  # one tensor per expert, before stacking came


def hub_name(name: str, family: Family) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for what is no weight.

    Raises WeightsError for a tensor that the family does not have.
    """
    stem, _, suffix = name.rpartition(".")
    prefix, table = "", TOP
    if match := _IN_LAYER.fullmatch(stem):
        layer, stem = match.groups()
        prefix, table = f"model.layers.{layer}.", {**LAYER, **family.names}
        if f"{stem}.{suffix}" in table:
            return f"{prefix}{table[f'{stem}.{suffix}']}"
        kind, _, expert = stem.partition(".")
        if family is MIXTRAL and expert.isdigit() and kind in _OLD_EXPERTS:
            return f"{prefix}block_sparse_moe.experts.{expert}.{_OLD_EXPERTS[kind]}.{suffix}"
    if stem not in table or suffix not in ("weight", "bias"):
        raise WeightsError(
            f"`{name}` is a tensor that mlxgen does not know in GGUF files of {family.model_type} models."
        )
    mapped = table[stem]
    return None if mapped is None else f"{prefix}{mapped}.{suffix}"

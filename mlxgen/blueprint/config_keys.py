"""Keys of a config.json that a blueprint does not read: which may be passed over, and which must not.

A wrong result that looks right is the worst outcome, so a key that is known to change the computation, has a value
that is not neutral, and is not read by the blueprint, stops the load. The known keys are those that any blueprint
reads, and those of the config classes of transformers' causal language models (config_keys.txt).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_KEYS = re.compile(r"\$\{(?:hf|given):([^,{}]+)")
_ROPE = re.compile(r"\$\{rope:[^,{}]*,([A-Za-z_]\w*)")
_NEUTRAL = (None, False, 0, 1, "", [], {}, "none", "default")

# Keys that never change what a decoder computes: about training, generation, the file itself, or other tasks.
_IGNORED = re.compile(
    r"""_.*|architectures|auto_map|model_type|dtype|torch_dtype|transformers_version|.*_version|language|license|tags
    |quantization(_config)?|.*dropout.*|.*pdrop|layerdrop|.*_token_(id|index)|.*initializer.*|.*init_std|use_cache|output_.*|return_.*
    |.*loss.*|.*aux.*_coef.*|summary_.*|classifier.*|problem_type|id2label|label2id|finetuning_task|task_specific_params
    |(max|min)_length|do_sample|temperature|top_[kp]|num_beams|repetition_penalty|is_(de|en)coder.*|add_cross_attention
    |max_position_embeddings|n_positions|n_ctx|max_seq_len(gth)?|seq_length|model_max_length|context_length|block_size
    |time_step_(min|max|floor|init_scheme|scale|rank)|.*chunk_size.*|use_(mamba_kernels|mambapy|associative_scan|mem_eff_path)
    |num_nextn_predict_layers|.*mtp.*|nextn.*|pretraining_tp|ep_size|gradient_checkpointing|rescale_prenorm_residual|residual_in_fp32
    |attention_softmax_in_fp32|scale_attention_softmax_in_fp32|reorder_and_upcast_attn|slow_but_exact|router_dtype|moe_router_dtype
    |.*jitter.*|enable_moe_fp32_combine|num_logits_to_keep|unpadded_vocab_size|type_vocab_size|qk_head_dim|per_layer_config
    |vision_.*|image_.*|video_.*|audio_.*|mm_.*|boi_.*|eoi_.*|tokenizer_class|pad_.*|vocab_size_per_.*|.*_factor_schedule|use_flash_attn.*
    |attn_implementation|fused_.*|use_fused.*|seed|init_method.*|layer_norm_elementwise_affine|ssm_cache_dtype|mamba_ssm_cache_dtype""",
    re.VERBOSE,
)

# Sizes of blocks that a family may do without in all layers; then they are not read, and mean nothing.
_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")

# Names for the same number in different families; one of them, read, covers the others if they say the same.
_SAME = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    ("intermediate_size", "n_inner", "ffn_dim"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"),
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    ("hidden_act", "hidden_activation", "activation_function"),
    ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor"),
)


def mentioned(text: str) -> set[str]:
    """The config.json keys that an expression names, also in branches that are not taken."""
    keys = {key.split(".")[0] for group in _KEYS.findall(text) for key in group.split("|")}
    rope = {"rope_parameters", "rope_scaling", "rope_theta"} if "${rope:" in text else set()
    return keys | rope | set(_ROPE.findall(text))


def unread(config: Mapping[str, Any], read: Iterable[str], folders: Sequence[Path]) -> tuple[list[str], list[str]]:
    """(keys that must stop the load, keys that nobody knows) of this config.json."""
    covered = set(read)
    stops, unknown = [], []
    for key, value in config.items():
        if (
            key in covered
            or key in _SIZES
            or _IGNORED.fullmatch(key)
            or any(value is n or value == n for n in _NEUTRAL)
        ):
            continue
        if _covered_by_alias(key, value, config, covered):
            continue
        (stops if key in known_keys(tuple(folders)) else unknown).append(key)
    return stops, unknown


def _covered_by_alias(key: str, value: Any, config: Mapping[str, Any], read: set[str]) -> bool:
    for group in _SAME:
        if key in group:
            others = [k for k in group if k in read and k in config]
            return any(config[k] == value for k in others) or (
                key.startswith(("rope", "rotary", "partial")) and bool(others)
            )
    return False


@cache
def known_keys(folders: tuple[Path, ...]) -> frozenset[str]:
    """Keys that change some family's computation."""
    keys = set((Path(__file__).parent / "config_keys.txt").read_text(encoding="utf-8").split())
    for folder in folders:
        for path in folder.glob("*.yaml"):
            keys |= mentioned(path.read_text(encoding="utf-8"))
    return frozenset(keys)

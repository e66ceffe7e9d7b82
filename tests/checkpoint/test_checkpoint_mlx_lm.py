"""What mlx-lm converts and quantizes loads here, and computes the same as in mlx-lm."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

import mlxgen
from mlxgen.config import ModelConfig
from mlxgen.loading import load
from mlxgen.testing.checkpoints import write_tiny
from mlxgen.testing.models import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, which mlx-lm imports

TOKENS = mx.array([[5, 17, 3, 250, 41, 8, 99, 120, 7, 7, 64, 12]])
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "routed_scaling_factor": 2.0,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    "phi3": {"original_max_position_embeddings": 512, "pad_token_id": 0},
    "qwen3_moe": MOE | {"head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT | {
        "topk_method": "group_limited_greedy", "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
            "mscale": 0.7, "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3": LATENT | {"norm_topk_prob": True},
    "glm4_moe": {
        "head_dim": 32, "use_qk_norm": True, "partial_rotary_factor": 0.5, "norm_topk_prob": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    },
    "gemma4_text": {
        "head_dim": 32, "global_head_dim": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 298, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt_oss": {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": MOE | {
        "shared_expert_intermediate_size": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "head_dim": 32,
        "partial_rotary_factor": 0.25, "full_attention_interval": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*E-", "num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "head_dim": 32, "layer_norm_epsilon": 1e-5,
        "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 64, "norm_topk_prob": True, "routed_scaling_factor": 2.0,
        "time_step_limit": [0.001, 1e9],
    },
    "kimi_linear": {
        "linear_attn_config": {
            "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1],
        },
        "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 4,
        "head_dim": 32, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 0, "model_max_length": 128, "routed_scaling_factor": 2.0, "moe_renormalize": True,
    },
}  # fmt: skip
MLX_LM_ONLY = ("gpt_oss",)  # whose original layout mlx-lm does not read in plain floats
COMMON = {
    "hidden_size": 64, "intermediate_size": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip


def mixed_bits(path, module):
    """Some layers with other bits, some not quantized at all."""
    if "layers.1" in path and "down_proj" in path:
        return {"group_size": 32, "bits": 8}
    return "layers.0" not in path or "o_proj" not in path


def converted(family, folder, **quantization):
    """(mlx-lm's model, the folder it is saved in)."""
    from mlx_lm import utils

    settings = COMMON | FAMILIES[family]
    if family in MLX_LM_ONLY:
        model, config = random_model(tiny_config(family, **settings))
    else:
        model, config = utils.load_model(write_tiny(folder / "source", family, tokenizer=False, **settings))
    if quantization:
        model, config = utils.quantize_model(model, config, **quantization)
    target = folder / "converted"
    target.mkdir()
    utils.save_model(target, model)
    utils.save_config(config, target / "config.json")
    return model, target


def random_model(config):
    """A model of mlx-lm's, and its config."""
    from mlx_lm import utils

    model_class, arguments = utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(0), 512))

    def fill(p):
        return mx.random.uniform(-0.3, 0.3, p.shape, key=next(keys)) + (p.ndim == 1)

    model.update(tree_map(fill, model.parameters()))
    return model, config


def distance(a, b):
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversion_computes_the_same(family, tmp_path):
    model, folder = converted(family, tmp_path)
    assert distance(mlxgen.load_model(folder)(TOKENS), model(TOKENS)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_conversion_with_bits_of_its_own_for_some_layers(family, tmp_path):
    model, folder = converted(family, tmp_path, group_size=32, bits=4, quant_predicate=mixed_bits)
    want = model(TOKENS)
    assert distance(mlxgen.load_model(folder)(TOKENS), want) < 1e-3
    packed = load(ModelConfig(source=str(folder), dtype="float32", dequantize=False)).decoder
    assert any(name.endswith(".scales") for name, _ in tree_flatten(packed.parameters()))
    assert distance(packed(TOKENS), want) < 1e-3


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_modes(mode, tmp_path):
    model, folder = converted("qwen3_moe", tmp_path, group_size=None, bits=None, mode=mode)
    assert distance(mlxgen.load_model(folder)(TOKENS), model(TOKENS)) < 1e-3

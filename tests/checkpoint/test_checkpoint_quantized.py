"""Checkpoints of other quantizers: encoded and decoded by hand in NumPy, then loaded, compute the same."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoint_helpers import write_safetensors

from mlxgen.checkpoint.quantized import packed, unpacked
from mlxgen.config import ModelConfig
from mlxgen.errors import ModelError, WeightsError
from mlxgen.loading import load, load_model

LLAMA = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
}  # fmt: skip
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp8_values():
    """The numbers that the bytes of E4M3 stand for (arXiv:2209.05433); 127 and 255 are no numbers."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes < 128, size, -size).astype(np.float32)


def random_fp8(rng, shape):
    codes = rng.integers(0, 120, shape) + 128 * rng.integers(0, 2, shape)
    return codes.astype(np.uint8)


def words_of(codes, bits):
    """Integers [rows, n] -> words [rows, n * bits / 32], from the lowest bits on."""
    per = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per), np.uint32)
    for i in range(per):
        words |= codes[:, i::per].astype(np.uint32) << np.uint32(bits * i)
    return words


# Each format: (rng, shape) -> (tensors by suffix, the weight they stand for).


def fp8_block(rng, shape, block=(48, 40)):
    codes = random_fp8(rng, shape)
    scales = rng.uniform(1e-3, 2e-3, [-(-n // b) for n, b in zip(shape, block, strict=True)]).astype(np.float32)
    each = scales[np.arange(shape[0])[:, None] // block[0], np.arange(shape[1]) // block[1]]
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}, fp8_values()[codes] * each


def fp8_matrix(rng, shape):
    codes, scale = random_fp8(rng, shape), np.array(0.0015, np.float32)
    parts = {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scale), "activation_scale": ("F32", scale)}
    return parts, fp8_values()[codes] * scale


def fp8_rows(rng, shape):
    codes, scales = random_fp8(rng, shape), rng.uniform(1e-3, 2e-3, (shape[0], 1)).astype(np.float32)
    return {"weight": ("F8_E4M3", codes), "weight_scale": ("F32", scales)}, fp8_values()[codes] * scales


def int8_rows(rng, shape):
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scales = rng.uniform(1e-3, 2e-3, (shape[0], 1)).astype(np.float32)
    return {"weight": ("I8", codes), "weight_scale": ("F32", scales)}, codes * scales


def integers(rng, shape, group, bits=4):
    out, columns = shape
    codes = rng.integers(0, 1 << bits, shape)
    scales = (rng.uniform(0.5, 1, (out, columns // group)) / (1 << bits)).astype(np.float16)
    zeros = rng.integers(1, 1 << bits, (out, columns // group))
    return codes, scales, zeros


def value(codes, scales, zeros, index):
    return ((codes - zeros[:, index]) * scales[:, index].astype(np.float32)).astype(np.float32)


def compressed(rng, shape, group=32, zero_points=False, bits=4):
    group = group or shape[1]
    codes, scales, zeros = integers(rng, shape, group, bits)
    zeros = zeros if zero_points else np.full_like(zeros, 1 << (bits - 1))
    parts = {
        "weight_packed": ("I32", words_of(codes, bits)),
        "weight_scale": ("F16", scales),
        "weight_shape": ("I64", np.array(shape, np.int64)),
    }
    if zero_points:
        parts["weight_zero_point"] = ("I32", words_of(zeros.T, bits).T)
    return parts, value(codes, scales, zeros, np.arange(shape[1]) // group)


def gptq(rng, shape, group=32, bits=4, shuffled=False, stored_minus=1):
    codes, scales, zeros = integers(rng, shape, group, bits)
    index = np.arange(shape[1]) // group
    index = rng.permutation(index) if shuffled else index
    parts = {
        "qweight": ("I32", words_of(codes, bits).T),
        "qzeros": ("I32", words_of((zeros - stored_minus).T, bits)),
        "scales": ("F16", scales.T),
        "g_idx": ("I32", index.astype(np.int32)),
    }
    return parts, value(codes, scales, zeros, index)


def awq(rng, shape, group=32):
    codes, scales, zeros = integers(rng, shape, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(columns):  # [rows, 8 n]: the i-th 4 bits of a word hold column order[i]
        return words_of(columns.reshape(len(columns), -1, 8)[:, :, order].reshape(len(columns), -1), 4)

    parts = {"qweight": ("I32", words(codes.T)), "qzeros": ("I32", words(zeros.T)), "scales": ("F16", scales.T)}
    return parts, value(codes, scales, zeros, np.arange(shape[1]) // group)


def groups_of(bits):
    return {"group_0": {"weights": {"num_bits": bits}}}


def packing(bits=4):
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups_of(bits)}


FORMATS = {
    "fp8 blocks": (fp8_block, {"quant_method": "fp8", "weight_block_size": [48, 40]}, False),
    "fp8 whole": (fp8_matrix, {"quant_method": "fp8"}, False),
    "fp8 rows": (fp8_rows, {"quant_method": "fbgemm_fp8"}, False),
    "compressed fp8": (fp8_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}, False),
    "compressed int8": (int8_rows, {"quant_method": "compressed-tensors", "format": "int-quantized"}, False),
    "compressed 4": (compressed, packing(), True),
    "compressed 8": (lambda r, s: compressed(r, s, bits=8), packing(8), True),
    "compressed rows": (lambda r, s: compressed(r, s, group=None), packing(), True),
    "compressed zeros": (lambda r, s: compressed(r, s, zero_points=True), packing(), True),
    "gptq 4": (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": False}, True),
    "gptq 8": (lambda r, s: gptq(r, s, bits=8), {"quant_method": "gptq", "bits": 8}, True),
    "gptq small": (lambda r, s: gptq(r, s, group=16), {"quant_method": "gptq", "bits": 4}, False),
    "gptq order": (
        lambda r, s: gptq(r, s, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        False,
    ),
    "gptq v2": (
        lambda r, s: gptq(r, s, stored_minus=0),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        True,
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}, True),
}


def raw(dtype, array):
    array = np.ascontiguousarray(array)
    return dtype, array.shape, array.tobytes()


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {name: raw(*entry) for name, entry in tensors.items()})
    return folder


def written(tmp_path, make, settings):
    """Two checkpoints of one tiny Llama: quantized, and with the weights that the quantized ones stand for."""
    rng = np.random.default_rng(0)
    rest = {n: rng.normal(size=(48, 64)) for n in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = ["model.norm"] + [f"model.layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]
    rest |= {f"{n}.weight": rng.uniform(0.5, 1.5, 64) for n in norms}
    ours = {name: ("F32", array.astype(np.float32)) for name, array in rest.items()}
    plain = dict(ours)
    for layer in (0, 1):
        for module, shape in SHAPES.items():
            parts, weight = make(rng, shape)
            ours |= {f"model.layers.{layer}.{module}.{suffix}": part for suffix, part in parts.items()}
            plain[f"model.layers.{layer}.{module}.weight"] = ("F32", weight.astype(np.float32))
    quantized = write(tmp_path / "quantized", LLAMA | {"quantization_config": settings}, ours)
    return quantized, write(tmp_path / "plain", LLAMA, plain)


def distance(a, b):
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_computes_what_its_weights_do(name, tmp_path):
    make, settings, stays_packed = FORMATS[name]
    quantized, plain = written(tmp_path, make, settings)
    want = load_model(plain)(TOKENS)
    assert distance(load_model(quantized)(TOKENS), want) < 1e-5
    decoder = load(ModelConfig(source=str(quantized), dtype="float32", dequantize=False, fuse=False)).decoder
    linear = decoder.layers[1].mlp.down_proj
    assert type(linear) is (nn.QuantizedLinear if stays_packed else nn.Linear)
    assert distance(decoder(TOKENS), want) < 5e-3  # a zero point times a scale is rounded to the scale's float16


def test_mxfp4_experts_stay_packed(tmp_path):
    rng = np.random.default_rng(1)
    E, D, width = 4, 64, 32
    config = LLAMA | {
        "model_type": "gpt_oss", "intermediate_size": width, "num_local_experts": E, "num_experts_per_tok": 2,
        "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    shared, ours, plain = {}, {}, {}
    shared |= {n: rng.normal(size=(48, D)) for n in ("model.embed_tokens.weight", "lm_head.weight")}
    for i in (0, 1):
        at = f"model.layers.{i}"
        for module, shape in SHAPES.items():
            if module.startswith("self_attn"):
                shared[f"{at}.{module}.weight"] = rng.normal(size=shape) / 8
                shared[f"{at}.{module}.bias"] = rng.normal(size=shape[0])
        shared |= {f"{at}.{n}_layernorm.weight": np.ones(D) for n in ("input", "post_attention")}
        shared |= {f"{at}.self_attn.sinks": rng.normal(size=4), f"{at}.mlp.router.weight": rng.normal(size=(E, D))}
        shared |= {f"{at}.mlp.router.bias": rng.normal(size=E)}
        for name, rows, columns in (("gate_up_proj", 2 * width, D), ("down_proj", D, width)):
            shared[f"{at}.mlp.experts.{name}_bias"] = rng.normal(size=(E, rows))
            codes = rng.integers(0, 16, (E, rows, columns // 32, 32))
            scales = rng.integers(121, 125, (E, rows, columns // 32)).astype(np.uint8)
            blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
            ours[f"{at}.mlp.experts.{name}_blocks"] = ("U8", blocks)
            ours[f"{at}.mlp.experts.{name}_scales"] = ("U8", scales)
            weight = FP4[codes] * 2.0 ** (scales[..., None].astype(np.float32) - 127)
            turned = weight.reshape(E, rows, columns).swapaxes(1, 2)
            plain[f"{at}.mlp.experts.{name}"] = ("F32", turned.astype(np.float32))
    shared["model.norm.weight"] = np.ones(D)
    both = {name: ("F32", array.astype(np.float32)) for name, array in shared.items()}
    packed_folder = write(tmp_path / "packed", config | {"quantization_config": {"quant_method": "mxfp4"}}, both | ours)
    want = load_model(write(tmp_path / "plain", config, both | plain))(TOKENS)
    assert distance(load_model(packed_folder)(TOKENS), want) < 1e-5
    decoder = load(ModelConfig(source=str(packed_folder), dtype="float32", dequantize=False)).decoder
    assert decoder.layers[0].mlp.experts.up_proj.mode == "mxfp4"
    assert distance(decoder(TOKENS), want) < 1e-5


def test_words_hold_integers_from_the_lowest_bits_on():
    codes = np.random.default_rng(2).integers(0, 16, (3, 32))
    words = mx.array(words_of(codes, 4))
    assert np.array_equal(np.array(unpacked(words, 4)), codes)
    assert np.array_equal(np.array(packed(mx.array(codes), 4)), np.array(words))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "gptq", "bits": 3}, "bits must be 2 or 4 or 8"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format"),
    ],
)
def test_what_is_not_supported_is_named(settings, text, tmp_path):
    folder, _ = written(tmp_path, fp8_block, settings)
    with pytest.raises(ModelError, match=text):
        load_model(folder)


def test_bytes_never_pass_for_weights(tmp_path):
    def no_scale(rng, shape):
        parts, weight = fp8_matrix(rng, shape)
        return {"weight": parts["weight"]}, weight

    folder, _ = written(tmp_path, no_scale, {"quant_method": "fp8"})
    with pytest.raises(WeightsError, match="8 bits"):
        load_model(folder)


def test_scales_must_fit_the_blocks(tmp_path):
    folder, _ = written(tmp_path, fp8_block, {"quant_method": "fp8", "weight_block_size": [64, 64]})
    with pytest.raises(WeightsError, match="one scale for each block"):
        load_model(folder)

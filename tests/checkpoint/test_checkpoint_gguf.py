"""GGUF headers against the gguf package's reader; names and config against what the hub has."""

from __future__ import annotations

import contextlib
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import (
    TINY,
    TYPE,
    VOCABULARY,
    random_blocks,
    tiny_tensors,
    write_gguf,
    write_tiny_gguf,
)
from gguf import GGUFReader, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.checkpoint import open_checkpoint
from mlxgen.checkpoint.gguf_file import read_gguf
from mlxgen.checkpoint.gguf_names import FAMILIES, MIXTRAL, hub_name
from mlxgen.errors import ModelError, WeightsError

ARCHITECTURES = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}


def opened(folder: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> Any:
    """A checkpoint with the tiny sizes, `metadata` changed and the given tensors beside an embedding."""
    embedding = {"token_embd.weight": np.zeros((VOCABULARY, 64), dtype=np.float32)}
    return open_checkpoint(
        write_gguf(folder / "m.gguf", arch, {**TINY, **metadata}, embedding | (tensors or {}))
    )


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def test_header_equals_the_reference_reader(tmp_path: Path) -> None:
    extra = {
        "a.bool": True,
        "a.flags": [True, False],
        "a.ints": [-1, 2],
        "a.none": "",
        "a.text": "Ünï ▁ \U0001f600",
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", {**TINY, **extra}, tiny_tensors())
    reader, ours = GGUFReader(path), read_gguf(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            assert ours.metadata[key] == (
                pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            ), key
    assert len(ours.metadata) == len(reader.fields) - 3
    assert list(ours.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.type, mine.offset, mine.nbytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_floats_are_the_decimals_that_were_written(tmp_path: Path) -> None:
    metadata = read_gguf(write_tiny_gguf(tmp_path / "m.gguf")).metadata
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert metadata["general.sampling.temp"] == 0.6


def test_large_vocabulary_opens_in_a_moment(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(100_000)]
    path = write_gguf(
        tmp_path / "m.gguf", "llama", {"tokenizer.ggml.tokens": tokens}, {"token_embd.weight": zeros(1, 32)}
    )
    start = time.process_time()
    assert read_gguf(path).metadata["tokenizer.ggml.tokens"] == tokens
    assert time.process_time() - start < 2, "some 0.1 s; the reference reader needs 6"


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_cut_is_a_model_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write_tiny_gguf(tmp_path_factory.mktemp("cut") / "m.gguf")
    content = path.read_bytes()
    used = max(t.offset + t.nbytes for t in read_gguf(path).tensors.values())
    # Often within the header, which is small beside the data.
    cut = data.draw(st.one_of(st.integers(0, 3000), st.integers(0, used - 1)))
    path.write_bytes(content[:cut])
    with pytest.raises(ModelError, match=str(cut)):
        open_checkpoint(path)


@settings(max_examples=80, deadline=None)
@given(at=st.integers(8, 2500), value=st.integers(0, 255))
def test_a_damaged_byte_never_gets_out_of_hand(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    path = write_tiny_gguf(tmp_path_factory.mktemp("damage") / "m.gguf")
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)
    with contextlib.suppress(ModelError):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04", "must begin with GGUF"),
        (b"", "must begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<I", 3), "needs more. Truncated"),
    ],
)
def test_not_a_gguf_file(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(start)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_unknown_type_is_named_before_anything_is_allocated(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    name = b"blk.1.attn_v.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # the dimensions come first
    path.write_bytes(content[:at] + struct.pack("<I", 31) + content[at + 4 :])
    with pytest.raises(WeightsError, match=r"`blk\.1\.attn_v\.weight` .* GGML type 31"):
        open_checkpoint(path)


def test_split_set_opens_by_any_part(tmp_path: Path) -> None:
    source = tiny_tensors()
    write_gguf(tmp_path / "m.gguf", "llama", TINY, source, splits=8)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) == 3
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", "llama", TINY, source))
    for part in (parts[0], parts[2]):
        checkpoint = open_checkpoint(part)
        assert checkpoint.path == parts[0]
        assert checkpoint.config == whole.config
        assert checkpoint.files == parts
        assert set(checkpoint.tensors) == set(whole.tensors)
        name = "model.layers.1.mlp.down_proj.weight"
        assert checkpoint.load(name).tolist() == whole.load(name).tolist()
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(WeightsError, match=r"m-00002-of-00003\.gguf. is missing \(1 of 3 parts\)"):
        open_checkpoint(parts[0])
    with pytest.raises(WeightsError, match="one of 3 parts, which must keep their names"):
        open_checkpoint(tmp_path / "elsewhere.gguf")


def test_tiny_llama(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config == {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.generation_config == {"eos_token_id": [2, 5], "bos_token_id": 1, "temperature": 0.6}
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.gguf_metadata["tokenizer.ggml.tokens"][3] == "<3>"
    assert checkpoint.tokenizer_folder is None
    assert checkpoint.baked == frozenset()
    assert checkpoint.files == [path]
    quantization = checkpoint.quantization
    assert quantization is not None
    assert {key: quantization[key] for key in ("group_size", "bits", "mode")} == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
    }
    assert quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert quantization["model.layers.0.mlp.gate_proj"] == {"group_size": 32, "bits": 5, "mode": "affine"}
    assert quantization["lm_head"] is False
    assert "model.layers.0.self_attn.q_proj" not in quantization, "as the default"
    for name, info in checkpoint.tensors.items():
        array = checkpoint.load(name)
        assert (array.shape, str(array.dtype), array.nbytes) == (
            info.shape,
            f"mlx.core.{info.dtype}",
            info.nbytes,
        )


def test_nothing_quantized(tmp_path: Path) -> None:
    assert opened(tmp_path, "qwen2", {}).quantization is None


@pytest.mark.parametrize(("arch", "message"), [("lama", "Did you mean `llama`"), ("clip", "must be one of")])
def test_unknown_architecture(tmp_path: Path, arch: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, arch, {})


def test_unknown_tensor(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"`blk\.0\.attn_magic\.weight`"):
        opened(tmp_path, "llama", {}, {"blk.0.attn_magic.weight": zeros(32)})


def test_size_that_every_model_has_is_missing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {".block_count": 2}, {"token_embd.weight": zeros(4, 32)})
    with pytest.raises(ModelError, match="`hidden_size`"):
        open_checkpoint(path)


# ------------------------------------------------------------------------------------------------------ names

# Names that the gguf package maps from others than the hub's today, or not at all: by hand.
_NOT_MAPPED = {
    "ffn_gate_exps",
    "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp", "attn_sinks", "attn_rot_embd", "rope_freqs",
    "rope_factors_long", "rope_factors_short", "attn_q_norm", "attn_k_norm",
}  # fmt: skip


@pytest.mark.parametrize("arch", FAMILIES)
def test_names_map_back_to_gguf(arch: str) -> None:
    """The gguf package's own table, made for the other direction, leads back to the name in the file."""
    back = get_tensor_name_map(ARCHITECTURES[arch], 2)
    checked = 0
    for tensor in MODEL_TENSORS[ARCHITECTURES[arch]]:
        template = TENSOR_NAMES[tensor]
        if "nextn" in template or (
            template.removeprefix("blk.{bid}.").endswith("shexp") and arch == "granitemoe"
        ):
            continue
        ours = hub_name(f"{template.format(bid=1)}.weight", FAMILIES[arch])
        if template.removeprefix("blk.{bid}.") in _NOT_MAPPED:
            continue
        assert ours is not None
        assert back.get_name(ours.removesuffix(".weight")) == template.format(bid=1), ours
        checked += 1
    assert checked >= 9


@pytest.mark.parametrize(
    ("arch", "name", "expected"),
    [
        ("llama", "blk.3.attn_rot_embd.weight", None),
        ("llama", "rope_freqs.weight", None),
        ("qwen2", "blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3moe", "blk.7.ffn_down_exps.weight", "model.layers.7.mlp.switch_mlp.down_proj.weight"),
        ("qwen3moe", "blk.7.ffn_gate_inp.weight", "model.layers.7.mlp.gate.weight"),
        ("qwen3", "blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("gpt-oss", "blk.0.attn_sinks.weight", "model.layers.0.self_attn.sinks"),
        ("gpt-oss", "blk.0.ffn_gate_inp.bias", "model.layers.0.mlp.router.bias"),
        ("gpt-oss", "blk.0.ffn_up_exps.bias", "model.layers.0.mlp.experts.up_proj.bias"),
        ("granitemoe", "blk.0.ffn_gate_inp.weight", "model.layers.0.block_sparse_moe.router.layer.weight"),
        ("hunyuan-dense", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.query_layernorm.weight"),
        ("stablelm", "blk.0.attn_norm.bias", "model.layers.0.input_layernorm.bias"),
    ],
)
def test_names_by_hand(arch: str, name: str, expected: str | None) -> None:
    assert hub_name(name, FAMILIES[arch]) == expected


def test_mixtral_with_experts_apart_and_stacked() -> None:
    assert (
        hub_name("blk.2.ffn_down.5.weight", MIXTRAL) == "model.layers.2.block_sparse_moe.experts.5.w2.weight"
    )
    stacked = "model.layers.2.block_sparse_moe.switch_mlp.up_proj.weight"
    assert hub_name("blk.2.ffn_up_exps.weight", MIXTRAL) == stacked
    with pytest.raises(WeightsError):
        hub_name("blk.2.ffn_down.5.weight", FAMILIES["llama"])


# ----------------------------------------------------------------------------------------------------- config


def test_mixtral_config(tmp_path: Path) -> None:
    experts = {"blk.0.ffn_gate_exps.weight": zeros(4, 96, 64)}
    config = opened(tmp_path, "llama", {".expert_count": 4, ".expert_used_count": 2}, experts).config
    assert config["model_type"] == "mixtral"
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)
    assert config["intermediate_size"] == 256


def test_qwen_experts(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_gate_exps.weight": (
            random_blocks(np.random.default_rng(0), TYPE.Q4_0, 4, 96, 64),
            TYPE.Q4_0,
        ),
        "blk.0.ffn_gate_shexp.weight": zeros(192, 64),
        "blk.0.ffn_gate_inp_shexp.weight": np.arange(64, dtype=np.float32),
        "blk.0.ffn_gate_inp.weight": zeros(4, 64),
    }
    checkpoint = opened(tmp_path, "qwen2moe", {".expert_count": 4, ".expert_used_count": 2}, tensors)
    config = checkpoint.config
    assert (config["num_experts"], config["num_experts_per_tok"], config["norm_topk_prob"]) == (4, 2, False)
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (96, 192)
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    assert checkpoint.tensors[gate].shape == (1, 64), "on the hub a matrix of one row"
    assert checkpoint.load(gate).tolist() == [list(range(64))]
    assert checkpoint.tensors["model.layers.0.mlp.switch_mlp.gate_proj.weight"].shape == (4, 96, 8)


def test_gemma3(tmp_path: Path) -> None:
    metadata = {
        ".attention.key_length": 32,
        ".attention.value_length": 32,
        ".attention.sliding_window": 8,
        ".block_count": 7,
    }
    checkpoint = opened(
        tmp_path, "gemma3", metadata, {"blk.0.attn_norm.weight": np.full(64, 1.5, dtype=np.float32)}
    )
    config = checkpoint.config
    assert checkpoint.baked == {"norm_offset"}
    assert checkpoint.load("model.layers.0.input_layernorm.weight")[0].item() == 1.5, "as stored"
    assert config["model_type"] == "gemma3_text"
    assert (config["head_dim"], config["query_pre_attn_scalar"], config["sliding_window"]) == (32, 32, 8)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (500000.0, 10000.0)
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["tie_word_embeddings"] is True
    assert config["layer_types"] == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    config = opened(tmp_path, "gemma3", {".rope.freq_base_swa": 20000.0}).config
    assert config["rope_local_base_freq"] == 20000.0


def test_gemma2(tmp_path: Path) -> None:
    metadata = {
        ".attn_logit_softcapping": 50.0, ".final_logit_softcapping": 30.0, ".attention.sliding_window": 4096,
        ".attention.key_length": 24, ".block_count": 46,
    }  # fmt: skip
    config = opened(tmp_path, "gemma2", metadata).config
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["query_pre_attn_scalar"] == 16, "the 27B size: hidden_size / heads"
    assert config["layer_types"][:3] == ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("pattern", "expected"), [([True, False], "sf"), (2, "sf"), ([True, True], "ss"), (None, "ss")]
)
def test_layer_types_from_the_file(tmp_path: Path, pattern: Any, expected: str) -> None:
    metadata = {".attention.sliding_window": 8}
    if pattern is not None:
        metadata[".attention.sliding_window_pattern"] = pattern
    config = opened(tmp_path, "olmo2", metadata).config
    assert config["model_type"] == "olmo3"
    assert "".join(kind[0] for kind in config["layer_types"]) == expected


def test_head_dim_from_the_rows_of_q(tmp_path: Path) -> None:
    """Mistral Nemo: heads times head_dim is not hidden_size, and older files do not say so."""
    config = opened(
        tmp_path, "qwen3", {".rope.dimension_count": 24}, {"blk.0.attn_q.weight": zeros(96, 64)}
    ).config
    assert config["head_dim"] == 24
    assert "partial_rotary_factor" not in config


def test_partial_rope_biases_and_norms_of_stablelm(tmp_path: Path) -> None:
    metadata = {
        ".rope.dimension_count": 4,
        ".attention.layer_norm_epsilon": 1e-5,
        ".use_parallel_residual": True,
    }
    tensors = {"blk.0.attn_q.weight": zeros(64, 64), "blk.0.attn_q.bias": zeros(64)}
    config = opened(tmp_path, "stablelm", metadata, tensors).config
    assert config["partial_rotary_factor"] == 0.25
    assert config["layer_norm_eps"] == 1e-5
    assert (config["use_qkv_bias"], config["use_parallel_residual"], config["qk_layernorm"]) == (
        True,
        True,
        False,
    )


def test_same_value_in_every_layer_is_one_value(tmp_path: Path) -> None:
    metadata = {".attention.head_count_kv": [2, 2], ".feed_forward_length": [256, 128]}
    config = opened(tmp_path, "qwen2", metadata).config
    assert config["num_key_value_heads"] == 2
    assert config["intermediate_size"] == [256, 128]


def test_granite_scalars(tmp_path: Path) -> None:
    metadata = {
        ".embedding_scale": 12.0,
        ".residual_scale": 0.22,
        ".attention.scale": 0.015625,
        ".logit_scale": 8.0,
    }
    config = opened(tmp_path, "granite", metadata).config
    keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    assert [config[key] for key in keys] == [12.0, 0.22, 0.015625, 8.0]


def test_llama3_frequencies_are_given_factors(tmp_path: Path) -> None:
    """The factors of llama 3.1 for head 8, base 500000, factor 8, low 1, high 4, original 8192."""
    factors = [1.0, 1.0, 1.41421356 / 0.524846, 8.0]
    tensors = {"rope_freqs.weight": np.array(factors, dtype=np.float32), "blk.0.attn_q.weight": zeros(32, 64)}
    metadata = {".rope.dimension_count": 8, ".context_length": 131072}
    checkpoint = opened(tmp_path, "llama", metadata, tensors)
    scaling = checkpoint.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert (scaling["attention_factor"], scaling["original_max_position_embeddings"]) == (1.0, 131072)
    assert scaling["short_factor"] == scaling["long_factor"]
    frequencies = [500000.0 ** (-i / 4) / factor for i, factor in enumerate(scaling["long_factor"])]
    assert frequencies == pytest.approx([1, 0.037606, 0.000524846, 6.64787e-06], rel=1e-5)
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_longrope_of_phi3(tmp_path: Path) -> None:
    tensors = {"rope_factors_long.weight": zeros(8) + 4, "rope_factors_short.weight": zeros(8) + 1}
    metadata = {".rope.scaling.original_context_length": 32, ".rope.scaling.attn_factor": 1.25}
    scaling = opened(tmp_path, "phi3", metadata, tensors).config["rope_scaling"]
    assert scaling == {
        "rope_type": "longrope",
        "long_factor": [4.0] * 8,
        "short_factor": [1.0] * 8,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 32,
    }


@pytest.mark.parametrize(
    ("arch", "metadata", "expected"),
    [
        ("llama", {}, None),
        ("llama", {".rope.scaling.type": "none"}, None),
        (
            "llama",
            {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ("llama", {".rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            "qwen2",
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            "qwen2",
            {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".rope.scaling.attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1),
            },
        ),
        (
            "gpt-oss",
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 32.0,
                ".rope.scaling.yarn_beta_fast": 32.0,
            },
            {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "truncate": False,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, arch: str, metadata: dict[str, Any], expected: object) -> None:
    assert opened(tmp_path, arch, metadata).config.get("rope_scaling") == expected


@pytest.mark.parametrize("kind", ["ntk", "longrope"])
def test_rope_scaling_that_nobody_can_follow(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match=r"rope\.scaling\.type"):
        opened(tmp_path, "llama", {".rope.scaling.type": kind})

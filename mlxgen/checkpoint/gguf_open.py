"""A GGUF file as a checkpoint: the hub's names and a config.json made from the metadata."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.checkpoint.base import Checkpoint, TensorInfo
from mlxgen.checkpoint.gguf_blocks import kept, layout, read_part
from mlxgen.checkpoint.gguf_file import GgufFile, GgufTensor, read_gguf
from mlxgen.checkpoint.gguf_names import FAMILIES, KEYS, MIXTRAL, Family, hub_name
from mlxgen.errors import ModelError, WeightsError, did_you_mean

_ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "uint8": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where one loaded array comes from."""

    tensor: GgufTensor
    part: str
    head_rows: int


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or a split set by any of its parts; only headers are read.

    Types that MLX's affine form holds exactly (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K) and MXFP4 stay
    quantized, in groups of 32 and with an entry in `quantization`; F32, F16, BF16 and integers stay as they
    are; the rest is float32.
    Raises ModelError for a broken header or an unknown architecture, WeightsError for unreadable tensors.
    """
    file = read_gguf(path)
    family = _family(file)
    config = hub_config(file)
    sources: dict[str, _Source] = {}
    tensors: dict[str, TensorInfo] = {}
    forms: dict[str, dict[str, Any] | None] = {}
    for gguf_name, tensor in file.tensors.items():
        name = hub_name(gguf_name, family)
        if name is None:
            continue
        if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        head_rows = _head_rows(gguf_name, tensor, config) if family.interleaved else 0
        stem = name.removesuffix(".weight")
        for part, (shape, dtype) in layout(tensor).items():
            full = name if part == "weight" else f"{stem}.{part}"
            nbytes = prod(shape) * _ITEM_BYTES[dtype]
            sources[full] = _Source(tensor=tensor, part=part, head_rows=head_rows)
            tensors[full] = TensorInfo(name=full, shape=shape, dtype=dtype, nbytes=nbytes, file=tensor.file)
        form = kept(tensor)
        if len(tensor.shape) > 1:
            forms[stem] = form.entry() if form else None

    def read(info: TensorInfo) -> mx.array:
        source = sources[info.name]
        return read_part(source.tensor, source.part, source.head_rows)

    return Checkpoint(
        path=file.path,
        config=config,
        generation_config=generation_config(file.metadata),
        quantization=_quantization(forms),
        tensors=tensors,
        reader=read,
        tokenizer_folder=None,
        gguf_metadata=file.metadata,
        baked=frozenset({"norm_offset"} if family.norm_offset else ()),
    )


def _family(file: GgufFile) -> Family:
    name = str(file.metadata.get("general.architecture"))
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        hint = did_you_mean(name, FAMILIES)
        raise ModelError(
            f"`general.architecture` of {file.path} must be one of {known}, but is {name!r}.{hint}"
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    family = FAMILIES[name]
    if name == "olmo2" and "olmo2.attention.sliding_window" in file.metadata:
        return replace(family, model_type="olmo3")
    return family


def _head_rows(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> int:
    """Rows of one head, in a tensor whose rows are stored interleaved; 0 for the others."""
    kind = name.split(".")[2] if name.startswith("blk.") else ""
    if kind not in ("attn_q", "attn_k"):
        return 0
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    if isinstance(heads, list):
        heads = heads[int(name.split(".")[1])]
    if tensor.shape[0] % (2 * heads):
        raise WeightsError(
            f"`{name}` in {tensor.file} must have rows for {heads} heads, but has {tensor.shape[0]}."
        )
    return tensor.shape[0] // heads


def _quantization(forms: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """MLX's config entry: the most frequent form for all, and the matrices that have another one."""
    count = Counter(tuple(form.items()) for form in forms.values() if form)
    if not count:
        return None
    everywhere = dict(count.most_common(1)[0][0])
    others = {path: form or False for path, form in forms.items() if form != everywhere}
    return {**everywhere, **others}


def _value(file: GgufFile, key: str, default: Any = None) -> Any:
    """A metadata key of the architecture; a list of equal values is one value."""
    value = file.metadata.get(f"{file.metadata['general.architecture']}.{key}", default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def hub_config(file: GgufFile) -> dict[str, Any]:
    """The metadata in the form of the config.json that the hub has for this model.

    Raises ModelError if a size that every model has is missing.
    """
    family = _family(file)
    config: dict[str, Any] = {"model_type": family.model_type, **family.constants}
    for key, name in {**KEYS, **family.keys}.items():
        if (value := _value(file, key)) is not None:
            config[name] = value
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ModelError(f"`{name}` must be in the metadata of {file.path}, but is {config.get(name)!r}.")
    if not config.get("num_key_value_heads"):
        config["num_key_value_heads"] = config["num_attention_heads"]
    config.setdefault("rope_theta", 10000.0)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    _add_head_dim(config, file)
    _add_biases(config, file, family)
    _add_experts(config, file, family)
    _add_layer_types(config, file, family)
    if scaling := rope_scaling(file, family, config):
        config["rope_scaling"] = scaling
    if family.wide_scale_layers:
        wide = config["num_hidden_layers"] == family.wide_scale_layers
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if wide else config["head_dim"]
    for key in ("bos_token_id", "eos_token_id", "padding_token_id"):
        if (token := file.metadata.get(f"tokenizer.ggml.{key}")) is not None:
            config[key.replace("padding", "pad")] = token
    return config


def _add_head_dim(config: dict[str, Any], file: GgufFile) -> None:
    q = file.tensors.get("blk.0.attn_q.weight")
    heads = config["num_attention_heads"]
    config.setdefault("head_dim", q.shape[0] // heads if q else config["hidden_size"] // heads)
    rotated = _value(file, "rope.dimension_count", config["head_dim"])
    if rotated < config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    value_length = _value(file, "attention.value_length", config["head_dim"])
    if value_length != config["head_dim"]:
        config["v_head_dim"] = value_length


def _add_biases(config: dict[str, Any], file: GgufFile, family: Family) -> None:
    if family.bias_key:
        config[family.bias_key] = "blk.0.attn_q.bias" in file.tensors
    if "blk.0.ffn_down.bias" in file.tensors and family.bias_key == "attention_bias":
        config["mlp_bias"] = True
    if family.model_type == "stablelm":
        config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in file.tensors
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in file.tensors
    if family.model_type == "cohere":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _add_experts(config: dict[str, Any], file: GgufFile, family: Family) -> None:
    """Widths that older files leave out."""
    width = family.keys.get("expert_feed_forward_length", "moe_intermediate_size")
    for name, key in (("ffn_gate_exps", width), ("ffn_gate_shexp", "shared_expert_intermediate_size")):
        layers = (t for n, t in file.tensors.items() if n.endswith(f".{name}.weight"))
        if tensor := next(layers, None):
            config.setdefault(key, tensor.shape[-2])


def _add_layer_types(config: dict[str, Any], file: GgufFile, family: Family) -> None:
    pattern = _value(file, "attention.sliding_window_pattern", family.full_attention_every)
    layers = config["num_hidden_layers"]
    if not config.get("sliding_window") or not pattern:
        return
    if isinstance(pattern, list):
        sliding = [bool(kind) for kind in pattern[:layers]]
    elif pattern is True:
        sliding = [True] * layers
    else:
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    config["layer_types"] = ["sliding_attention" if kind else "full_attention" for kind in sliding]


def rope_scaling(file: GgufFile, family: Family, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json's `rope_scaling`, None if the frequencies are plain.

    Llama 3's own scaling is in the file as one factor per frequency (`rope_freqs`). As such it is a case of
    longrope, whose inverse frequencies are divided by given factors; the attention is not scaled.
    """
    context = config.get("max_position_embeddings")
    original = _value(file, "rope.scaling.original_context_length", context)
    kind = _value(file, "rope.scaling.type", "none")
    factor = _value(file, "rope.scaling.factor", _value(file, "rope.scale_linear"))
    attention = _value(file, "rope.scaling.attn_factor", 1.0)
    if "rope_freqs.weight" in file.tensors:
        factors = _numbers(file, "rope_freqs.weight")
        found = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
        return {**found, "original_max_position_embeddings": context}
    if "rope_factors_long.weight" in file.tensors:
        long, short = (_numbers(file, f"rope_factors_{which}.weight") for which in ("long", "short"))
        found = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": attention,
        }
        return {**found, "original_max_position_embeddings": original}
    if kind == "linear" or (kind == "none" and factor and factor != 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (beta := _value(file, f"rope.scaling.yarn_{name}")) is not None:
                found[name] = beta
        if attention != 1.0:
            # GGUF's factor comes on top of the one that YaRN derives from the length; the hub's replaces it.
            found["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
        if (beta := _value(file, "attention.temperature_scale")) is not None:
            found["llama_4_scaling_beta"] = beta
        return {**found, **family.rope}
    if kind != "none":
        raise ModelError(
            f"`rope.scaling.type` of {file.path} must be none, linear, yarn or longrope, but is {kind!r}."
        )
    return None


def _numbers(file: GgufFile, name: str) -> list[float]:
    return [float(value) for value in read_part(file.tensors[name], "weight").tolist()]  # type: ignore[union-attr]


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids that start and end a text, and the author's sampling advice, as in generation_config.json."""
    found: dict[str, Any] = {}
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(token for token in ends if token is not None))
    if ids:
        found["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            found[name] = token
    for key, name in _SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            found[name] = value
    return found

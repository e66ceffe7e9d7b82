"""Small files to open: safetensors written by hand, GGUF written by the gguf package, wheels."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

TYPE = GGMLQuantizationType
# Where the float16 numbers are in a block: the rest of a block can be any bytes.
HALVES = {
    TYPE.Q4_0: [0], TYPE.Q4_1: [0, 2], TYPE.Q5_0: [0], TYPE.Q5_1: [0, 2], TYPE.Q8_0: [0],
    TYPE.Q2_K: [80, 82], TYPE.Q3_K: [108], TYPE.Q4_K: [0, 2], TYPE.Q5_K: [0, 2], TYPE.Q6_K: [208],
    TYPE.IQ4_NL: [0], TYPE.IQ4_XS: [0], TYPE.TQ2_0: [64], TYPE.MXFP4: [],
}  # fmt: skip


def random_blocks(rng: np.random.Generator, kind: GGMLQuantizationType, *shape: int) -> np.ndarray:
    """uint8 [..., bytes of a row]: blocks of finite values, with negative and subnormal scales."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(size=raw.shape[:-1]) * 10.0 ** rng.integers(-7, 2, raw.shape[:-1])
        raw[..., at : at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    if kind == TYPE.MXFP4:
        raw[..., 0] = rng.integers(100, 150, raw.shape[:-1])
    return raw.reshape(*shape[:-1], -1)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """name -> (dtype, shape, data), laid out as the format says."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def floats(*values: float) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", (len(values),), np.array(values, dtype="<f4").tobytes()


def write_folder(folder: Path, **config: Any) -> Path:
    """A folder with a config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def write_gguf(
    path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any], *, splits: int = 0
) -> Path:
    """tensors: name -> array, or (blocks as bytes, type). keys that start with `.` belong to `arch`."""
    writer = GGUFWriter(path, arch, split_max_tensors=splits)
    for key, value in metadata.items():
        key = f"{arch}{key}" if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


VOCABULARY = 48
TINY = {
    ".context_length": 128, ".embedding_length": 64, ".block_count": 2, ".feed_forward_length": 256,
    ".attention.head_count": 4, ".attention.head_count_kv": 2, ".attention.layer_norm_rms_epsilon": 1e-6,
    ".rope.freq_base": 5e5, ".rope.dimension_count": 16,
    "tokenizer.ggml.tokens": [f"<{i}>" for i in range(VOCABULARY)],
    "tokenizer.ggml.scores": [-float(i) for i in range(VOCABULARY)],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5,
    "general.sampling.temp": 0.6,
}  # fmt: skip


def tiny_tensors(seed: int = 0) -> dict[str, Any]:
    """The tensors of a llama with 2 layers, hidden 64, 4 heads of 16, 2 key heads, in many block types."""
    rng = np.random.default_rng(seed)

    def blocks(kind: GGMLQuantizationType, *shape: int) -> tuple[np.ndarray, GGMLQuantizationType]:
        return random_blocks(rng, kind, *shape), kind

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tensors: dict[str, Any] = {
        "token_embd.weight": blocks(TYPE.Q8_0, VOCABULARY, 64),
        "output_norm.weight": normal(64),
        "output.weight": normal(VOCABULARY, 64).astype(np.float16),
    }
    for layer, down in enumerate((TYPE.Q4_K, TYPE.Q6_K)):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": normal(64),
            f"blk.{layer}.attn_q.weight": blocks(TYPE.Q4_0, 64, 64),
            f"blk.{layer}.attn_k.weight": blocks(TYPE.Q8_0, 32, 64),
            f"blk.{layer}.attn_v.weight": blocks(TYPE.Q4_1, 32, 64),
            f"blk.{layer}.attn_output.weight": blocks(TYPE.Q5_1, 64, 64),
            f"blk.{layer}.ffn_norm.weight": normal(64),
            f"blk.{layer}.ffn_gate.weight": blocks(TYPE.Q5_0, 256, 64),
            f"blk.{layer}.ffn_up.weight": blocks(TYPE.Q4_0, 256, 64),
            f"blk.{layer}.ffn_down.weight": blocks(down, 64, 256),
        }
    return tensors


def write_tiny_gguf(path: Path) -> Path:
    return write_gguf(path, "llama", TINY, tiny_tensors())


def write_wheel(folder: Path, requirement: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts."""
    name, _, version = requirement.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel

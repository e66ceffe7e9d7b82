"""Blocks of GGUF against the reference decoder of the gguf package, and against MLX's own reader."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoint_helpers import HALVES, TINY, TYPE, random_blocks, tiny_tensors, write_gguf
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.checkpoint import gguf_blocks, open_checkpoint
from mlxgen.checkpoint.gguf_blocks import kept, layout, read_part
from mlxgen.checkpoint.gguf_file import GgufTensor
from mlxgen.errors import WeightsError

KEPT = [
    TYPE.Q4_0, TYPE.Q4_1, TYPE.Q5_0, TYPE.Q5_1, TYPE.Q8_0, TYPE.Q4_K, TYPE.Q5_K, TYPE.MXFP4,
]  # fmt: skip


def tensor_of(path: Path, data: np.ndarray, kind: GGMLQuantizationType, *shape: int) -> GgufTensor:
    """A tensor somewhere inside of a file."""
    path.write_bytes(b"before " + data.tobytes() + b" after")
    return GgufTensor(name="t", shape=shape, type=int(kind), offset=7, nbytes=data.nbytes, file=path)


def multiplied_out(tensor: GgufTensor) -> np.ndarray:
    """What MLX makes of the parts, in float32."""
    form = kept(tensor)
    assert form is not None
    parts = {part: read_part(tensor, part) for part in layout(tensor)}
    for part, (shape, dtype) in layout(tensor).items():
        assert (parts[part].shape, parts[part].dtype) == (shape, getattr(mx, dtype))
    if form.mode == "mxfp4":
        return np.array(mx.dequantize(parts["weight"], parts["scales"], **form.entry(), dtype=mx.float32))
    scales, biases = (parts[part].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(parts["weight"], scales, biases, **form.entry()))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 3))
@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_kept_quantized_without_loss(
    tmp_path_factory: pytest.TempPathFactory, kind: GGMLQuantizationType, seed: int, rows: int, blocks: int
) -> None:
    raw = random_blocks(np.random.default_rng(seed), kind, rows, blocks * 256)
    tensor = tensor_of(tmp_path_factory.mktemp("kept") / "f", raw, kind, rows, blocks * 256)
    np.testing.assert_array_equal(multiplied_out(tensor), quants.dequantize(raw, kind))


def test_stacked_experts_are_kept_too(tmp_path: Path) -> None:
    raw = random_blocks(np.random.default_rng(0), TYPE.Q4_0, 3, 4, 64)
    tensor = tensor_of(tmp_path / "f", raw, TYPE.Q4_0, 3, 4, 64)
    assert layout(tensor)["weight"] == ((3, 4, 8), "uint32")
    assert layout(tensor)["scales"] == ((3, 4, 2), "float16")
    np.testing.assert_array_equal(multiplied_out(tensor), quants.dequantize(raw, TYPE.Q4_0))


@pytest.mark.parametrize("kind", [kind for kind in HALVES if kind not in KEPT], ids=lambda kind: kind.name)
def test_the_rest_is_dequantized_to_float32(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    raw = random_blocks(np.random.default_rng(1), kind, 3, 512)
    tensor = tensor_of(tmp_path / "f", raw, kind, 3, 512)
    assert layout(tensor) == {"weight": ((3, 512), "float32")}
    np.testing.assert_array_equal(np.array(read_part(tensor, "weight")), quants.dequantize(raw, kind))


def test_a_quantized_vector_is_dequantized(tmp_path: Path) -> None:
    raw = random_blocks(np.random.default_rng(1), TYPE.Q8_0, 64)
    tensor = tensor_of(tmp_path / "f", raw, TYPE.Q8_0, 64)
    assert layout(tensor) == {"weight": ((64,), "float32")}
    np.testing.assert_array_equal(np.array(read_part(tensor, "weight")), quants.dequantize(raw, TYPE.Q8_0))


@pytest.mark.parametrize(
    ("kind", "stored", "dtype"),
    [
        (TYPE.F32, "<f4", mx.float32),
        (TYPE.F16, "<f2", mx.float16),
        (TYPE.F64, "<f8", mx.float32),
        (TYPE.I8, "<i1", mx.int8),
        (TYPE.I16, "<i2", mx.int16),
        (TYPE.I32, "<i4", mx.int32),
        (TYPE.I64, "<i8", mx.int64),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_plain_types_stay(tmp_path: Path, kind: GGMLQuantizationType, stored: str, dtype: mx.Dtype) -> None:
    values = np.array([[1, -2, 3], [0, 127, -128]], dtype=stored)
    array = read_part(tensor_of(tmp_path / "f", values, kind, 2, 3), "weight")
    assert array.dtype == dtype
    assert array.tolist() == values.tolist()


def test_bfloat16_stays(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], dtype="<u2")
    array = read_part(tensor_of(tmp_path / "f", bits, TYPE.BF16, 4), "weight")
    assert array.dtype == mx.bfloat16
    assert array.view(mx.uint16).tolist() == bits.tolist()
    assert array[:3].tolist() == [1.0, -2.0, float("inf")]


@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 20])
def test_rows_come_back_from_interleaved_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """The order of llama.cpp's conversion, by its own formula: halves of a head become pairs."""
    monkeypatch.setattr(gguf_blocks, "_CHUNK_BYTES", chunk_bytes)
    heads, head_rows, width = 3, 8, 64
    values = np.arange(heads * head_rows * width, dtype=np.float32).reshape(-1, width)
    stored = values.reshape(heads, 2, head_rows // 2, width).swapaxes(1, 2).reshape(values.shape)
    tensor = tensor_of(tmp_path / "f", stored, TYPE.F32, *values.shape)
    assert np.array_equal(np.array(read_part(tensor, "weight", head_rows)), values)

    bias = tensor_of(tmp_path / "g", np.ascontiguousarray(stored[:, 0]), TYPE.F32, heads * head_rows)
    assert np.array_equal(np.array(read_part(bias, "weight", head_rows)), values[:, 0])

    raw = random_blocks(np.random.default_rng(0), TYPE.Q4_0, heads * head_rows, width)
    plain = tensor_of(tmp_path / "h", raw, TYPE.Q4_0, heads * head_rows, width)
    for part in layout(plain):
        before = np.array(read_part(plain, part)).reshape(heads, head_rows // 2, 2, -1)
        after = np.array(read_part(plain, part, head_rows))
        assert np.array_equal(after, before.swapaxes(1, 2).reshape(after.shape)), "rows move whole"


@pytest.mark.parametrize("kind", [TYPE.Q4_0, TYPE.Q8_0, TYPE.Q6_K, TYPE.F16], ids=lambda kind: kind.name)
def test_chunks_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: GGMLQuantizationType
) -> None:
    rng = np.random.default_rng(2)
    raw = random_blocks(rng, kind, 7, 256) if kind in HALVES else rng.normal(size=(7, 256)).astype("<f2")
    tensor = tensor_of(tmp_path / "f", raw, kind, 7, 256)
    whole = {part: read_part(tensor, part).tolist() for part in layout(tensor)}
    monkeypatch.setattr(gguf_blocks, "_CHUNK_BYTES", 2 * raw[0].nbytes)
    assert {part: read_part(tensor, part).tolist() for part in layout(tensor)} == whole


@pytest.mark.parametrize(("kind", "scale"), [(TYPE.Q8_0, 512.0), (TYPE.Q4_0, 8192.0), (TYPE.Q4_1, np.inf)])
def test_scales_beyond_float16_are_refused(tmp_path: Path, kind: GGMLQuantizationType, scale: float) -> None:
    raw = random_blocks(np.random.default_rng(0), kind, 1, 32)
    raw[..., 0:2] = np.array([scale], dtype="<f2").view(np.uint8)
    if kind == TYPE.Q4_1:
        raw[..., 2:4] = raw[..., 0:2]
    tensor = tensor_of(tmp_path / "f", raw, kind, 1, 32)
    with pytest.raises(WeightsError, match="too large for float16"):
        read_part(tensor, "biases")


def test_the_largest_scale_that_fits(tmp_path: Path) -> None:
    raw = random_blocks(np.random.default_rng(0), TYPE.Q8_0, 1, 32)
    raw[..., 0:2] = np.array([511.75], dtype="<f2").view(np.uint8)
    tensor = tensor_of(tmp_path / "f", raw, TYPE.Q8_0, 1, 32)
    np.testing.assert_array_equal(multiplied_out(tensor), quants.dequantize(raw, TYPE.Q8_0))


def test_file_cut_after_opening(tmp_path: Path) -> None:
    tensor = tensor_of(tmp_path / "f", np.zeros((4, 4), dtype="<f4"), TYPE.F32, 4, 4)
    (tmp_path / "f").write_bytes(b"short")
    with pytest.raises(WeightsError, match="ended inside `t`"):
        read_part(tensor, "weight")


@pytest.mark.parametrize("kind", [TYPE.Q8_1, TYPE.Q8_K], ids=lambda kind: kind.name)
def test_undecodable_type_is_named_at_open(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    from gguf import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.zeros((2, block_bytes), dtype=np.uint8)
    tensor = tensor_of(tmp_path / "f", raw, kind, 2, block)
    with pytest.raises(WeightsError, match=rf"`t` .* type {kind.name}, which cannot be decoded"):
        layout(tensor)


def test_same_packing_as_mlx_itself(tmp_path: Path) -> None:
    """mx.load reads three of the types into the same form: equal bit for bit."""
    rng = np.random.default_rng(3)
    kinds = {"attn_q": TYPE.Q4_0, "attn_v": TYPE.Q4_1, "ffn_gate": TYPE.Q8_0}
    tensors = {
        f"blk.0.{name}.weight": (random_blocks(rng, kind, 8, 64), kind) for name, kind in kinds.items()
    }
    path = write_gguf(
        tmp_path / "m.gguf", "qwen2", TINY, {"token_embd.weight": np.ones((4, 64), "f4"), **tensors}
    )
    theirs = mx.load(str(path))
    ours = open_checkpoint(path)
    names = {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj", "ffn_gate": "mlp.gate_proj"}
    for gguf_name, name in names.items():
        for part in ("weight", "scales", "biases"):
            array = ours.load(f"model.layers.0.{name}.{part}")
            expected = theirs[f"blk.0.{gguf_name}.{part}"]
            assert array.dtype == expected.dtype
            assert mx.array_equal(array, expected), (gguf_name, part)


def test_tiny_model_equals_the_reference_decoder(tmp_path: Path) -> None:
    """Every tensor of a llama in ten block types, through names, permutation and packing."""
    source = tiny_tensors()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", TINY, source))
    quantization = checkpoint.quantization
    assert quantization is not None
    from mlxgen.checkpoint.gguf_names import FAMILIES, hub_name

    for name, data in source.items():
        expected = quants.dequantize(*data) if isinstance(data, tuple) else data
        if "attn_q." in name or "attn_k." in name:
            expected = expected.reshape(-1, 8, 2, 64).swapaxes(1, 2).reshape(expected.shape)
        ours = hub_name(name, FAMILIES["llama"])
        assert ours is not None
        stem = ours.removesuffix(".weight")
        array = checkpoint.load(ours)
        if f"{stem}.scales" in checkpoint.tensors:
            entry = quantization.get(stem) or {
                key: quantization[key] for key in ("group_size", "bits", "mode")
            }
            scales, biases = (
                checkpoint.load(f"{stem}.{part}").astype(mx.float32) for part in ("scales", "biases")
            )
            array = mx.dequantize(array, scales, biases, **entry)
        elif array.ndim > 1:
            assert quantization[stem] is False
        np.testing.assert_array_equal(np.array(array), expected)


@pytest.mark.parametrize("kind", [TYPE.Q8_0, TYPE.Q4_K, TYPE.Q6_K, TYPE.F16], ids=lambda kind: kind.name)
def test_decoding_needs_no_second_copy(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(0)
    raw = random_blocks(rng, kind, 4096, 512) if kind in HALVES else np.zeros((4096, 512), dtype="<f2")
    tensor = tensor_of(tmp_path / "f", raw, kind, 4096, 512)
    mx.clear_cache()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    held = [read_part(tensor, part) for part in layout(tensor)]
    mx.eval(held)
    assert mx.get_peak_memory() - start < 1.01 * sum(array.nbytes for array in held) + 10_000


def test_a_checkpoint_prints_short(tmp_path: Path) -> None:
    """Not with its vocabulary, as in a traceback that shows variables."""
    assert len(repr(open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", TINY, tiny_tensors())))) < 500

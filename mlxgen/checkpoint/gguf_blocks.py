"""From GGUF blocks to MLX arrays: as they are, in MLX's own quantized form, or dequantized.

Block layouts: ggml-common.h of https://github.com/ggml-org/ggml. A row is a number of blocks of 32 values
(256 for the K types); d and m are the scale and offset of a block. MLX's affine form is w = scale * q + bias
over groups of 32, with q packed as a little-endian stream of bits. The types that fit it are kept so, exact:
in float32, w is what the reference decoder gives. The rest becomes float32, exact too; cast it as you like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.checkpoint.gguf_file import GgufTensor
from mlxgen.errors import WeightsError

GROUP = 32
_CHUNK_BYTES = 1 << 22  # of the file at a time; the decoders need some ten times that for a moment

# GGML type -> (MLX dtype, NumPy dtype in the file). bfloat16 is moved as its bits.
_PLAIN = {
    0: ("float32", "<f4"), 1: ("float16", "<f2"), 28: ("float32", "<f8"), 30: ("bfloat16", "<u2"),
    24: ("int8", "<i1"), 25: ("int16", "<i2"), 26: ("int32", "<i4"), 27: ("int64", "<i8"),
}  # fmt: skip

Decode = Callable[[np.ndarray], np.ndarray]  # uint8 [n, bytes of a block] -> [n, values]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A block type that MLX's quantized matrices hold without loss."""

    bits: int
    parts: Mapping[str, Decode]
    mode: str = "affine"
    scale_dtype: str = "float16"

    def entry(self) -> dict[str, Any]:
        return {"group_size": GROUP, "bits": self.bits, "mode": self.mode}


def kept(tensor: GgufTensor) -> Kept | None:
    """How MLX keeps this tensor quantized, None if it does not."""
    return _KEPT.get(tensor.type) if len(tensor.shape) > 1 else None


def layout(tensor: GgufTensor) -> dict[str, tuple[tuple[int, ...], str]]:
    """What a tensor loads as: part ("weight", and "scales", "biases" where kept) -> (shape, MLX dtype).

    Raises WeightsError for a type that nobody here can decode.
    """
    form = kept(tensor)
    if form is None:
        if tensor.type not in _PLAIN:
            _check_decodable(tensor)
        return {"weight": (tensor.shape, _PLAIN.get(tensor.type, ("float32", ""))[0])}
    *rows, width = tensor.shape
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"weight": ((*rows, width * form.bits // 32), "uint32")}
    for part in form.parts:
        if part != "weight":
            shapes[part] = ((*rows, width // GROUP), form.scale_dtype)
    return shapes


def read_part(tensor: GgufTensor, part: str, head_rows: int = 0) -> mx.array:
    """One part of a tensor, decoded straight into the memory of the array.

    head_rows: 0, or the rows of one attention head, where they are stored for interleaved rotary embeddings,
    in pairs (0, D/2), (1, D/2 + 1), ...; they are put back in order.
    Raises WeightsError if the data cannot be read, or a scale is too large for MLX's form.
    """
    shape, dtype = layout(tensor)[part]
    raw_dtype = "uint16" if dtype == "bfloat16" else dtype
    array = mx.zeros(shape, dtype=getattr(mx, raw_dtype))
    mx.eval(array)
    # A view, not a copy: MLX arrays share their memory with NumPy.
    target = np.array(array, copy=False)
    one_row = len(tensor.shape) == 1 and not head_rows  # a vector that must be reordered is a column
    rows = 1 if one_row else prod(tensor.shape[: max(1, len(tensor.shape) - 1)])
    target = target.view(np.uint8 if dtype == "uint32" else target.dtype).reshape(rows, -1)
    decode = _decoder(tensor, part)
    start = 0
    for raw in _chunks(tensor, rows, head_rows):
        target[start : start + len(raw)] = decode(raw)
        start += len(raw)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array


def _chunks(tensor: GgufTensor, rows: int, head_rows: int) -> Iterator[np.ndarray]:
    """The bytes of some rows at a time, uint8 [rows, bytes of a row]."""
    if not rows:
        return
    row_bytes = tensor.nbytes // rows
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    if head_rows:
        step = head_rows * max(1, step // head_rows)
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            raw = np.fromfile(stream, dtype=np.uint8, count=count * row_bytes)
            if raw.size != count * row_bytes:
                raise WeightsError(
                    f"`{tensor.file}` ended inside `{tensor.name}`. Has it changed since it was opened?"
                )
            raw = raw.reshape(count, row_bytes)
            if head_rows:
                raw = raw.reshape(-1, head_rows // 2, 2, row_bytes).swapaxes(1, 2).reshape(count, row_bytes)
            yield raw


def _decoder(tensor: GgufTensor, part: str) -> Decode:
    """bytes of rows -> values of rows, for one part."""
    form = kept(tensor)
    if form is not None:
        block_bytes = _BLOCK_BYTES[tensor.type]

        def decode_kept(raw: np.ndarray) -> np.ndarray:
            blocks = raw.reshape(-1, block_bytes)
            with np.errstate(over="ignore", invalid="ignore"):
                values = form.parts[part](blocks)
            if part == "biases" and not np.isfinite(values).all():
                raise WeightsError(
                    f"`{tensor.name}` in {tensor.file} has scales too large for float16, or not finite."
                )
            return values.reshape(len(raw), -1)

        return decode_kept
    if tensor.type in _PLAIN:
        return lambda raw: raw.view(_PLAIN[tensor.type][1])
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType(tensor.type)
    return lambda raw: quants.dequantize(raw, kind)


def _check_decodable(tensor: GgufTensor) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType(tensor.type)
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (NotImplementedError, KeyError):
        raise WeightsError(
            f"`{tensor.name}` in {tensor.file} has type {kind.name}, which cannot be decoded."
        ) from None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 number at byte `at` of every block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, 16] bytes -> [n, 32]: first the low halves, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _pack4(values: np.ndarray) -> np.ndarray:
    return values[:, 0::2] | values[:, 1::2] << 4


def _pack5(values: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(values[..., None], axis=-1, count=5, bitorder="little")
    return np.packbits(bits.reshape(len(values), -1), axis=-1, bitorder="little")


def _with_fifth_bit(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Values of 4 bits [n, 32] and one more bit each, [n, 4] bytes."""
    return values | np.unpackbits(bits, axis=1, bitorder="little") << 4


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of the 8 groups in a block of 256, float32 [n, 8] each: 6 bits times a float16."""
    s = blocks[:, 4:16]
    low, high, rest = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    offsets = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    return _half(blocks, 0).astype(np.float32) * scales, _half(blocks, 2).astype(np.float32) * offsets


def _k_values(blocks: np.ndarray, high_bits: bool) -> np.ndarray:
    """[8 n, 32] values: 32 bytes hold a group in their low halves and the next one in the high ones."""
    packed = blocks[:, -128:].reshape(-1, 4, 1, 32)
    values = packed >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1) & 15
    values = values.reshape(-1, 8, 32)
    if high_bits:
        groups = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
        values = values | (blocks[:, None, 16:48] >> groups & 1) << 4
    return values.reshape(-1, 32)


_BLOCK_BYTES = {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 12: 144, 13: 176, 39: 17}
_KEPT = {
    # Q4_0: d * (q - 8)
    2: Kept(bits=4, parts={
        "weight": lambda b: _pack4(_nibbles(b[:, 2:])), "scales": lambda b: _half(b, 0),
        "biases": lambda b: _half(b, 0) * np.float16(-8)}),
    # Q4_1: d * q + m
    3: Kept(bits=4, parts={
        "weight": lambda b: _pack4(_nibbles(b[:, 4:])), "scales": lambda b: _half(b, 0),
        "biases": lambda b: _half(b, 2)}),
    # Q5_0: d * (q - 16)
    6: Kept(bits=5, parts={
        "weight": lambda b: _pack5(_with_fifth_bit(_nibbles(b[:, 6:]), b[:, 2:6])),
        "scales": lambda b: _half(b, 0),
        "biases": lambda b: _half(b, 0) * np.float16(-16)}),
    # Q5_1: d * q + m
    7: Kept(bits=5, parts={
        "weight": lambda b: _pack5(_with_fifth_bit(_nibbles(b[:, 8:]), b[:, 4:8])),
        "scales": lambda b: _half(b, 0),
        "biases": lambda b: _half(b, 2)}),
    # Q8_0: d * q, q signed
    8: Kept(bits=8, parts={
        "weight": lambda b: b[:, 2:] ^ 128, "scales": lambda b: _half(b, 0),
        "biases": lambda b: _half(b, 0) * np.float16(-128)}),
    # Q4_K, Q5_K: d * scale * q - m * offset; the product of a float16 and 6 bits needs float32
    12: Kept(bits=4, scale_dtype="float32", parts={
        "weight": lambda b: _pack4(_k_values(b, False)), "scales": lambda b: _k_scales(b)[0],
        "biases": lambda b: -_k_scales(b)[1]}),
    13: Kept(bits=5, scale_dtype="float32", parts={
        "weight": lambda b: _pack5(_k_values(b, True)), "scales": lambda b: _k_scales(b)[0],
        "biases": lambda b: -_k_scales(b)[1]}),
    # MXFP4: the same codes and shared exponents as MLX's mode of that name
    39: Kept(bits=4, mode="mxfp4", scale_dtype="uint8", parts={
        "weight": lambda b: _pack4(_nibbles(b[:, 1:])), "scales": lambda b: b[:, :1]}),
}  # fmt: skip

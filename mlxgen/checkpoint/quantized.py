"""Checkpoints quantized by other tools: what their tensors become, by config.json's `quantization_config.quant_method`.

    fp8, fbgemm_fp8      8-bit floats with a scale for each block, row or matrix -> plain weights
    compressed-tensors   integers or 8-bit floats, packed or not                 -> MLX's packed form, or plain weights
    gptq, awq            4-bit (gptq also 2 and 8-bit) integers with zero points -> MLX's packed form, or plain weights
    mxfp4                4-bit floats in blocks of 32                            -> MLX's packed form

Whatever stays packed holds the same integers, only arranged otherwise; MLX computes q * scale + bias, where these tools
compute (q - zero) * scale. Formats: transformers integrations/finegrained_fp8 and mxfp4, AutoGPTQ, AutoAWQ,
compressed-tensors.

Shapes: out rows, in columns, G groups along the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxgen.checkpoint.tensor import Tensor, Tensors
from mlxgen.errors import ModelError, WeightsError

Load = Callable[[], mx.array]
_GROUP_SIZES = (128, 64, 32)  # of MLX's affine quantization
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each 4 bits of a word belong to, from the lowest on
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale", "output_scale")  # of activations and caches


def decoded(tensors: Tensors, config: Mapping[str, Any], dtype: mx.Dtype | None, *, exact: bool) -> Tensors:
    """The same tensors in forms that MLX has. Plain weights are of `dtype`, by default bfloat16.

    exact: scales and zero points of packed weights stay in float32, for those who unpack them; else they are of the
    type of the checkpoint's scales, in which a zero point times a scale may be rounded.
    Raises ModelError for a method or a variant that is not supported, before anything is read.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or "quant_method" not in settings:
        return tensors
    method = settings["quant_method"]
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        raise ModelError(f"`quantization_config.quant_method` must be one of {known}, but is {method!r}.")
    out = _METHODS[method]({n: t for n, t in tensors.items() if not n.endswith(_UNUSED)}, settings)
    for name, tensor in out.items():
        if tensor.decoded:
            stored = None if exact else getattr(mx, tensor.dtype or "", None)
            kind = (stored or mx.float32) if name.endswith((".scales", ".biases")) else dtype or mx.bfloat16
            out[name] = replace(tensor, load=_then(lambda x, kind: x.astype(kind), tensor.load, kind), decoded=False)
    return out


def _then(function: Callable[..., mx.array], load: Load, *arguments: Any) -> Load:
    return lambda: function(load(), *arguments)


def _modules(tensors: Tensors, suffix: str) -> list[str]:
    return [name.removesuffix(f".{suffix}") for name in tensors if name.endswith(f".{suffix}")]


# 8-bit numbers with scales


def _scaled(tensors: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """`weight` in 8 bits and `weight_scale_inv` or `weight_scale` (a number, or one for each row or block)."""
    out = dict(tensors)
    block = settings.get("weight_block_size")
    for suffix in ("weight_scale_inv", "weight_scale"):
        for module in _modules(tensors, suffix):
            weight, scale = tensors[f"{module}.weight"], out.pop(f"{module}.{suffix}")
            out[f"{module}.weight"] = _times_scale(f"{module}.{suffix}", weight, scale, block)
    return out


def _times_scale(name: str, weight: Tensor, scale: Tensor, block: Any) -> Tensor:
    by_row = scale.shape in ((weight.shape[0],), (weight.shape[0], 1))
    by_block = len(scale.shape) == 2 and not by_row and scale.shape != (1, 1)
    if by_block:
        rows, columns = block or (0, 0)
        want = tuple(-(-n // max(b, 1)) for n, b in zip(weight.shape, (rows, columns), strict=True))
        if scale.shape != want:
            raise WeightsError(f"{name} must have shape {want}, one scale for each block, but has {scale.shape}.")
    elif not by_row and scale.shape not in ((), (1,), (1, 1)):
        raise WeightsError(f"{name} must be one number or one for each row, but has shape {scale.shape}.")

    def load() -> mx.array:
        values, scales = _as_float(weight), _as_float(scale)
        if not by_block:
            return values * scales.reshape((-1, 1) if by_row else (1,))
        # Whole blocks at once; what is left over at the edges is cut off.
        scales = mx.repeat(mx.repeat(scales, rows, axis=0)[: weight.shape[0]], columns, axis=1)
        return values * scales[:, : weight.shape[1]]

    return Tensor(shape=weight.shape, load=load, decoded=True)


def _as_float(tensor: Tensor) -> mx.array:
    array = tensor.load()
    if tensor.dtype == "float8_e8m0":
        return mx.exp2(array.astype(mx.float32) - 127)
    return mx.from_fp8(array, mx.float32) if tensor.dtype == "float8_e4m3" else array.astype(mx.float32)


# Integers with zero points


def _affine(
    out: Tensors, module: str, codes: Load, scale: Tensor, scales: Load, zeros: Load, shape: tuple[int, ...]
) -> None:
    """Put a module's tensors into `out`: packed where MLX has such groups.

    codes: the integers [out, in * bits / 32], packed as in MLX. scales, zeros: [out, G] in float32. shape: (out, in, G,
    bits). scale: the tensor that the scales come from.
    """
    rows, columns, groups, bits = shape
    group = columns // groups
    size = next((s for s in _GROUP_SIZES if group % s == 0), None)
    if size is None:
        out[f"{module}.weight"] = Tensor(
            shape=(rows, columns),
            load=lambda: _plain(codes(), bits, mx.repeat(scales(), group, axis=1), mx.repeat(zeros(), group, axis=1)),
            decoded=True,
        )
        return
    times, small = group // size, (rows, columns // size)
    quantization = {"group_size": size, "bits": bits, "mode": "affine"}
    out[f"{module}.weight"] = Tensor(shape=(rows, columns * bits // 32), load=codes, quantization=quantization)
    for name, load in (("scales", scales), ("biases", lambda: -zeros() * scales())):
        spread = _then(lambda x: mx.repeat(x, times, axis=1), load)
        out[f"{module}.{name}"] = Tensor(shape=small, load=spread, decoded=True, dtype=scale.dtype)


def _plain(words: mx.array, bits: int, scales: mx.array, zeros: mx.array) -> mx.array:
    return (unpacked(words, bits).astype(mx.float32) - zeros) * scales


def unpacked(words: mx.array, bits: int) -> mx.array:
    """Integers from the words that hold them, from the lowest bits on: [..., n] -> [..., n * 32 / bits]."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    codes = (words.view(mx.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)


def packed(codes: mx.array, bits: int) -> mx.array:
    """The inverse of `unpacked`."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    grouped = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, 32 // bits)
    return (grouped << shifts).sum(axis=-1).astype(mx.uint32)


def _shared(load: Load, uses: int = 2) -> Load:
    """A loader whose array is kept until it was asked for `uses` times: reading a file twice costs more."""
    kept: list[mx.array] = []
    left = 0

    def once() -> mx.array:
        nonlocal left
        if not kept:
            kept.append(load())
            left = uses
        left -= 1
        return kept[0] if left else kept.pop()

    return once


def _gptq(tensors: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """`qweight` [in * bits / 32, out], `qzeros` [G, out * bits / 32] minus one, `scales` [G, out], `g_idx` [in]."""
    bits = _supported_bits(settings.get("bits"), (2, 4, 8))
    shift = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    out = dict(tensors)
    for module in _modules(tensors, "qweight"):
        weight, zero, scale = (_taken(out, module, s) for s in ("qweight", "qzeros", "scales"))
        index = out.pop(f"{module}.g_idx", None)
        shape = (weight.shape[1], weight.shape[0] * 32 // bits, scale.shape[0], bits)
        codes = _then(lambda words: mx.contiguous(words.view(mx.uint32).T), weight.load)
        scales = _shared(_then(_turned, scale.load))
        zeros = _then(lambda words: _turned(unpacked(words, bits) + shift), zero.load)
        if settings.get("desc_act") and index is not None:  # the groups are not runs of columns
            load = _by_index(codes, bits, scales, zeros, index.load)
            out[f"{module}.weight"] = Tensor(shape=shape[:2], load=load, decoded=True)
        else:
            _affine(out, module, codes, scale, scales, zeros, shape)
    return out


def _by_index(codes: Load, bits: int, scales: Load, zeros: Load, which: Load) -> Load:
    def load() -> mx.array:
        index = which()
        return _plain(codes(), bits, scales()[:, index], zeros()[:, index])

    return load


def _turned(x: mx.array) -> mx.array:
    return x.T.astype(mx.float32)


def _awq(tensors: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """`qweight` [in, out / 8], `qzeros` [G, out / 8], columns in AWQ's order, `scales` [G, out]."""
    bits = _supported_bits(settings.get("bits"), (4,))
    if str(settings.get("version", "gemm")).lower() != "gemm":
        raise ModelError(f"`quantization_config.version` must be gemm, but is {settings['version']!r}.")
    out = dict(tensors)
    for module in _modules(tensors, "qweight"):
        weight, zero, scale = (_taken(out, module, s) for s in ("qweight", "qzeros", "scales"))
        shape = (weight.shape[1] * 8, weight.shape[0], scale.shape[0], bits)
        codes = _then(lambda words: packed(_awq_columns(words).T, 4), weight.load)
        zeros = _then(lambda words: _turned(_awq_columns(words)), zero.load)
        _affine(out, module, codes, scale, _shared(_then(_turned, scale.load)), zeros, shape)
    return out


def _awq_columns(words: mx.array) -> mx.array:
    """[rows, n] words -> [rows, 8 n] integers in the order of the columns."""
    codes = unpacked(words, 4).reshape(words.shape[0], -1, 8)
    return codes[..., mx.array([_AWQ_ORDER.index(i) for i in range(8)])].reshape(words.shape[0], -1)


def _compressed(tensors: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """compressed-tensors: `weight_packed` [out, in * bits / 32] with `weight_scale` [out, G], or 8-bit weights."""
    kind = settings.get("format")
    if kind in ("float-quantized", "int-quantized", "naive-quantized"):
        return _scaled(tensors, settings)
    if kind != "pack-quantized":
        raise ModelError(
            "`quantization_config.format` must be pack-quantized, float-quantized, int-quantized or naive-quantized, "
            f"but is {kind!r}."
        )
    groups = [g["weights"] for g in settings.get("config_groups", {}).values() if g.get("weights")]
    several = {g.get("num_bits") for g in groups}
    bits = _supported_bits(several.pop() if len(several) == 1 else several, (2, 4, 8))
    out = dict(tensors)
    for module in _modules(tensors, "weight_packed"):
        words, scale = _taken(out, module, "weight_packed"), _taken(out, module, "weight_scale")
        out.pop(f"{module}.weight_shape", None)
        if f"{module}.weight_g_idx" in out:
            raise ModelError(f"{module}: columns in another order (`weight_g_idx`) are not supported.")
        shape = (words.shape[0], words.shape[1] * 32 // bits, scale.shape[1], bits)
        scales = _shared(_then(lambda x: x.astype(mx.float32), scale.load))
        zeros = _zero_points(out.pop(f"{module}.weight_zero_point", None), shape)
        _affine(out, module, _then(lambda x: x.view(mx.uint32), words.load), scale, scales, zeros, shape)
    return out


def _zero_points(tensor: Tensor | None, shape: tuple[int, ...]) -> Load:
    """[out, G]; packed along the rows, or the middle of the range."""
    rows, _, groups, bits = shape
    if tensor is None:
        return lambda: mx.full((rows, groups), 1 << (bits - 1), mx.float32)
    return _then(lambda words: _turned(unpacked(words.T, bits)[:, :rows]), tensor.load)


def _supported_bits(bits: Any, known: tuple[int, ...]) -> int:
    if bits not in known:
        raise ModelError(f"`quantization_config`: bits must be {' or '.join(map(str, known))}, but is {bits!r}.")
    return bits


def _taken(tensors: Tensors, module: str, suffix: str) -> Tensor:
    name = f"{module}.{suffix}"
    if name not in tensors:
        raise WeightsError(f"{name} is missing from the checkpoint.")
    return tensors.pop(name)


# 4-bit floats


def _mxfp4(tensors: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """`name_blocks` [..., out, G, 16] in bytes and `name_scales` [..., out, G] get the names of a packed weight."""
    out = dict(tensors)
    for name in [n.removesuffix("_blocks") for n in tensors if n.endswith("_blocks")]:
        blocks = out.pop(f"{name}_blocks")
        *front, groups, size = blocks.shape
        rows = (*front, groups * size)
        out[f"{name}.weight"] = Tensor(
            shape=(*front, groups * size // 4),
            load=_then(lambda x, rows: x.reshape(rows).view(mx.uint32), blocks.load, rows),
            quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"},
        )
        if f"{name}_scales" not in out:
            raise WeightsError(f"{name}_scales is missing from the checkpoint.")
        out[f"{name}.scales"] = out.pop(f"{name}_scales")
    return out


def _left(tensors: Tensors, settings: Mapping[str, Any]) -> Tensors:
    """The blueprint sees to it."""
    return tensors


_METHODS: dict[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
    "fp8": _scaled,
    "fbgemm_fp8": _scaled,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "bitnet": _left,
}

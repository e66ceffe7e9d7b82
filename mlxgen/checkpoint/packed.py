"""Weights in MLX's packed form (`weight`, `scales`, and `biases` in the affine mode) back to plain ones."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlxgen.checkpoint.tensor import Tensor, Tensors

_PACKED = ("scales", "biases")
_UNPACK_VALUES = 1 << 22  # values unpacked at once


def dequantized(tensors: Tensors) -> Tensors:
    """The same tensors with every packed weight as a plain one, unpacked when it is read."""
    out = {}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        if suffix not in _PACKED or weight is None or weight.quantization is None:
            out[name] = unpack(tensors, name)
    return out


def unpack(tensors: Tensors, name: str) -> Tensor:
    """The plain form of one tensor; itself, if it is not packed."""
    tensor, module = tensors[name], name.rpartition(".")[0]
    if tensor.quantization is None:
        return tensor
    load = _unpack(tensor, tensors[f"{module}.scales"], tensors.get(f"{module}.biases"))
    columns = tensor.shape[-1] * 32 // tensor.quantization["bits"]
    return Tensor(shape=(*tensor.shape[:-1], columns), load=load)


def _unpack(weight: Tensor, scales: Tensor, biases: Tensor | None) -> Callable[[], mx.array]:
    """Dequantize in slices along the first axis: on a CPU, MLX takes three times the result while it unpacks."""

    def load() -> mx.array:
        parts = [weight.load(), scales.load(), biases.load() if biases else None]
        if parts[1].dtype == mx.float16:  # so that 4-bit values times their scale are not rounded again
            parts[1:] = [p if p is None else p.astype(mx.float32) for p in parts[1:]]
        rows = parts[0].shape[0]
        step = max(1, rows * _UNPACK_VALUES // (parts[0].size * 32 // weight.quantization["bits"]))  # type: ignore[index]
        out = None
        for start in range(0, rows, step):
            piece = mx.dequantize(*[p if p is None else p[start : start + step] for p in parts], **weight.quantization)  # type: ignore[arg-type,misc]
            if rows <= step:
                return piece
            if out is None:
                out = mx.zeros((rows, *piece.shape[1:]), piece.dtype)
            out[start : start + step] = piece
            mx.eval(out)
        assert out is not None
        return out

    return load

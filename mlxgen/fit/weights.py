"""Bytes of the weights in the form in which they are held, from the headers of the files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxgen.checkpoint import Checkpoint
from mlxgen.decoder import Decoder


def weights_bytes(
    decoder: Decoder, config: Mapping[str, Any], checkpoint: Checkpoint | None, dtype: mx.Dtype, *, dequantize: bool
) -> int:
    """Of a decoder that is not loaded. dtype: of plain weights. Without a checkpoint it is told by `config` alone."""
    count = sum(math.prod(array.shape) for _, array in tree_flatten(decoder.parameters()))
    quantization = config.get("quantization") if checkpoint is None else checkpoint.quantization
    if dequantize or not quantization:
        return count * dtype.size
    if checkpoint is None:
        bits, group = quantization.get("bits", 4), quantization.get("group_size", 64)
        return round(count * (bits / 8 + 2 * dtype.size / group))
    packed = [info.nbytes for info in checkpoint.tensors.values() if info.dtype.startswith("uint")]
    plain = [math.prod(info.shape) for info in checkpoint.tensors.values() if not info.dtype.startswith("uint")]
    return sum(packed) + sum(plain) * dtype.size


def layer_bytes(decoder: Decoder, dtype: mx.Dtype) -> int:
    """The largest layer's: while it is read, what it is made of may stand beside it."""
    sizes = [sum(a.size for _, a in tree_flatten(layer.parameters())) for layer in decoder.layers]
    return max(sizes) * dtype.size

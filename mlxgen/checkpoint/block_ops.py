"""Load-time operations for one kind of block: experts in fused tensors, the joint projection of latent attention.

Shapes: E experts, I expert width, D hidden, H heads, R latent width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxgen.checkpoint.packed import unpack
from mlxgen.checkpoint.tensor import Arrays, Shapes, Tensor, Tensors, around
from mlxgen.errors import WeightsError


@dataclass(frozen=True, kw_only=True)
class FusedExperts:
    """`path.gate_up_proj` [E, 2I, D] becomes gate_proj.weight and up_proj.weight [E, I, D]; `path.down_proj` gets its
    suffix.

    transposed: the tensors are stored [E, D, 2I] and [E, I, D]. interleaved: gate and up take turns, instead of
    standing behind each other. Biases are `gate_up_proj_bias` [E, 2I] and `down_proj_bias`. Packed tensors have their
    suffixes already and are never transposed.
    """

    path: str
    transposed: bool = False
    interleaved: bool = False

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        pattern = re.compile(
            rf"((?:.*\.)?{re.escape(self.path)}\.)(gate_up_proj|down_proj)(?:_(bias)|\.(weight|scales|biases|bias))?"
        )
        out: Tensors = {}
        for name, tensor in tensors.items():
            match = pattern.fullmatch(name)
            if match is None:
                out[name] = tensor
                continue
            before, module, bias, suffix = match.groups()
            if self.transposed and not bias and not suffix:
                tensor = _turned(tensor)
            suffix = bias or suffix or "weight"
            if module == "down_proj":
                out[f"{before}down_proj.{suffix}"] = tensor
            else:
                out[f"{before}gate_proj.{suffix}"] = self._half(tensor, name, 0)
                out[f"{before}up_proj.{suffix}"] = self._half(tensor, name, 1)
        return out

    def _half(self, tensor: Tensor, name: str, which: int) -> Tensor:
        E, rows, *rest = tensor.shape
        if rows % 2:
            raise WeightsError(f"{name} must have an even number of rows, half gate and half up, but has {rows}.")
        where = slice(which, None, 2) if self.interleaved else slice(which * rows // 2, (which + 1) * rows // 2)
        return replace(tensor, shape=(E, rows // 2, *rest), load=lambda: tensor.load()[:, where])

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            before, found, suffix = around(name, self.path)
            module, _, kind = suffix[1:].partition(".")
            stem = f"{before}{self.path}."
            if not found or module not in ("gate_proj", "up_proj", "down_proj") or f"{stem}{module}.scales" in arrays:
                out[name] = array  # packed experts stay apart, as in MLX's own checkpoints
                continue
            if module == "up_proj":
                continue
            target = f"{stem}gate_up_proj" if module == "gate_proj" else f"{stem}down_proj"
            whole = self._joined(array, arrays[f"{stem}up_proj.{kind}"]) if module == "gate_proj" else array
            turn = self.transposed and kind == "weight"
            out[target if kind == "weight" else f"{target}_{kind}"] = whole.swapaxes(1, 2) if turn else whole
        return out

    def _joined(self, gate: mx.array, up: mx.array) -> mx.array:
        if not self.interleaved:
            return mx.concatenate([gate, up], axis=1)
        return mx.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])


def _turned(tensor: Tensor) -> Tensor:
    *front, rows, columns = tensor.shape
    return replace(tensor, shape=(*front, columns, rows), load=lambda: tensor.load().swapaxes(-1, -2))


@dataclass(frozen=True, kw_only=True)
class FlatExperts:
    """`path.gate_proj`, `path.up_proj` and `path.down_proj` [E * I, D], all experts below each other, become weights
    [E, I, D], and [E, D, I] of down_proj.
    """

    path: str

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            _, found, module = around(f"{name}.", self.path)
            weight = f"{name}.weight"
            if not found or weight not in shapes:
                out[name] = tensor
                continue
            experts, rows = shapes[weight][0], tensor.shape[0]
            if rows % experts:
                raise WeightsError(f"{name} must have a multiple of {experts} rows, but has {rows}.")
            stacked = _stacked(tensor, experts)
            out[weight] = _turned(stacked) if module == ".down_proj." else stacked
        return out

    def save(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for name, array in arrays.items():
            _, found, suffix = around(name, self.path)
            if found and suffix.endswith("_proj.weight"):
                array = array.swapaxes(1, 2) if suffix == ".down_proj.weight" else array
                out[name.removesuffix(".weight")] = array.reshape(-1, array.shape[-1])
            else:
                out[name] = array
        return out


def _stacked(tensor: Tensor, experts: int) -> Tensor:
    rows, columns = tensor.shape
    shape = (experts, rows // experts, columns)
    return replace(tensor, shape=shape, load=lambda: tensor.load().reshape(shape))


@dataclass(frozen=True, kw_only=True)
class SplitLatent:
    """`path.kv_b_proj` [H * (nope + v), R] becomes embed_q [H, R, nope], transposed, and unembed_out [H, v, R].

    MLX's converted checkpoints may have the two already. Of a packed kv_b_proj, the transposed half is unpacked: its
    groups run along what is no longer the last axis.
    """

    path: str = "self_attn"

    def load(self, tensors: Tensors, shapes: Shapes) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            before, found, suffix = around(name, f"{self.path}.kv_b_proj")
            if not found:
                out[name] = tensor
                continue
            stem = f"{before}{self.path}."
            heads, latent, nope = shapes[f"{stem}embed_q.weight"]
            rows = nope + shapes[f"{stem}unembed_out.weight"][1]
            if tensor.shape[0] != heads * rows:
                raise WeightsError(f"{name} must have {heads} * {rows} rows, but has {tensor.shape[0]}.")
            out[f"{stem}unembed_out{suffix}"] = _of_heads(tensor, heads, slice(nope, rows))
            if suffix == ".weight":
                plain = unpack(tensors, name)
                if plain.shape[-1] != latent:
                    raise WeightsError(f"{name} must have {latent} columns, but has {plain.shape[-1]}.")
                out[f"{stem}embed_q.weight"] = _turned(_of_heads(plain, heads, slice(0, nope)))
        return out

    def save(self, arrays: Arrays) -> Arrays:
        out = dict(arrays)
        for name in arrays:
            before, found, suffix = around(name, f"{self.path}.embed_q")
            stem = f"{before}{self.path}."
            apart = any(f"{stem}{half}.scales" in arrays for half in ("embed_q", "unembed_out"))
            if not found or suffix != ".weight" or apart:
                continue
            keys, values = out.pop(name).swapaxes(1, 2), out.pop(f"{stem}unembed_out.weight")
            out[f"{stem}kv_b_proj.weight"] = mx.concatenate([keys, values], axis=1).reshape(-1, keys.shape[-1])
        return out


def _of_heads(tensor: Tensor, heads: int, rows: slice) -> Tensor:
    """The same rows of every head: [H * n, columns] -> [H, rows, columns]."""
    columns = tensor.shape[1]
    shape = (heads, rows.stop - rows.start, columns)
    return replace(tensor, shape=shape, load=lambda: tensor.load().reshape(heads, -1, columns)[:, rows])

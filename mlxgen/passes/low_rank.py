"""Low-rank changes of frozen maps: LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353).

W' = W + scale * B A, and with a magnitude m for each row, W' = m * (W + scale * B A) / |W + scale * B A|. What a module
here returns is what the change adds to the frozen map's result, so that several can be summed.

Shapes: E experts, r rank, V rows of an embedding. Parameters are laid out as in mlx-lm: `lora_a` [in, r] and `lora_b`
[r, out]; of experts [E, r, in] and [E, out, r]; of an embedding [V, r] and [r, width]. They are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxgen.decoder.moe import ExpertLinear, QuantizedExpertLinear

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_EXPERTS = (ExpertLinear, QuantizedExpertLinear)
_EMBEDDING = (nn.Embedding, nn.QuantizedEmbedding)
ADAPTABLE = (*_LINEAR, *_EXPERTS, *_EMBEDDING)
_TINY = 1e-24  # of a squared length: a row of zeros stays one
_UNPACK_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Factors:
    """One change in its plain form, whatever it changes: scale * b @ a, b [.., out, r], a [.., r, in].

    m: the lengths of the rows [.., out], of DoRA. use: of an embedding that is the output head too, which of the two
    is changed.
    """

    a: mx.array
    b: mx.array
    scale: float
    m: mx.array | None = None
    use: Literal["both", "lookup", "head"] = "both"

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def delta(self) -> mx.array:
        """What LoRA adds to a weight, float32 [.., out, in]."""
        return self.scale * (self.b.astype(mx.float32) @ self.a.astype(mx.float32))


def weight_shape(base: nn.Module) -> tuple[int, ...]:
    """The shape of a module's weight, unpacked."""
    *front, last = base["weight"].shape
    return (*front, last * 32 // base.bits) if "scales" in base else (*front, last)


def plain_weight(base: nn.Module, rows: slice = slice(None)) -> mx.array:
    """A module's weight or some of its rows (or experts), unpacked."""
    if "scales" not in base:
        return base["weight"][rows]
    parts = [base[name][rows] if name in base else None for name in ("weight", "scales", "biases")]
    return mx.dequantize(*parts, group_size=base.group_size, bits=base.bits, mode=base.mode)  # type: ignore[arg-type]


def squared_lengths(base: nn.Module) -> mx.array:
    """Of the rows of a module's weight, float32 [.., out]; a few are unpacked at a time."""
    step = max(1, _UNPACK_ROWS // math.prod(base["weight"].shape[1:-1]))
    parts = []
    for start in range(0, base["weight"].shape[0], step):
        parts.append(plain_weight(base, slice(start, start + step)).astype(mx.float32).square().sum(axis=-1))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


class Shared:
    """What the adapters of one decoder share.

    weights: how much each adapter counts, by name: a number, or one for each row of the forward pass [T].
    keys: for this step's dropout, one for each module; None: there is none.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float | mx.array] = {}
        self.keys: mx.array | None = None


class LowRank(nn.Module):
    """A change of one frozen map; `number` tells the modules of a decoder apart, for dropout."""

    transposed = False  # whether lora_a is `b`

    def __init__(self, factors: Factors, *, dropout: float = 0.0, ratio: float = 1.0):
        super().__init__()
        self.load(factors)
        self.dropout, self.ratio = dropout, ratio
        self.number, self.shared = 0, Shared()
        self._gain: mx.array | None = None

    def load(self, factors: Factors) -> None:
        self.scale, self.use = factors.scale, factors.use
        a, b = factors.a.astype(mx.float32), factors.b.astype(mx.float32)
        self.lora_a, self.lora_b = (mx.contiguous(array) for array in self.stored(a, b))
        if factors.m is not None:
            self.m = factors.m.astype(mx.float32)

    def stored(self, a: mx.array, b: mx.array, back: bool = False) -> tuple[mx.array, mx.array]:
        """(a, b) of Factors as lora_a and lora_b, or back."""
        return a.T, b.T

    def measure(self, base: nn.Module) -> None:
        """Note the lengths of the frozen rows, which DoRA needs at every step."""
        self._lengths = squared_lengths(base)

    def settle(self, base: nn.Module) -> None:
        """From now on nothing changes any more: what depends on the weights only is computed once."""
        if "m" in self:
            gain = self.gain(base)
            mx.eval(gain)
            self._gain = gain

    def unsettle(self) -> None:
        self._gain = None

    def gain(self, base: nn.Module) -> mx.array:
        """m / |W + scale * B A|, float32 [.., out]; the length gets no gradient (section 4.3 of the paper)."""
        if self.get("_gain") is not None:
            return self["_gain"]
        a, b = self.stored(self["lora_a"], self["lora_b"], back=True)
        products = b * self._through(base, a).astype(mx.float32) * (2 * self.scale)
        products = products + b * (b @ (a @ a.swapaxes(-1, -2))) * self.scale**2
        squares = mx.stop_gradient(self["_lengths"] + products.sum(axis=-1))
        return self["m"] / mx.sqrt(mx.maximum(squares, _TINY))

    def onto(self, out: mx.array, base: nn.Module, y: mx.array, *args: Any) -> mx.array:
        """`out`, the sum so far, plus this change."""
        return out + self(base, y, *args)

    def _through(self, base: nn.Module, a: mx.array) -> mx.array:
        """W a^T [.., out, r]: the rows of a [.., r, in] as inputs of the frozen map, without its bias."""
        y = base(a.astype(_dtype(base)))
        return (y - base["bias"] if "bias" in base else y).swapaxes(-1, -2)

    def _dropped(self, x: mx.array) -> mx.array:
        """x [..., in] with some elements left out, while training."""
        if not self.dropout or not self.training:
            return x
        assert self.shared.keys is not None, "dropout needs a key for each step: call set_dropout_key"
        keep = mx.random.bernoulli(1 - self.dropout, x.shape, key=self.shared.keys[self.number])
        return x * keep * (1 / (1 - self.dropout))


class LinearAdapter(LowRank):
    """A change of a linear map."""

    def __call__(self, base: nn.Module, y: mx.array, x: mx.array) -> mx.array:
        """x [..., in], y [..., out] what the frozen map makes of it -> what is added to y."""
        z = (self._dropped(x) @ self["lora_a"] * self.scale) @ self["lora_b"]
        if "m" in self:
            gain = self.gain(base)
            z = (gain - 1) * (y - base["bias"] if "bias" in base else y) + gain * z
        return z.astype(y.dtype)

    def onto(self, out: mx.array, base: nn.Module, y: mx.array, *args: Any) -> mx.array:
        if "m" in self or out.dtype != mx.float32:
            return super().onto(out, base, y, *args)
        (x,) = args  # product and sum in one kernel
        return mx.addmm(out, self._dropped(x) @ self["lora_a"], self["lora_b"], alpha=self.scale)


class ExpertAdapter(LowRank):
    """A change of each of E linear maps, see mlxgen.decoder.moe.ExpertLinear."""

    def __call__(
        self, base: nn.Module, y: mx.array, x: mx.array, experts: mx.array, rows: mx.array | None = None
    ) -> mx.array:
        by = {"rhs_indices": experts, "sorted_indices": rows is not None}
        x = self._dropped(x).astype(mx.float32)
        z = mx.gather_mm(x, self["lora_a"].swapaxes(-1, -2), **by)
        z = mx.gather_mm(z, self["lora_b"].swapaxes(-1, -2), **by) * self.scale
        if "m" in self:
            gain = self.gain(base)[experts][..., None, :]
            z = (gain - 1) * (y - base["bias"][experts][..., None, :] if "bias" in base else y) + gain * z
        return z.astype(y.dtype)

    def stored(self, a: mx.array, b: mx.array, back: bool = False) -> tuple[mx.array, mx.array]:
        return a, b

    def _through(self, base: nn.Module, a: mx.array) -> mx.array:
        experts = mx.arange(a.shape[0])
        y = base(a.astype(_dtype(base)), experts)
        return (y - base["bias"][:, None] if "bias" in base else y).swapaxes(-1, -2)


class EmbeddingAdapter(LowRank):
    """A change of an embedding, and of the output head that is tied to it. It has no dropout."""

    def __call__(self, base: nn.Module, y: mx.array, tokens: mx.array) -> mx.array:
        if self.use == "head":
            return mx.zeros_like(y)
        z = self["lora_a"][tokens] @ self["lora_b"] * self.scale
        if "m" in self:
            gain = self.gain(base)[tokens][..., None]
            z = (gain - 1) * y + gain * z
        return z.astype(y.dtype)

    def as_linear(self, base: nn.Module, y: mx.array, x: mx.array) -> mx.array:
        if self.use == "lookup":
            return mx.zeros_like(y)
        z = (x @ self["lora_b"].T) @ self["lora_a"].T * self.scale
        if "m" in self:
            gain = self.gain(base)
            z = (gain - 1) * y + gain * z
        return z.astype(y.dtype)

    def stored(self, a: mx.array, b: mx.array, back: bool = False) -> tuple[mx.array, mx.array]:
        return b, a

    def _through(self, base: nn.Module, a: mx.array) -> mx.array:
        return base.as_linear(a.astype(_dtype(base))).swapaxes(-1, -2)  # type: ignore[operator]


def adapter_class(base: nn.Module) -> type[LowRank]:
    if isinstance(base, _EMBEDDING):
        return EmbeddingAdapter
    return ExpertAdapter if isinstance(base, _EXPERTS) else LinearAdapter


def initial_factors(base: nn.Module, rank: int, scale: float, key: mx.array, *, dora: bool) -> Factors:
    """A change that changes nothing yet.

    As in the paper's code, A of a linear map is random and B zero; of an embedding the other way round.
    """
    *front, rows, columns = weight_shape(base)
    if isinstance(base, _EMBEDDING):
        a, b = mx.random.normal((rank, columns), key=key), mx.zeros((rows, rank))
    else:
        bound = 1 / math.sqrt(columns)
        a = mx.random.uniform(-bound, bound, (*front, rank, columns), key=key)
        b = mx.zeros((*front, rows, rank))
    return Factors(a=a, b=b, scale=scale, m=mx.sqrt(squared_lengths(base)) if dora else None)


def _dtype(base: nn.Module) -> mx.Dtype:
    """What a map computes in."""
    kept = base["scales"] if "scales" in base else base["weight"]
    return kept.dtype if mx.issubdtype(kept.dtype, mx.floating) else mx.float32

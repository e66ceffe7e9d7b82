"""Specs of the recurrent mixers: what they remember of the tokens before has a fixed size.

Names that end in _dim are elements of one head; `conv_width` is how many tokens a causal convolution sees, each channel
by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from mlxgen.blueprint.norms import NormSpec
from mlxgen.errors import require


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """What the recurrent mixers share: every whole number is a size, at least 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool):
                require(value > 0, field.name, "at least 1", value)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec(RecurrentSpec):
    """Gated delta rule (arXiv:2412.06464): a matrix for each head, from keys to values, that decays and is corrected.

    decay: one number per head and token, or one per key channel (Kimi Delta Attention, arXiv:2510.26692), then made by
    two projections through `rank` numbers, as is the gate on the output.
    beta_scale: 2 lets a correction overshoot (arXiv:2411.12537).
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    norm: NormSpec  # of each head's result, before the gate
    decay: Literal["head", "channel"] = "head"
    rank: int | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    beta_scale: float = 1.0
    activation: Literal["silu"] = "silu"  # after the convolution

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"a multiple of num_k_heads ({self.num_k_heads})"
        require(self.num_v_heads % self.num_k_heads == 0, "num_v_heads", rule, self.num_v_heads)
        require((self.rank is None) == (self.decay == "head"), "rank", "given just for a decay by channel", self.rank)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """Mamba (arXiv:2312.00752): `state_dim` numbers for each of `width` channels, each with its own decay."""

    width: int
    state_dim: int
    rank: int  # of the projection to the time steps
    conv_width: int
    conv_bias: bool = True
    bias: bool = False
    norm: NormSpec | None = None  # of the time steps' rank, and of B and C
    activation: Literal["silu"] = "silu"


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba-2 (arXiv:2405.21060): heads share a decay, groups of heads share B and C.

    step_limits: bounds of the time steps. gate_first: the gate is applied before the norm, not after it.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: NormSpec | None = None  # over each group's heads
    gate_first: bool = True
    activation: Literal["silu"] = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"a multiple of num_groups ({self.num_groups})"
        require(self.num_heads % self.num_groups == 0, "num_heads", rule, self.num_heads)
        require(len(self.step_limits) == 2, "step_limits", "two numbers", self.step_limits)


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """Gated short convolution: out(C * conv(B * x)), all from the layer's input (reference: transformers, LFM2)."""

    conv_width: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class RgLruSpec(RecurrentSpec):
    """Real-gated linear recurrent unit (Griffin, arXiv:2402.19427): one number for each of `width` channels."""

    width: int
    num_blocks: int  # of the block-diagonal gates
    conv_width: int
    activation: str  # of the branch beside the recurrence

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width % self.num_blocks == 0, "width", f"a multiple of num_blocks ({self.num_blocks})", self.width)


@dataclass(frozen=True, kw_only=True)
class LightningAttentionSpec(RecurrentSpec):
    """Lightning attention (arXiv:2401.04658): linear attention in which each head forgets at a fixed rate.

    The memory of head h of H (from 1) is multiplied by exp(-decay_scale * 2^(-8h/H)) at every token.
    """

    num_heads: int
    head_dim: int
    decay_scale: float
    norm: NormSpec  # of all heads' results together
    activation: Literal["silu"] = "silu"  # of queries, keys and values


RECURRENT: dict[str, type[RecurrentSpec]] = {
    "gated_delta_net": GatedDeltaNetSpec,
    "mamba": MambaSpec,
    "mamba2": Mamba2Spec,
    "short_conv": ShortConvSpec,
    "rg_lru": RgLruSpec,
    "lightning_attention": LightningAttentionSpec,
}

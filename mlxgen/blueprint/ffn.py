"""Specs of the feed-forward blocks: dense, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxgen.errors import require

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]


@dataclass(frozen=True, kw_only=True)
class ClampSpec:
    """gate <= limit, up in +-limit, then gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss)."""

    limit: float
    alpha: float = 1.702


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Feed-forward block: down(act(gate x) * up x) when gated (arXiv:2002.05202), else down(act(up x))."""

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    clamp: ClampSpec | None = None

    def __post_init__(self) -> None:
        require(self.width > 0, "width", "at least 1", self.width)


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Experts stand in `count` groups, and only the best `keep` groups take part (arXiv:2412.19437, section 2.1.2)."""

    count: int
    keep: int
    by: Literal["max", "top2"] = "top2"  # a group's score: its best expert, or the sum of its best two

    def __post_init__(self) -> None:
        require(1 <= self.keep <= self.count, "keep", f"from 1 to count ({self.count})", self.keep)


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Which experts see a token, and with what weight.

    select_bias: a learned number per expert that takes part in the choice, not in the weight.
    on_input: the weight multiplies what goes into the expert instead of what comes out (Llama 4).
    """

    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    softcap: float | None = None  # the logits are bent into (-softcap, softcap) first
    normalize: bool = True  # the chosen weights sum to 1
    epsilon: float = 0.0  # added to that sum
    scale: float = 1.0
    bias: bool = False
    select_bias: bool = False
    groups: GroupSpec | None = None
    jitter: float = 0.0  # of the sparsemixer
    on_input: bool = False


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Mixture of experts (arXiv:1701.06538): `top_k` of `num_experts` feed-forward blocks per token."""

    num_experts: int
    top_k: int
    expert: MlpSpec
    router: RouterSpec
    shared: MlpSpec | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        rule = f"from 1 to num_experts ({self.num_experts})"
        require(1 <= self.top_k <= self.num_experts, "top_k", rule, self.top_k)
        groups = self.router.groups
        if groups is not None:
            rule = f"a multiple of the groups ({groups.count})"
            require(self.num_experts % groups.count == 0, "num_experts", rule, self.num_experts)
            left = self.num_experts // groups.count * groups.keep
            require(self.top_k <= left, "top_k", f"at most {left}, the experts of the groups that are kept", self.top_k)


FfnSpec = MlpSpec | MoeSpec

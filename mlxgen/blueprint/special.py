"""Specs of blocks that a single family uses."""

from __future__ import annotations

from dataclasses import dataclass

from mlxgen.blueprint.ffn import MlpSpec
from mlxgen.blueprint.mixers import AttentionSpec
from mlxgen.blueprint.norms import NormSpec
from mlxgen.errors import require


@dataclass(frozen=True, kw_only=True)
class BitNetAttentionSpec(AttentionSpec):
    """Attention with a norm before the output projection (arXiv:2402.17764).

    rounded: what goes into the projections is rounded to 8 bits.
    """

    norm: NormSpec
    rounded: bool = False


@dataclass(frozen=True, kw_only=True)
class BitNetMlpSpec(MlpSpec):
    """Feed-forward block with a norm before the down projection (arXiv:2402.17764), `rounded` likewise."""

    norm: NormSpec
    rounded: bool = False


@dataclass(frozen=True, kw_only=True)
class DifferentialAttentionSpec(AttentionSpec):
    """Half of the heads' results minus the other half's (arXiv:2410.05258); `norm` is over each difference."""

    norm: NormSpec
    lambda_init: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_kv_heads % 2 == 0, "num_kv_heads", "even", self.num_kv_heads)


SPECIAL: dict[str, type] = {
    "bitnet_attention": BitNetAttentionSpec,
    "bitnet_mlp": BitNetMlpSpec,
    "differential_attention": DifferentialAttentionSpec,
}

"""Specs of blocks that a single family uses."""

from __future__ import annotations

from dataclasses import dataclass

from mlxgen.blueprint.ffn import MlpSpec, MoeSpec
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


@dataclass(frozen=True, kw_only=True)
class Gemma4AttentionSpec(AttentionSpec):
    """Attention whose values are normalized over each head, by `norm` without its weight.

    values_from_keys: the values are made from the keys, as they are before norm and rope. keys_of: the number of an
    earlier layer whose keys and values serve this one too.
    """

    norm: NormSpec
    values_from_keys: bool = False
    keys_of: int | None = None  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class Gemma4MoeSpec(MoeSpec):
    """A dense block beside a mixture of experts; `norm` is before and after each."""

    dense: MlpSpec
    norm: NormSpec


SPECIAL: dict[str, type] = {
    "bitnet_attention": BitNetAttentionSpec,
    "bitnet_mlp": BitNetMlpSpec,
    "differential_attention": DifferentialAttentionSpec,
    "gemma4_attention": Gemma4AttentionSpec,
    "gemma4_moe": Gemma4MoeSpec,
}

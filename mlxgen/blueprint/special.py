"""Specs of blocks that a single family uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxgen.blueprint.ffn import MlpSpec, MoeSpec, RouterSpec
from mlxgen.blueprint.mixers import AttentionSpec, LatentAttentionSpec
from mlxgen.blueprint.norms import NormSpec
from mlxgen.errors import require


@dataclass(frozen=True, kw_only=True)
class BitNetAttentionSpec(AttentionSpec):
    """Attention with a norm before the output projection (arXiv:2402.17764).

    rounding: inputs of the projections are rounded to 8 bits; weights: and their weights to -1, 0 and 1 times a scale.
    """

    norm: NormSpec
    rounding: Literal["none", "inputs", "weights"] = "none"


@dataclass(frozen=True, kw_only=True)
class BitNetMlpSpec(MlpSpec):
    """Feed-forward block with a norm before the down projection (arXiv:2402.17764); `rounding` as in its attention."""

    norm: NormSpec
    rounding: Literal["none", "inputs", "weights"] = "none"


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


@dataclass(frozen=True, kw_only=True)
class IndexedAttentionSpec(LatentAttentionSpec):
    """Latent attention over the `index_top_k` keys that an indexer of `index_heads` heads picks (DeepSeek-V3.2)."""

    index_heads: int
    index_dim: int
    index_top_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.q_rank is not None, "q_rank", "given for indexed attention", self.q_rank)
        require(self.index_top_k > 0, "index_top_k", "at least 1", self.index_top_k)

    @property
    def key_width(self) -> int:
        return super().key_width + self.index_dim


@dataclass(frozen=True, kw_only=True)
class DynamicMaskAttentionSpec(AttentionSpec):
    """Attention to the `keep` keys that want it most, by a number that their values say (Doge)."""

    keep: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.keep > 0, "keep", "at least 1", self.keep)


@dataclass(frozen=True, kw_only=True)
class SparseMlpSpec(MlpSpec):
    """Feed-forward block in which about a share of `sparsity` of the gate is cut off (Gemma 3n)."""

    sparsity: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.sparsity < 1, "sparsity", "between 0 and 1", self.sparsity)


@dataclass(frozen=True, kw_only=True)
class ExpertAttentionSpec(AttentionSpec):
    """Attention whose queries come from `top_k` of `num_experts` experts, `num_kv_heads` heads from each (JetMoE)."""

    num_experts: int
    top_k: int
    router: RouterSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"num_kv_heads * top_k ({self.num_kv_heads} * {self.top_k})"
        require(self.num_heads == self.num_kv_heads * self.top_k, "num_heads", rule, self.num_heads)


@dataclass(frozen=True, kw_only=True)
class BiasedMoeSpec(MoeSpec):
    """Mixture of experts with a bias behind the sum (JetMoE)."""


SPECIAL: dict[str, type] = {
    "bitnet_attention": BitNetAttentionSpec,
    "bitnet_mlp": BitNetMlpSpec,
    "differential_attention": DifferentialAttentionSpec,
    "dynamic_mask_attention": DynamicMaskAttentionSpec,
    "gemma4_attention": Gemma4AttentionSpec,
    "gemma4_moe": Gemma4MoeSpec,
    "indexed_attention": IndexedAttentionSpec,
    "sparse_mlp": SparseMlpSpec,
    "expert_attention": ExpertAttentionSpec,
    "biased_moe": BiasedMoeSpec,
}

"""Specs of the mixers: what lets a token see the tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mlxgen.blueprint.norms import NormSpec
from mlxgen.blueprint.recurrent import RECURRENT, RecurrentSpec
from mlxgen.blueprint.rope import RopeSpec
from mlxgen.errors import require


@dataclass(frozen=True, kw_only=True)
class QkNormSpec:
    """Norm of queries and keys, before or after rope.

    head: over each head, with one weight for all heads; per_head: with a weight for each; width: over all heads at
    once.
    """

    norm: NormSpec
    scope: Literal["head", "per_head", "width"] = "head"
    when: Literal["before", "after"] = "before"


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """A gate on the attention's output, computed from the layer's input: one number per element or per head."""

    scope: Literal["element", "head"] = "element"
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class TemperatureSpec:
    """Queries grow with position p: times 1 + beta * ln(1 + floor((p + shift) / length)) (Llama 4)."""

    beta: float
    length: float
    shift: int = 0


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (arXiv:2305.13245); one kv head is multi-query, num_heads of them multi-head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    v_head_dim: int | None = None  # where values are narrower than keys
    qkv_bias: bool = False
    o_bias: bool = False
    clip: float | None = None  # queries, keys and values are cut to [-clip, clip]
    qk_norm: QkNormSpec | None = None
    rope: RopeSpec | None = None
    alibi: float | None = None  # scores fall with distance by a slope per head (arXiv:2108.12409) times this
    temperature: TemperatureSpec | None = None
    window: int | None = None  # a token sees itself and window - 1 before it
    chunk: int | None = None  # a token sees what came before it in its own chunk of this length
    softcap: float | None = None  # scores are bent into (-softcap, softcap)
    sinks: bool = False  # a learned score per head that takes part in the softmax and has no value
    gate: GateSpec | None = None
    keys_of: ClassVar[int | None] = None  # the layer whose keys are read instead of own ones; a field in some families

    def __post_init__(self) -> None:
        require(self.num_kv_heads > 0, "num_kv_heads", "at least 1", self.num_kv_heads)
        rule = f"a multiple of num_kv_heads ({self.num_kv_heads})"
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", rule, self.num_heads)
        require(self.head_dim > 0, "head_dim", "at least 1", self.head_dim)
        for name in ("window", "chunk"):
            value = getattr(self, name)
            require(value is None or value > 0, name, "at least 1", value)

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (arXiv:2405.04434): all heads' keys and values from one vector of `kv_rank` numbers.

    `nope_dim` elements of a head carry content, `rope_dim` carry position and are shared by all heads.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    norm: NormSpec
    rope: RopeSpec | None = None
    bias: bool = False  # of the projections to the latent vectors
    o_bias: bool = False
    temperature: TemperatureSpec | None = None
    window: None = None
    chunk: None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
            require(getattr(self, name) > 0, name, "at least 1", getattr(self, name))

    @property
    def key_width(self) -> int:
        """How many numbers the cache keeps for a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Attention and a recurrent mixer side by side: both read the layer's normalized input, and their sum is added."""

    attention: AttentionSpec
    recurrent: RecurrentSpec


MixerSpec = AttentionSpec | LatentAttentionSpec | RecurrentSpec | ParallelSpec
MIXERS: dict[str, type] = {"attention": AttentionSpec, "latent_attention": LatentAttentionSpec, **RECURRENT}


def attention_of(mixer: MixerSpec | None) -> AttentionSpec | LatentAttentionSpec | None:
    """The attention of a layer that has some."""
    mixer = mixer.attention if isinstance(mixer, ParallelSpec) else mixer
    return mixer if isinstance(mixer, AttentionSpec | LatentAttentionSpec) else None


def recurrent_of(mixer: MixerSpec | None) -> RecurrentSpec | None:
    """The recurrent mixer of a layer that has one."""
    mixer = mixer.recurrent if isinstance(mixer, ParallelSpec) else mixer
    return mixer if isinstance(mixer, RecurrentSpec) else None

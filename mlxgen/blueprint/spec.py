"""What a decoder is, as frozen data: the end of the road from config.json, the start of the modules. No mlx here.

Every number is final: no defaults are looked up later, nothing depends on a model's name.
Sizes are in elements, positions in tokens. Source of the axes: the authors' code of the families in conf/architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxgen.blueprint.rope import RopeSpec
from mlxgen.errors import require

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Root mean square norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    weight: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.eps >= 0, "eps", "at least 0", self.eps)


@dataclass(frozen=True, kw_only=True)
class QkNormSpec:
    """Norm of queries and keys: over each head, over the whole width, before or after rope."""

    norm: NormSpec
    scope: Literal["head", "width"] = "head"
    when: Literal["before", "after"] = "before"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (arXiv:2305.13245); one kv head is multi-query, num_heads of them multi-head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNormSpec | None = None
    rope: RopeSpec | None = None
    window: int | None = None  # a token sees itself and window - 1 before it
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        require(self.num_kv_heads > 0, "num_kv_heads", "at least 1", self.num_kv_heads)
        rule = f"a multiple of num_kv_heads ({self.num_kv_heads})"
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", rule, self.num_heads)
        require(self.head_dim > 0, "head_dim", "at least 1", self.head_dim)
        require(self.window is None or self.window > 0, "window", "at least 1", self.window)


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Feed-forward block: down(act(gate x) * up x) when gated (arXiv:2002.05202), else down(act(up x))."""

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.width > 0, "width", "at least 1", self.width)


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Which experts see a token, and with what weight."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the chosen weights sum to 1
    scale: float = 1.0
    bias: bool = False


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


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: x + out(mixer(in(x))), then x + out(ffn(in(x))). A missing norm is the identity.

    `parallel`: mixer and ffn both read the layer's input, and one sum is added.
    """

    attention: AttentionSpec
    ffn: MlpSpec | MoeSpec
    attn_in_norm: NormSpec | None
    attn_out_norm: NormSpec | None
    mlp_in_norm: NormSpec | None
    mlp_out_norm: NormSpec | None
    parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    context: int | None  # longest sequence the model was made for, in tokens
    embed_scale: float = 1.0
    embed_norm: NormSpec | None = None
    learned_positions: int | None = None  # rows of a learned position table (GPT-2)
    tie_head: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size"):
            require(getattr(self, name) > 0, name, "at least 1", getattr(self, name))
        require(len(self.layers) > 0, "layers", "at least one layer", len(self.layers))

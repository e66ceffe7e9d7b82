"""What a decoder is, as frozen data: the end of the road from config.json, the start of the modules. No mlx here.

Every number is final: no defaults are looked up later, nothing depends on a model's name.
Sizes are in elements, positions in tokens. Source of the axes: the authors' code of the families in conf/architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxgen.blueprint.ffn import Activation, ClampSpec, FfnSpec, GroupSpec, MlpSpec, MoeSpec, RouterSpec
from mlxgen.blueprint.mixers import (
    AttentionSpec,
    GateSpec,
    LatentAttentionSpec,
    MixerSpec,
    ParallelSpec,
    QkNormSpec,
    TemperatureSpec,
)
from mlxgen.blueprint.norms import NormSpec
from mlxgen.blueprint.recurrent import (
    GatedDeltaNetSpec,
    LightningAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)
from mlxgen.errors import require

__all__ = [
    "AltUpSpec",
    "AttentionSpec",
    "ClampSpec",
    "DecoderSpec",
    "FfnSpec",
    "GateSpec",
    "GatedDeltaNetSpec",
    "GroupSpec",
    "LatentAttentionSpec",
    "LayerInputSpec",
    "LayerInputsSpec",
    "LayerSpec",
    "LightningAttentionSpec",
    "Mamba2Spec",
    "MambaSpec",
    "MixerSpec",
    "MlpSpec",
    "MoeSpec",
    "NormSpec",
    "ParallelSpec",
    "PositionsSpec",
    "QkNormSpec",
    "RecurrentSpec",
    "RgLruSpec",
    "RouterSpec",
    "ShortConvSpec",
    "TemperatureSpec",
]


@dataclass(frozen=True, kw_only=True)
class LayerInputSpec:
    """A vector of `width` numbers for each token that one layer reads besides the stream (Gemma 3n, Gemma 4)."""

    width: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class LayerInputsSpec:
    """Where the layers' own inputs come from: a table of `vocab_size` rows, and the embeddings."""

    vocab_size: int
    width: int
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class AltUpSpec:
    """`streams` residual streams instead of one, of which the layers compute number `active` (arXiv:2301.13310).

    scaled: what the layer's own input is combined with is scaled by a learned vector. laurel_rank: of a residual branch
    beside the mixer (arXiv:2411.07501).
    """

    streams: int
    active: int
    scaled: bool
    laurel_rank: int
    norm: NormSpec

    def __post_init__(self) -> None:
        require(0 <= self.active < self.streams, "active", f"below streams ({self.streams})", self.active)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: x + out(mixer(in(x))), then x + out(ffn(in(x))). A missing norm is the identity.

    `parallel`: mixer and ffn both read the layer's input, and one sum is added.
    A layer may lack the mixer or the feed-forward block.
    """

    mixer: MixerSpec | None
    ffn: FfnSpec | None
    attn_in_norm: NormSpec | None
    attn_out_norm: NormSpec | None
    mlp_in_norm: NormSpec | None
    mlp_out_norm: NormSpec | None
    shared_in_norm: bool = False  # in a parallel layer, the feed-forward block reads the mixer's normalized input
    norm_stream: bool = False  # norms change the stream itself: x = in(x), then x = out(x + mixer(x)), and so on
    parallel: bool = False
    stream_gains: bool = False  # the stream is multiplied by learned numbers before each sum (Doge)
    residual_scale: float = 1.0
    layer_input: LayerInputSpec | None = None
    scaled: bool = False  # a learned number multiplies what leaves the layer
    altup: AltUpSpec | None = None  # the same in all layers


@dataclass(frozen=True, kw_only=True)
class PositionsSpec:
    """A table of position vectors that are added to the embeddings: learned, or sines (arXiv:1706.03762)."""

    kind: Literal["learned", "sinusoidal"] = "learned"
    rows: int
    shift: int = 0  # position 0 has row `shift`


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
    positions: PositionsSpec | None = None
    tie_head: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_inputs: LayerInputsSpec | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size"):
            require(getattr(self, name) > 0, name, "at least 1", getattr(self, name))
        require(len(self.layers) > 0, "layers", "at least one layer", len(self.layers))

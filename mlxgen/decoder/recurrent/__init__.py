"""Mixers whose memory of the tokens before has a fixed size. One file for each block, and the arithmetic they share."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.blueprint.spec import (
    GatedDeltaNetSpec,
    LightningAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    RgLruSpec,
    ShortConvSpec,
)
from mlxgen.decoder.recurrent.gated_delta_net import GatedDeltaNet
from mlxgen.decoder.recurrent.lightning_attention import LightningAttention
from mlxgen.decoder.recurrent.mamba import Mamba
from mlxgen.decoder.recurrent.mamba2 import Mamba2
from mlxgen.decoder.recurrent.rg_lru import RgLru
from mlxgen.decoder.recurrent.short_conv import ShortConv

RECURRENT_MIXERS = {
    GatedDeltaNetSpec: GatedDeltaNet,
    LightningAttentionSpec: LightningAttention,
    Mamba2Spec: Mamba2,
    MambaSpec: Mamba,
    RgLruSpec: RgLru,
    ShortConvSpec: ShortConv,
}

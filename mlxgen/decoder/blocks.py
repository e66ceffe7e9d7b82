"""Which block computes what a spec describes. A block is imported when a model has one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.nn as nn

_BLOCKS = {
    "AttentionSpec": "attention.Attention",
    "LatentAttentionSpec": "latent_attention.LatentAttention",
    "MlpSpec": "mlp.MLP",
    "MoeSpec": "moe.MoE",
    # memory of a fixed size
    "GatedDeltaNetSpec": "recurrent.gated_delta_net.GatedDeltaNet",
    "LightningAttentionSpec": "recurrent.lightning_attention.LightningAttention",
    "Mamba2Spec": "recurrent.mamba2.Mamba2",
    "MambaSpec": "recurrent.mamba.Mamba",
    "RgLruSpec": "recurrent.rg_lru.RgLru",
    "ShortConvSpec": "recurrent.short_conv.ShortConv",
    # of single families
    "BiasedMoeSpec": "jetmoe.BiasedMoE",
    "BitNetAttentionSpec": "bitnet.BitNetAttention",
    "BitNetMlpSpec": "bitnet.BitNetMLP",
    "DifferentialAttentionSpec": "differential_attention.DifferentialAttention",
    "DynamicMaskAttentionSpec": "dynamic_mask_attention.DynamicMaskAttention",
    "ExpertAttentionSpec": "jetmoe.ExpertAttention",
    "Gemma4AttentionSpec": "gemma4.Gemma4Attention",
    "Gemma4MoeSpec": "gemma4.Gemma4MoE",
    "IndexedAttentionSpec": "indexed_attention.IndexedAttention",
    "SparseMlpSpec": "sparse_mlp.SparseMLP",
}


def build_block(spec: Any, hidden_size: int) -> nn.Module:
    """The mixer or feed-forward block of this spec, reading and writing [T, hidden_size]."""
    module, name = _BLOCKS[type(spec).__name__].rsplit(".", 1)
    return getattr(import_module(f"mlxgen.decoder.{module}"), name)(spec, hidden_size)

"""The decoder: blocks written once, assembled from a DecoderSpec. Start reading at decoder.py."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.decoder.decoder import Decoder
from mlxgen.decoder.layer import DecoderLayer

__all__ = ["Decoder", "DecoderLayer"]

"""Mixers whose memory of the tokens before has a fixed size. One file for each block, and the arithmetic they share."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

"""Passes: ordered changes of a decoder that has its weights."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

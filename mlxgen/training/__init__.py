"""The training loop, and what it is fed with."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

"""Will it fit: what a run holds at most, known before a weight is read."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.fit.budget import check_fits, open_scheduler
from mlxgen.fit.estimate import Estimate, Estimator
from mlxgen.fit.limit import memory_limit_bytes

__all__ = ["Estimate", "Estimator", "check_fits", "memory_limit_bytes", "open_scheduler"]

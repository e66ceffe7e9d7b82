"""The Mac that the scripts of apps/macos are run on."""

from pathlib import Path

import pytest
from apps_mac import Mac


@pytest.fixture
def mac(request: pytest.FixtureRequest, tmp_path: Path) -> Mac:
    """Run by sh, or by the shell that `any_shell` asks for."""
    return Mac(tmp_path / "mac", getattr(request, "param", "sh"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights that talks nonsense, in a folder whose name needs quotes."""
    from mlxgen.testing.checkpoints import write_tiny  # imports MLX, which the other tests can do without

    return write_tiny(tmp_path_factory.mktemp("models") / "tiny model", max_position_embeddings=4096)

"""What all tests share."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # tests run side by side: each with one thread for its matrix products
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a command gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Run a command line in this process, in an empty folder that must stay empty; `stdin` is what is piped in."""
    from mlxgen.cli import main

    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*words: str, stdin: bytes | None = None) -> Ran:
        piped = tmp_path / "stdin"
        piped.write_bytes(stdin or b"")
        with open(os.devnull if stdin is None else piped, encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            code = main(list(words))
        assert list(folder.iterdir()) == []
        return Ran(code, *capsys.readouterr())

    return run

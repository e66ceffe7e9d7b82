"""Fine-tuning against mlx-lm's: rank 8 in the last 8 layers, batches of 4, ragged rows of 20 to 250 tokens.

Both start from one adapter and see the same rows, of which the first half is the prompt.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx

from mlxgen.bench.compare import Row, row
from mlxgen.config import AdapterConfig, ModelConfig
from mlxgen.loading import load
from mlxgen.passes.adapters import save_adapter
from mlxgen.passes.attach import attach
from mlxgen.testing.models import tiny_decoder
from mlxgen.training import loss

_ADAPTER = AdapterConfig(kind="lora", rank=8, scale=20.0, layers=8)
_LARGE_VOCABULARY = 151_936  # Qwen's
_BATCH, _RATE = 4, 1e-4


class Training:
    """The measurements of one model. clock: wall or cpu, the seconds of all threads."""

    def __init__(self, folder: Path, scratch: Path, clock: str):
        self._folder, self._scratch = folder, scratch
        self._unit, self._speed = ("tok/s", "tokens_per_s") if clock == "wall" else ("tok/cpu s", "tokens_per_cpu_s")

    def as_pip_installs(self) -> list[Row]:
        """mlx-lm takes minutes for a few rows."""
        ours = self._run("mlxgen", "on", "speed", count=32)
        theirs = self._run("mlx_lm", "off", "speed", count=4)
        return [self._row("as pip installs", [ours], [theirs], ">= 20")]

    def same_blas(self, repeats: int) -> list[Row]:
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(self._run("mlxgen", "on", "speed", count=32))
            theirs.append(self._run("mlx_lm", "on", "speed", count=32))
        return [self._row("same BLAS", ours, theirs, ">= 1.3"), self._memory("49,152", ours, theirs, "<= 0.5")]

    def large_vocabulary(self) -> list[Row]:
        folder = self._larger
        a, b = ([self._run(engine, "on", "speed", count=8, folder=folder)] for engine in ("mlxgen", "mlx_lm"))
        return [self._memory(f"{_LARGE_VOCABULARY:,}", a, b, "<= 0.3")]

    def same_losses(self, steps: int = 20) -> list[Row]:
        """mlx-lm's loss takes the first position of the padding along; that is corrected here."""
        both = [self._run(engine, "on", "losses", count=steps * _BATCH)["losses"] for engine in ("mlxgen", "mlx_lm")]
        apart = max(abs(a - b) for a, b in zip(*both, strict=True))
        what = f"fine-tuning: largest difference of the loss in {steps} identical steps"
        row = Row(
            what=what, unit="", mlxgen=both[0][-1], other=both[1][-1], against="mlx-lm", ratio=apart, bar="<= 1e-3"
        )
        return [row]

    def loss_layer(self) -> list[Row]:
        """The peak of loss and gradient when the vocabulary grows three times."""
        peaks = [_loss_peak(size) / 1e6 for size in (50_000, 150_000)]
        return [row("loss layer: peak with 150,000 tokens", "MB", peaks[1:], peaks[:1], "<= 1.1", "with 50,000")]

    def _row(self, case: str, ours: list[Any], theirs: list[Any], bar: str) -> Row:
        a, b = ([each[self._speed] for each in runs] for runs in (ours, theirs))
        return row(f"fine-tuning, {case}: real tokens", self._unit, a, b, bar)

    def _memory(self, vocabulary: str, ours: list[Any], theirs: list[Any], bar: str) -> Row:
        a, b = ([each["peak_bytes"] / 1e6 for each in runs] for runs in (ours, theirs))
        return row(f"fine-tuning, vocabulary {vocabulary}: peak above the weights", "MB", a, b, bar)

    def _run(self, engine: str, blas: str, what: str, *, count: int, folder: Path | None = None) -> dict[str, Any]:
        job = self._scratch / "job.json"
        common = {"batch_size": _BATCH, "learning_rate": _RATE, "what": what, "rows": ragged_rows(count)}
        job.write_text(json.dumps({**common, "folder": str(folder or self._folder), "adapter": str(self._adapter)}))
        command = [sys.executable, "-m", "mlxgen.bench.training_worker", engine, blas, str(job)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)

    @cached_property
    def _adapter(self) -> Path:
        """An adapter that changes nothing yet, for both to begin with."""
        loaded = load(ModelConfig(source=str(self._folder), dtype="float32", fuse=False))
        attach(loaded.decoder, _ADAPTER, key=mx.random.key(0))
        folder = self._scratch / "adapter"
        save_adapter(loaded.decoder, folder, _ADAPTER, loaded.rules)
        return folder

    @cached_property
    def _larger(self) -> Path:
        """The model with more rows in its embedding."""
        folder = self._scratch / "larger"
        folder.mkdir()
        config = json.loads((self._folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": _LARGE_VOCABULARY}))
        arrays: Any = mx.load(str(self._folder / "model.safetensors"))
        name = "model.embed_tokens.weight"
        rows, width = arrays[name].shape
        arrays[name] = mx.concatenate([arrays[name], mx.full((_LARGE_VOCABULARY - rows, width), 0.01)])
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
        return folder


def ragged_rows(count: int, seed: int = 0) -> list[Any]:
    """[tokens, number of prompt tokens] of each row."""
    numbers = random.Random(seed)
    lengths = [numbers.randint(20, 250) for _ in range(count)]
    return [[[numbers.randint(100, 40_000) for _ in range(length)], length // 2] for length in lengths]


def _loss_peak(vocab_size: int, positions: int = 400) -> int:
    decoder = tiny_decoder(vocab_size=vocab_size, tie_word_embeddings=False)
    decoder.freeze()
    hidden = mx.random.normal((positions, decoder.spec.hidden_size), key=mx.random.key(0))
    targets, weights = mx.arange(positions), mx.ones((positions,))
    mx.eval(hidden, decoder.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(lambda h: loss.learned_loss(decoder, h, targets, weights))(hidden))
    return mx.get_peak_memory() - before

"""task=bench: mlxgen and mlx-lm alternately in one run; a table, and JSON with output=json or into a file."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mlxgen.config import Config
from mlxgen.errors import ConfigError, did_you_mean, require

if TYPE_CHECKING:
    from mlxgen.bench.compare import Row
    from mlxgen.bench.serving import Ours
    from mlxgen.bench.training import Training

# Keys that mlx-lm has no defaults for.
_FOR_MLX_LM = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
GROUPS = {
    "single": ("process", "pip", "blas", "step", "top_p"),
    "engine": ("ragged", "requests", "prefix", "arrival", "lookup", "batch_step", "returns", "predictions"),
    "training": ("train_pip", "train_blas", "train_vocabulary", "train_losses", "loss_layer"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """`repeats`: turns of each measurement. `rows`: which ones, by name or group (see GROUPS); none: all.

    `clock`: of the engine's rows; cpu counts the seconds of all threads, for a machine that others use too.
    `file`: where to write the JSON too.
    """

    repeats: int = 5
    prompt_tokens: int = 512
    new_tokens: int = 64
    rows: Sequence[str] = ()
    clock: str = "wall"
    file: str | None = None

    def __post_init__(self) -> None:
        require(self.repeats >= 1, "task.repeats", "at least 1", self.repeats)
        require(self.clock in ("wall", "cpu"), "task.clock", "wall or cpu", self.clock)
        chosen(self.rows)

    def __call__(self, config: Config) -> int:
        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as scratch:
            measurements = _Measurements(self, config, Path(scratch)).by_name()
            for name in chosen(self.rows):
                print(f"measuring: {name} ...", file=sys.stderr, flush=True)
                rows += measurements[name]()
        report = {
            "machine": machine(),
            "clock": self.clock,
            "rows": [{**dataclasses.asdict(r), "met": r.met} for r in rows],
        }
        if self.file:
            Path(self.file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report) if config.output == "json" else table(rows))
        return 0


def chosen(rows: Sequence[str] | str) -> list[str]:
    """The names of the measurements, in the order of the table. Raises ConfigError for a name that there is not."""
    wanted = [rows] if isinstance(rows, str) else list(rows)
    every = [name for names in GROUPS.values() for name in names]
    for name in wanted:
        if name not in GROUPS and name not in every:
            known = [*GROUPS, *every]
            raise ConfigError(
                f"`task.rows` must be of {', '.join(known)}, but has {name!r}.{did_you_mean(name, known)}"
            )
    return [name for group, names in GROUPS.items() for name in names if not wanted or {group, name} & {*wanted}]


class _Measurements:
    """What there is to measure. What several need is made once, when it is first needed."""

    def __init__(self, bench: Bench, config: Config, scratch: Path):
        self._bench, self._config, self._scratch = bench, config, scratch

    def by_name(self) -> dict[str, Callable[[], list[Row]]]:
        from mlxgen.bench import compare, counts, memory, predictions, reuse, serving

        bench, repeats = self._bench, self._bench.repeats
        few = max(repeats // 2, 1)
        sizes = bench.prompt_tokens, bench.new_tokens
        return {
            "process": lambda: [compare.whole_process(self._tiny, repeats)],
            "pip": lambda: compare.speed(self._folder, "off", *sizes, few),
            "blas": lambda: compare.speed(self._folder, "on", *sizes, repeats),
            "step": lambda: counts.decode_step(self._folder),
            "top_p": lambda: [counts.top_p()],
            "ragged": lambda: serving.ragged(self._ours, self._folder, few),
            "requests": lambda: serving.more_and_more(self._ours, few),
            "prefix": lambda: reuse.shared_prefix(self._ours, few),
            "arrival": lambda: serving.arrival(self._ours, few),
            "lookup": lambda: reuse.lookups(self._ours, few),
            "batch_step": lambda: serving.step_size(self._ours),
            "returns": memory.returns,
            "predictions": lambda: predictions.predictions(self._scratch),
            "train_pip": lambda: self._training.as_pip_installs(),
            "train_blas": lambda: self._training.same_blas(few),
            "train_vocabulary": lambda: self._training.large_vocabulary(),
            "train_losses": lambda: self._training.same_losses(),
            "loss_layer": lambda: self._training.loss_layer(),
        }

    @cached_property
    def _tiny(self) -> Path:
        from mlxgen.testing.checkpoints import write_tiny

        return write_tiny(self._scratch / "tiny", **_FOR_MLX_LM)

    @cached_property
    def _folder(self) -> Path:
        from mlxgen.bench.weights import float32_folder

        return float32_folder(self._config, self._scratch / "float32")

    @cached_property
    def _training(self) -> Training:
        from mlxgen.bench.training import Training

        return Training(self._folder, self._scratch, self._bench.clock)

    @cached_property
    def _ours(self) -> Ours:
        from mlxgen.bench.serving import Ours

        return Ours(self._folder, time.process_time if self._bench.clock == "cpu" else time.perf_counter)


def machine() -> dict[str, str | int | None]:
    """What the figures were measured on."""
    import os
    from importlib.metadata import version

    import mlxgen.device

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "blas": Path(mlxgen.device.BLAS).name if mlxgen.device.BLAS else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | mlxgen | against | ratio | bar | |", "|---|---|---|---|---|---|"]
    for r in rows:
        met = "met" if r.met else "missed"
        figures = f"{r.mlxgen:.4g} {r.unit} | {r.against}: {r.other:.4g} {r.unit} | {r.ratio:.3g} x"
        lines.append(f"| {r.what} | {figures} | {r.bar} x | {met} |")
    return "\n".join(lines)

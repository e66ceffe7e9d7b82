"""task=bench: mlxgen and mlx-lm alternately in one run; a table, and JSON with output=json or into a file."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import tempfile
from pathlib import Path

from mlxgen.config import Config

# Keys that mlx-lm has no defaults for.
_FOR_MLX_LM = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """`repeats`: turns of each measurement. `file`: where to write the JSON too."""

    repeats: int = 5
    prompt_tokens: int = 512
    new_tokens: int = 64
    file: str | None = None

    def __call__(self, config: Config) -> int:
        from mlxgen.bench import counts
        from mlxgen.bench.compare import Row, speed, whole_process
        from mlxgen.bench.weights import float32_folder
        from mlxgen.testing.checkpoints import write_tiny

        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as scratch:
            tiny, folder = (
                write_tiny(Path(scratch) / "tiny", **_FOR_MLX_LM),
                float32_folder(config, Path(scratch) / "float32"),
            )
            for name, measure in {
                "whole process": lambda: [whole_process(tiny, self.repeats)],
                "speed as pip installs": lambda: speed(
                    folder, "off", self.prompt_tokens, self.new_tokens, max(self.repeats // 2, 1)
                ),
                "speed with the same BLAS": lambda: speed(
                    folder, "on", self.prompt_tokens, self.new_tokens, self.repeats
                ),
                "decode step": lambda: counts.decode_step(folder),
                "top-p": lambda: [counts.top_p()],
            }.items():
                print(f"measuring: {name} ...", file=sys.stderr, flush=True)
                rows += measure()
        report = {"machine": machine(), "rows": [{**dataclasses.asdict(r), "met": r.met} for r in rows]}
        if self.file:
            Path(self.file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report) if config.output == "json" else table(rows))
        return 0


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


def table(rows: list) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | mlxgen | mlx-lm | ratio | bar | |", "|---|---|---|---|---|---|"]
    for r in rows:
        met = "met" if r.met else "missed"
        figures = f"{r.mlxgen:.4g} {r.unit} | {r.mlx_lm:.4g} {r.unit} | {r.ratio:.2f} x"
        lines.append(f"| {r.what} | {figures} | {r.bar} x | {met} |")
    return "\n".join(lines)

"""Several runs as one table and one picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxgen.training.checkpoints import as_json, write_file
from mlxgen.training.report import sweep_picture
from mlxgen.training.run_folder import read_metrics

_COLUMNS = ("best validation", "at step", "last training", "steps", "tokens/s", "peak MB", "seconds")


def summarize(root: Path, runs: Mapping[str, Path]) -> str:
    """Write sweep.md, sweep.json and, where matplotlib is, sweep.png into `root`; returns the table, best run first."""
    rows = {name: _row(folder) for name, folder in runs.items()}
    order = sorted(rows, key=lambda name: _rank(rows[name]))
    table = _table(order, rows)
    write_file(root / "sweep.md", table)
    write_file(root / "sweep.json", as_json({name: rows[name] for name in order}))
    picture = sweep_picture({name: read_metrics(folder) for name, folder in runs.items()})
    if picture is not None:
        write_file(root / "sweep.png", picture)
    return table


def _row(folder: Path) -> dict[str, Any]:
    noted = folder / "run.json"
    about = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
    outcome = about.get("outcome")
    if outcome is None:
        return {}
    train = [e for e in read_metrics(folder) if e["event"] == "train"]
    speeds = sorted(e["tokens_per_s"] for e in train)
    return {
        "best validation": outcome["best_loss"],
        "at step": outcome["best_step"],
        "last training": outcome["loss"],
        "steps": outcome["steps"],
        "tokens/s": speeds[len(speeds) // 2] if speeds else None,
        "peak MB": max((e["peak_memory_bytes"] for e in train), default=0) / 1e6,
        "seconds": about.get("seconds"),
    }


def _rank(row: Mapping[str, Any]) -> float:
    """Validation loss, or training loss where there was none; failed runs come last."""
    found = (row.get(key) for key in ("best validation", "last training"))
    return next((float(loss) for loss in found if loss is not None), float("inf"))


def _table(order: list[str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    words = [name.split() for name in order]
    keys = [word.partition("=")[0] for word in words[0]] if words else []
    lines = [f"| {' | '.join((*keys, *_COLUMNS))} |", "|" + "---|" * (len(keys) + len(_COLUMNS))]
    for name, given in zip(order, words, strict=True):
        row = rows[name]
        cells = [_cell(row.get(column)) for column in _COLUMNS] if row else ["failed", *[""] * (len(_COLUMNS) - 1)]
        lines.append(f"| {' | '.join((*(word.partition('=')[2] for word in given), *cells))} |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

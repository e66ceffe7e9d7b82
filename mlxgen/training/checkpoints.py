"""Checkpoints of a run: whole or absent whatever happens, and enough to go on exactly.

    checkpoints/step-00000120/state.safetensors     parameters, optimizer, average
    checkpoints/step-00000120/state.json            step, which step was best so far, ...

A checkpoint is written under another name, forced to the disk, and renamed. Data order and random numbers are
functions of (seed, step), so they need no state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.errors import RunError

_NAME = re.compile(r"step-(\d{8})")
_STATE, _ARRAYS = "state.json", "state.safetensors"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a run needs to go on: arrays by `part/name`, and plain values."""

    step: int
    arrays: dict[str, mx.array]
    values: dict[str, Any]

    def part(self, name: str) -> dict[str, mx.array]:
        """The arrays of one part, such as parameters, optimizer, average."""
        return {key[len(name) + 1 :]: a for key, a in self.arrays.items() if key.startswith(f"{name}/")}


class Checkpoints:
    """The checkpoints in a folder; of all but the best the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self._keep = folder, keep

    def steps(self) -> list[int]:
        """The steps that there are complete checkpoints of, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def best(self) -> int | None:
        """The step with the lowest loss as the newest checkpoint knows it, if there was an evaluation."""
        steps = self.steps()
        return json.loads((self._path(steps[-1]) / _STATE).read_text()).get("best_step") if steps else None

    def save(self, snapshot: Snapshot) -> Path:
        """Keep a snapshot. Raises RunError where the disk refuses; what was saved before stays."""
        target = self._path(snapshot.step)
        partial = self.folder / f".{target.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            mx.save_safetensors(str(partial / _ARRAYS), snapshot.arrays, metadata={"format": "mlx"})
            _sync(partial / _ARRAYS)
            write_file(partial / _STATE, json.dumps({"step": snapshot.step, **snapshot.values}, indent=1))
            _sync(partial)
            if target.exists():
                self._drop(snapshot.step)
            os.replace(partial, target)
            _sync(self.folder)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            last = self.steps()
            kept = f"the one of step {last[-1]} is whole" if last else "there is none yet"
            why = getattr(error, "strerror", None) or str(error).strip()
            text = f"the checkpoint of step {snapshot.step} could not be written to {self.folder}: {why}; {kept}."
            raise RunError(text) from error
        self._drop_old()
        return target

    def load(self, step: int | None = None) -> Snapshot:
        """The newest snapshot, or that of a step. Raises RunError if there is none."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            raise RunError(f"{self.folder} must hold a checkpoint{f' of step {step}' if step else ''}, but has none.")
        path = self._path(steps[-1] if step is None else step)
        try:
            values = json.loads((path / _STATE).read_text(encoding="utf-8"))
            arrays = mx.load(str(path / _ARRAYS))
            mx.eval(arrays)  # the file may be gone before they are used
        except (OSError, ValueError, RuntimeError) as error:
            raise RunError(f"{path} is broken: {error}; delete it to go on from an older one.") from error
        return Snapshot(step=values.pop("step"), arrays=arrays, values=values)  # type: ignore[arg-type]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def _drop_old(self) -> None:
        best = self.best()
        for step in self.steps()[: -self._keep]:
            if step != best:
                self._drop(step)

    def _drop(self, step: int) -> None:
        """Under another name first: what is half deleted must not look like a checkpoint."""
        old = self.folder / f".{self._path(step).name}.old"
        shutil.rmtree(old, ignore_errors=True)
        os.replace(self._path(step), old)
        shutil.rmtree(old, ignore_errors=True)


def write_file(path: Path, text: str | bytes) -> None:
    """Write a file that is whole or absent after a crash. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(text.encode("utf-8") if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync(path.parent)


def as_json(values: Mapping[str, Any]) -> str:
    """Plain data as JSON for people."""
    return json.dumps(values, indent=1, ensure_ascii=False, default=str) + "\n"


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

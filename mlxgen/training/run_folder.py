"""The folder of a run, and the only one that writes there.

config.yaml      the resolved configuration          run.json        versions, seed, weights, data, outcome
metrics.jsonl    one line for each event             checkpoints/    see mlxgen.training.checkpoints
report.png, report.html                              adapter/        what was learned, at the end
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mlxgen.errors import ConfigError, RunError
from mlxgen.training.checkpoints import Checkpoints, as_json, write_file

_LOCK, _CONFIG, _RUN, _METRICS = ".lock", "config.yaml", "run.json", "metrics.jsonl"


class RunFolder:
    """Use it as a context: it is locked until the end."""

    def __init__(self, path: Path, *, keep: int = 2):
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self.adapter = path / "adapter"
        self._lock = FileLock(path / _LOCK)

    def __enter__(self) -> RunFolder:
        """Raises RunError where another process is at work there, or where the disk refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunError(f"another run is writing to {self.path}; give this one a folder of its own.") from None
        except OSError as error:
            raise RunError(f"{self.path} can't be written: {error.strerror}.") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def start(self, config_yaml: str, about: Mapping[str, Any]) -> None:
        """Note what the run is. Raises ConfigError if there is something already."""
        if any(path.name != _LOCK for path in self.path.iterdir()):
            hint = " resume=DIR goes on with a run." if self.has_run else ""
            raise ConfigError(f"`out` must be a new or an empty folder, but {self.path} is not.{hint}")
        write_file(self.path / _CONFIG, config_yaml)
        self.note(about)

    @property
    def has_run(self) -> bool:
        return (self.path / _CONFIG).is_file()

    @property
    def config_yaml(self) -> str:
        """Raises ConfigError if this is no run's folder."""
        if not self.has_run:
            raise ConfigError(f"`resume` must be the folder of a run, but {self.path} has no {_CONFIG}.")
        return (self.path / _CONFIG).read_text(encoding="utf-8")

    @property
    def about(self) -> dict[str, Any]:
        path = self.path / _RUN
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def note(self, values: Mapping[str, Any]) -> None:
        """Add to run.json."""
        write_file(self.path / _RUN, as_json({**self.about, **values}))

    def record(self, event: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl. Raises RunError where the disk refuses."""
        try:
            with (self.path / _METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as error:
            raise RunError(f"{self.path / _METRICS} can't be written: {error.strerror}; resume=DIR goes on.") from error

    def metrics(self) -> list[dict[str, Any]]:
        """The events so far. A line that was torn by a crash is left out."""
        return read_metrics(self.path)

    def rewind(self, step: int) -> None:
        """Forget the events after a step: they will happen again."""
        kept = [event for event in self.metrics() if event["step"] <= step]
        write_file(self.path / _METRICS, "".join(json.dumps(event) + "\n" for event in kept))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The events of a run."""
    path, events = folder / _METRICS, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events

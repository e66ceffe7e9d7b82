"""Where the numbers of a run are sent besides its folder: TensorBoard, Weights & Biases, MLflow. All optional."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlxgen.errors import ConfigError

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
NAMES = tuple(_PACKAGES)


class Logger(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """`values` by names such as train/loss."""
        ...

    def close(self) -> None: ...


def open_loggers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Logger]:
    """The loggers of a run. Raises ConfigError for one that is not installed or does not start."""
    loggers: list[Logger] = []
    for name in names:
        package = _PACKAGES[name]
        try:
            module = importlib.import_module(package)
        except ImportError:
            text = f"`task.loggers` must be installed, but {name} is not: pip install {package}."
            raise ConfigError(text) from None
        try:
            loggers.append({"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}[name](module, folder, config))
        except Exception as error:
            raise ConfigError(f"`task.loggers`: {name} does not start: {error}") from error
    return loggers


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """An event's numbers, by the names that loggers show."""
    kind = event["event"]
    return {f"{kind}/{k}": v for k, v in event.items() if k not in ("event", "step") and isinstance(v, int | float)}


class TensorBoard:
    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any]):
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run that is resumed goes on under the same id, which its folder's path gives."""

    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any]):
        own = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run = module.init(
            project="mlxgen", id=own, name=folder.name, dir=str(folder), config=dict(config), resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any]):
        self._module = module
        module.set_experiment("mlxgen")
        module.start_run(run_name=folder.name)
        module.log_params({key: str(value)[:500] for key, value in config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._module.end_run()

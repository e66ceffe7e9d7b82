"""task=finetune: teach a model from examples; a run folder with an adapter in it."""

from __future__ import annotations

import dataclasses
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlxgen
from mlxgen.build import build
from mlxgen.config import Config
from mlxgen.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, require
from mlxgen.loading import LoadedModel, load
from mlxgen.passes.adapted import learning_rate_scale
from mlxgen.passes.adapters import save_adapter
from mlxgen.passes.attach import Attached, attach
from mlxgen.tasks.output import print_json, say, status, write
from mlxgen.tasks.resuming import as_yaml, leaves_of, resumed
from mlxgen.tasks.sweep_table import summarize
from mlxgen.tasks.training_data import TrainingData, open_training_data
from mlxgen.training.display import display
from mlxgen.training.loggers import numbers, open_loggers
from mlxgen.training.optimizers import GroupedOptimizer, OptimizerConfig
from mlxgen.training.report import NO_PICTURE, write_report
from mlxgen.training.run_folder import RunFolder
from mlxgen.training.schedules import Schedule
from mlxgen.training.trainer import Event, LoopConfig, Outcome, Trainer, random_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune(LoopConfig):
    """keep: checkpoints that stay beside the best. loggers: where the numbers are sent too."""

    keep: int = 2
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.keep >= 1, "keep", "at least 1", self.keep)

    def check(self, config: Config) -> None:
        """What can be known to be wrong before anything is loaded."""
        _part(config, "optimizer", OptimizerConfig)
        _part(config, "schedule", Schedule)
        if config.resume is not None and config.variant:
            raise ConfigError("`resume` must not be given in a sweep: a run goes on alone.")
        if config.resume is None and config.adapter.kind == "none":
            raise ConfigError("`adapter` must be one that trains something, but is none; choose e.g. adapter=lora.")
        if config.resume is None and not config.data.sources:
            raise ConfigError("`data.path` must be given: a file, a folder with train.jsonl, or a hub id.")
        if config.resume is None and config.variant and config.out is None:
            raise ConfigError("`out` must be given in a sweep: the folder that gets a folder for each run.")

    def __call__(self, config: Config) -> int:
        with RunFolder(_folder(config), keep=self.keep) as folder:
            if config.resume is None:
                return self._run(config, folder)
            config = resumed(config, folder.config_yaml)
            return build(config.task, "task", config.trust)._run(config, folder)

    def after_sweep(self, configs: Sequence[Config]) -> None:
        """One table and one picture of all runs."""
        root = configs[0].out
        assert root is not None
        write(summarize(root, {" ".join(c.variant): _folder(c) for c in configs}))

    def _run(self, config: Config, folder: RunFolder) -> int:
        seed = config.seed or 0
        with status("loading the model"):
            model = dataclasses.replace(config.model, fuse=False)
            loaded = load(model, config.architecture, config.config_dirs, config.adapter)
        attached = attach(loaded.decoder, config.adapter, key=random_key(seed, -1))
        with status("reading the data"):
            data = open_training_data(config, loaded, seed)
        trainer = self._trainer(config, loaded, data, folder, seed)
        self._start(config, folder, trainer, about(config, loaded, attached, data, seed))
        _announce(trainer, attached, data, folder)
        began = time.perf_counter()
        with ExitStack() as stack:
            loggers = open_loggers(self.loggers, folder.path, _flat(config))
            for logger in loggers:
                stack.callback(logger.close)
            shown = stack.enter_context(display(trainer.total)) if config.stats is not False else None
            stopped = stack.enter_context(_stop_between_steps())

            def report(event: Event) -> None:
                folder.record(event)
                if shown is not None:
                    shown.show(event)
                for logger in loggers:
                    logger.log(event["step"], numbers(event))

            trainer.report, trainer.stop = report, lambda: bool(stopped)
            outcome = trainer.run()
        return self._finish(config, folder, loaded, outcome, time.perf_counter() - began)

    def _trainer(
        self, config: Config, loaded: LoadedModel, data: TrainingData, folder: RunFolder, seed: int
    ) -> Trainer:
        from mlx.utils import tree_flatten

        parameters = dict(tree_flatten(loaded.decoder.trainable_parameters()))
        optimizer = _part(config, "optimizer", OptimizerConfig)
        return Trainer(
            decoder=loaded.decoder,
            optimizer=GroupedOptimizer(optimizer, parameters, learning_rate_scale(loaded.decoder)),
            schedule=_part(config, "schedule", Schedule),
            train=data.train,
            valid=data.valid,
            config=self,
            seed=seed,
            checkpoints=folder.checkpoints,
        )

    def _start(self, config: Config, folder: RunFolder, trainer: Trainer, facts: dict[str, Any]) -> None:
        if config.resume is None:
            folder.start(as_yaml(config), facts)
            return
        for key in ("model", "data_fingerprint"):
            if folder.about.get(key) != facts[key]:
                raise ConfigError(f"`resume`: the {key.partition('_')[0]} must be what it was, but it has changed.")
        if folder.checkpoints.steps():
            trainer.restore(folder.checkpoints.load())
        folder.rewind(trainer.progress.step)
        folder.note({"resumed_at": [*folder.about.get("resumed_at", ()), trainer.progress.step]})

    def _finish(self, config: Config, folder: RunFolder, loaded: LoadedModel, outcome: Outcome, seconds: float) -> int:
        save_adapter(loaded.decoder, folder.adapter, config.adapter, loaded.rules, base=loaded.identity)
        folder.note({"outcome": dataclasses.asdict(outcome), "seconds": seconds + folder.about.get("seconds", 0.0)})
        pictured = write_report(folder.path, folder.metrics(), _facts(folder), folder.config_yaml)
        if config.output == "text":
            _tell(outcome, folder, pictured, config)
        else:
            result = {**dataclasses.asdict(outcome), "folder": str(folder.path), "adapter": str(folder.adapter)}
            print_json(result, config)
        return EXIT_INTERRUPTED if outcome.ended == "interrupted" else EXIT_OK


def about(config: Config, loaded: LoadedModel, attached: Attached, data: TrainingData, seed: int) -> dict[str, Any]:
    """What a run must note to be understood later."""
    packages = {name: version(name) for name in ("mlx", "numpy", "tokenizers")}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"mlxgen": mlxgen.__version__, "python": platform.python_version(), **packages},
        "system": f"{platform.system()} {platform.machine()}",
        "seed": seed,
        "model": loaded.identity,
        "trained_parameters": attached.trained,
        "all_parameters": attached.total,
        "data": data.about.as_dict(),
        "data_fingerprint": data.fingerprint,
    }


def _folder(config: Config) -> Path:
    """Where a run is, or will be."""
    if config.resume is not None:
        if not config.resume.is_dir():
            raise ConfigError(f"`resume` must be the folder of a run, but {config.resume} is none.")
        return config.resume
    if config.out is None:
        return Path("runs") / time.strftime("finetune-%Y%m%d-%H%M%S")
    # Words such as adapter.rank=4; the value of one may hold a path.
    return config.out / ",".join(word.replace("/", "_") for word in config.variant) if config.variant else config.out


def _part(config: Config, name: str, kind: type) -> Any:
    part = build(getattr(config, name), name, config.trust)
    require(isinstance(part, kind), f"{name}._target_", f"a {kind.__name__}", type(part).__name__)
    return part


def _flat(config: Config) -> dict[str, Any]:
    return {key: value for key, value in leaves_of(config) if not key.startswith("architecture")}


@contextmanager
def _stop_between_steps() -> Iterator[list[bool]]:
    """Ctrl-C once: the step is finished and kept. The list is empty until then. Twice: as usual."""
    asked: list[bool] = []

    def ask(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        asked.append(True)
        say("stopping after this step; once more stops at once")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread
        yield asked
        return
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _announce(trainer: Trainer, attached: Attached, data: TrainingData, folder: RunFolder) -> None:
    for line in data.about.lines():
        say(line)
    share = 100 * attached.trained / attached.total
    start = f", from step {trainer.progress.step}" if trainer.progress.step else ""
    say(f"{attached.trained:,} of {attached.total:,} parameters are trained ({share:.2g} %)")
    say(f"{trainer.total} steps of {trainer.config.accumulate * data.batch_size} rows{start}; run folder {folder.path}")


def _facts(folder: RunFolder) -> dict[str, Any]:
    """What the page shows of a run."""
    noted = folder.about
    return {**noted["outcome"], **{key: value for key, value in noted.items() if key != "outcome"}}


def _tell(outcome: Outcome, folder: RunFolder, pictured: bool, config: Config) -> None:
    if outcome.best_loss is not None:
        worse = "; no step made it better" if outcome.best_step == 0 else ""
        say(f"best validation loss {outcome.best_loss:.4f} at step {outcome.best_step}{worse}")
    if outcome.ended == "interrupted":
        say(f"interrupted after step {outcome.steps}; resume={folder.path} goes on")
    elif outcome.ended == "early":
        say(f"stopped early after step {outcome.steps}: {config.task['patience']} evaluations brought nothing")
    if not pictured:
        say(NO_PICTURE)
    say(f"report {folder.path / 'report.html'}; try it with adapter.path={folder.adapter}")
    write(f"{folder.adapter}\n")

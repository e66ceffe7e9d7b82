"""THE training loop. Pretraining, fine-tuning and distillation differ by loss, data, and what is trainable.

Everything random is a function of (seed, step), so a run that goes on from a checkpoint computes, bit for bit, what it
would have computed without the break.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlxgen.errors import RunError, require
from mlxgen.passes.adapted import set_dropout_key
from mlxgen.training.batch import Batch
from mlxgen.training.checkpoints import Checkpoints, Snapshot
from mlxgen.training.forward import PLAIN, Forward
from mlxgen.training.loss import Loss, evaluation_loss, next_token_loss, total_weight
from mlxgen.training.optimizers import Arrays, GroupedOptimizer
from mlxgen.training.schedules import Schedule

Event = dict[str, Any]


class Batches(Protocol):
    """The batches of a data set: `len` of them are one epoch, and the one at a step is always the same."""

    def __len__(self) -> int: ...

    def at(self, step: int) -> Batch: ...


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to train. Steps are optimizer updates; conf/task/finetune.yaml says what each field is for."""

    epochs: float = 3.0
    steps: int | None = None
    accumulate: int = 1
    max_grad_norm: float | None = 1.0
    ema: float | None = None
    neftune: float | None = None
    recompute: bool = False
    evaluate_every: int | None = None
    save_every: int | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        require(self.epochs > 0, "epochs", "above 0", self.epochs)
        require(self.max_grad_norm is None or self.max_grad_norm > 0, "max_grad_norm", "above 0", self.max_grad_norm)
        require(self.ema is None or 0 < self.ema < 1, "ema", "in (0, 1)", self.ema)
        require(self.neftune is None or self.neftune > 0, "neftune", "above 0", self.neftune)
        for name in ("steps", "accumulate", "evaluate_every", "save_every", "patience"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "at least 1", value)


@dataclass(kw_only=True)
class Progress:
    """Where a run stands, beside its arrays; a checkpoint keeps it."""

    step: int = 0
    tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    waited: int = 0  # evaluations since the best


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: done, early (stopping), or interrupted. Losses are per learned token."""

    ended: str
    steps: int
    tokens: int
    loss: float | None
    best_loss: float | None
    best_step: int | None


@dataclass(kw_only=True)
class Trainer:
    """One run. `valid`: batches to evaluate on. `report` is called with every event; `stop` asks whether to end."""

    decoder: Any
    optimizer: GroupedOptimizer
    schedule: Schedule
    train: Batches
    valid: Batches | None = None
    config: LoopConfig = field(default_factory=LoopConfig)
    seed: int = 0
    checkpoints: Checkpoints | None = None
    report: Callable[[Event], None] = lambda event: None
    stop: Callable[[], bool] = lambda: False
    loss: Loss = next_token_loss
    evaluation_loss: Loss = evaluation_loss

    def __post_init__(self) -> None:
        self.parameters: Arrays = dict(tree_flatten(self.decoder.trainable_parameters()))
        require(bool(self.parameters), "adapter", "one that trains something", "none")
        self.average: Arrays = {} if self.config.ema is None else dict(self.parameters)
        self.progress = Progress()
        self.per_epoch = math.ceil(len(self.train) / self.config.accumulate)
        self.total = self.config.steps or math.ceil(self.config.epochs * self.per_epoch)
        self._value_and_grad = mx.value_and_grad(self._loss_of)

    def run(self) -> Outcome:
        """Train to the end. Afterwards the decoder has the best weights if there was an evaluation, else the last.

        Raises RunError for a loss that is no number and for a disk that is full.
        """
        progress, loss, ended = self.progress, None, "done"
        if progress.step == 0:
            self._evaluate_and_save(start=True)
        while progress.step < self.total:
            if self.stop():
                ended = "interrupted"
                self._save()
                break
            loss = self._step(progress.step)
            progress.step += 1
            self._evaluate_and_save()
            if self.config.patience is not None and progress.waited >= self.config.patience:
                ended = "early"
                self._save()
                break
        self._take_best()
        return Outcome(
            ended=ended,
            steps=progress.step,
            tokens=progress.tokens,
            loss=loss,
            best_loss=progress.best_loss,
            best_step=progress.best_step,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot."""
        saved = snapshot.part("parameters")
        if {n: p.shape for n, p in saved.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise RunError("the checkpoint must be of what is trained now, but holds other parameters.")
        # In the order of before: sums over all parameters depend on it.
        average = snapshot.part("average")
        self._put({name: saved[name] for name in self.parameters})
        self.average = {name: average[name] for name in self.parameters} if average else {}
        self.optimizer.restore(snapshot.part("optimizer"))
        self.progress = Progress(step=snapshot.step, **snapshot.values)

    def evaluate(self) -> float:
        """The mean loss per learned token over all of `valid`, with the averaged weights if there are any."""
        assert self.valid is not None
        current = self.parameters
        if self.average:
            self._put(self._averaged())
        try:
            return evaluate(self.decoder, self.valid, self.evaluation_loss)
        finally:
            self._put(current)

    def _step(self, step: int) -> float:
        """One update; returns its mean loss."""
        start, config = time.perf_counter(), self.config
        batches = self._batches(step)
        weight = sum(total_weight(batch) for batch in batches)
        if weight == 0:
            self.report({"event": "skipped", "step": step, "why": "no token of the batch is learned"})
            return math.nan
        self.decoder.train()
        gradients: Arrays = {}
        loss = 0.0
        for number, batch in enumerate(batches):
            value, grads = self._value_and_grad(self.parameters, batch, self._forward(step, number), weight)
            gradients = {n: gradients[n] + g for n, g in grads.items()} if gradients else grads
            mx.eval(value, gradients)
            loss += float(value)
            self._check(loss, step, batch)
        gradients, norm = optim.clip_grad_norm(gradients, config.max_grad_norm or math.inf)
        self._check(float(norm), step, batches[-1])
        factor = self.schedule(step, self.total)
        self._put(self.optimizer.update(self.parameters, gradients, factor))
        if config.ema is not None:
            d = config.ema
            self.average = {n: d * a + (1 - d) * self.parameters[n] for n, a in self.average.items()}
        mx.eval(self.parameters, self.optimizer.arrays, self.average)
        tokens = sum(batch.num_tokens for batch in batches)
        self.progress.tokens += tokens
        took = time.perf_counter() - start
        self.report(
            {
                "event": "train",
                "step": step + 1,
                "epoch": (step + 1) / self.per_epoch,
                "loss": loss,
                "learning_rate": self.optimizer.peak * factor,
                "grad_norm": float(norm),
                "tokens": self.progress.tokens,
                "tokens_per_s": tokens / took,
                "peak_memory_bytes": mx.get_peak_memory(),
            }
        )
        return loss

    def _loss_of(self, parameters: Arrays, batch: Batch, forward: Forward, weight: float) -> mx.array:
        self.decoder.update(tree_unflatten(list(parameters.items())))
        return self.loss(self.decoder, batch, forward) / weight

    def _batches(self, step: int) -> list[Batch]:
        """The batches of an update; the last update of an epoch may have fewer."""
        epoch, number = divmod(step, self.per_epoch)
        first = number * self.config.accumulate
        count = min(self.config.accumulate, len(self.train) - first)
        return [self.train.at(epoch * len(self.train) + first + i) for i in range(count)]

    def _forward(self, step: int, number: int) -> Forward:
        noise, dropout = mx.random.split(random_key(self.seed, step, number))
        set_dropout_key(self.decoder, dropout)
        return Forward(neftune=self.config.neftune, key=noise, recompute=self.config.recompute)

    def _check(self, value: float, step: int, batch: Batch) -> None:
        """A loss that is no number must not reach the weights."""
        if math.isfinite(value):
            return
        raise RunError(
            f"the loss of step {step + 1} is {value}; it comes from {', '.join(self._blamed(batch)) or 'its batch'}. "
            f"{self._kept()} Lower `optimizer.learning_rate`, or look at that data."
        )

    def _blamed(self, batch: Batch) -> tuple[str, ...]:
        """The rows whose own loss is no number, else all."""
        bad = []
        for row, name in enumerate(batch.names):
            one = slice(row, row + 1)
            parts: dict[str, Any] = {n: getattr(batch, n) for n in ("inputs", "targets", "weights", "segments")}
            alone = replace(batch, **{n: None if a is None else a[one] for n, a in parts.items()})
            if not math.isfinite(float(self.evaluation_loss(self.decoder, alone, PLAIN))):
                bad.append(name)
        return tuple(bad) or batch.names

    def _kept(self) -> str:
        steps = self.checkpoints.steps() if self.checkpoints else []
        return f"The checkpoint of step {steps[-1]} is kept." if steps else "There is no checkpoint yet."

    def _evaluate_and_save(self, *, start: bool = False) -> None:
        """What is due after an update, or before the first one."""
        progress, config = self.progress, self.config
        last = progress.step == self.total
        due = start or last or progress.step % (config.evaluate_every or self.per_epoch) == 0
        if self.valid is not None and due:
            loss = self.evaluate()
            self.report({"event": "valid", "step": progress.step, "loss": loss})
            if math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss):
                progress.best_loss, progress.best_step, progress.waited = loss, progress.step, 0
            else:
                progress.waited += 1
        best = progress.best_step == progress.step and not start
        if best or last or (not start and progress.step % (config.save_every or self.per_epoch) == 0):
            self._save()

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        if not all(mx.isfinite(p).all().item() for p in self.parameters.values()):
            raise RunError(f"after step {self.progress.step} the weights are no numbers any more. {self._kept()}")
        parts = {"parameters": self.parameters, "average": self.average, "optimizer": self.optimizer.arrays}
        values = {name: value for name, value in vars(self.progress).items() if name != "step"}
        arrays = {f"{part}/{name}": array for part, tree in parts.items() for name, array in tree.items()}
        self.checkpoints.save(Snapshot(step=self.progress.step, arrays=arrays, values=values))

    def _take_best(self) -> None:
        """Leave the weights in the decoder that a run is for."""
        progress = self.progress
        if self.average:
            self._put(self._averaged())
        if self.checkpoints is not None and progress.best_step not in (None, 0, progress.step):
            best = self.checkpoints.load(progress.best_step)
            self._put(best.part("average") or best.part("parameters"))
        self.decoder.eval()

    def _averaged(self) -> Arrays:
        return {name: average.astype(self.parameters[name].dtype) for name, average in self.average.items()}

    def _put(self, parameters: Mapping[str, mx.array]) -> None:
        self.parameters = dict(parameters)
        self.decoder.update(tree_unflatten(list(parameters.items())))


def evaluate(decoder: Any, batches: Batches, loss: Loss = evaluation_loss) -> float:
    """The mean loss per learned token over one epoch of `batches`."""
    decoder.eval()
    total = weight = 0.0
    for number in range(len(batches)):
        batch = batches.at(number)
        total += float(loss(decoder, batch, PLAIN))
        weight += total_weight(batch)
    return total / weight if weight else math.nan


def random_key(seed: int, *place: int) -> mx.array:
    """A key of its own for every place in a run."""
    digest = hashlib.sha256(" ".join(map(str, (seed, *place))).encode()).digest()
    return mx.random.key(int.from_bytes(digest[:8], "little"))

"""A process that trains one engine on rows of tokens and says how it went, in JSON.

    python -m mlxgen.bench.training_worker ENGINE BLAS JOB.json        ENGINE mlxgen | mlx_lm, BLAS on | off

Both train the adapter that lies in a folder, with the same optimizer. `speed`: each engine's own loop and batches, all
rows twice, of which the second time counts. `losses`: the rows in their order, and mlx-lm's padding fault corrected.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Job = dict[str, Any]
"""folder, adapter, rows [[tokens, number of prompt tokens]], batch_size, learning_rate, what."""
Clocks = tuple[float, float]  # the wall's, and the processor's over all threads


def mlxgen_run(job: Job) -> dict[str, Any]:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxgen.config import AdapterConfig, ModelConfig
    from mlxgen.loading import load
    from mlxgen.passes.attach import attach
    from mlxgen.training.batch import Example
    from mlxgen.training.batches import Batches
    from mlxgen.training.optimizers import AdamW, GroupedOptimizer
    from mlxgen.training.schedules import Constant
    from mlxgen.training.trainer import LoopConfig, Trainer

    adapter = AdapterConfig(kind="lora", path=job["adapter"])
    loaded = load(ModelConfig(source=job["folder"], dtype="float32", fuse=False), adapter=adapter)
    attach(loaded.decoder, adapter, key=mx.random.key(0))
    examples = [
        Example(tokens=tuple(tokens), learned=tuple(i >= offset for i in range(len(tokens))))
        for tokens, offset in job["rows"]
    ]
    size = job["batch_size"]
    if job["what"] == "losses":
        batches: Any = _InOrder(examples, size)
    else:
        batches = Batches(examples, batch_size=size, seed=0)
    parameters = dict(tree_flatten(loaded.decoder.trainable_parameters()))
    optimizer = AdamW(learning_rate=job["learning_rate"], bias_correction=False)
    trainer = Trainer(
        decoder=loaded.decoder,
        optimizer=GroupedOptimizer(optimizer, parameters),
        schedule=Constant(),
        train=batches,
        config=LoopConfig(epochs=1 if job["what"] == "losses" else 2, max_grad_norm=None),
    )
    events: list[tuple[Clocks, float]] = []
    trainer.report = lambda event: events.append((_clocks(), event["loss"]))
    weights = _reset_memory()
    trainer.run()
    return _result(job, [clocks for clocks, _ in events], [loss for _, loss in events], weights)


class _InOrder:
    """Rows as they come, padded at the end."""

    def __init__(self, examples: Any, size: int):
        self._examples, self._size = examples, size

    def __len__(self) -> int:
        return len(self._examples) // self._size

    def at(self, step: int) -> Any:
        import mlx.core as mx
        import numpy as np

        from mlxgen.training.batch import Batch

        rows = self._examples[step * self._size : (step + 1) * self._size]
        length = max(len(row.tokens) for row in rows)
        tokens, learned = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), np.float32)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)], learned[i, : len(row.tokens)] = row.tokens, row.learned
        return Batch(
            inputs=mx.array(tokens[:, :-1]),
            targets=mx.array(tokens[:, 1:]),
            weights=mx.array(learned[:, 1:]),
            num_tokens=sum(len(row.tokens) for row in rows),
        )


def mlx_lm_run(job: Job) -> dict[str, Any]:
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner.datasets import CacheDataset
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(job["folder"]))
    model.freeze()
    load_adapters(model, job["adapter"])
    mx.eval(model.parameters())
    rows, size, same = job["rows"], job["batch_size"], job["what"] == "losses"
    callback: Any = _Callback()
    args = TrainingArgs(
        batch_size=size,
        iters=len(rows) // size * (1 if same else 2),
        steps_per_report=1,
        steps_per_eval=10**9,
        steps_per_save=10**9,
        adapter_file=str(Path(job["adapter"]) / "trained.safetensors"),
    )
    weights = _reset_memory()
    own: dict[str, Any] = {"iterate_batches": _rows_in_order(rows, size)} if same else {}
    optimizer = optim.Adam(learning_rate=job["learning_rate"])
    train(model, optimizer, CacheDataset(_Rows(rows)), args=args, training_callback=callback, **own)
    return _result(job, callback.ends, callback.losses, weights)


class _Rows:
    """As mlx-lm's own data sets: `len` of an item is not its number of tokens."""

    def __init__(self, rows: list[Any]):
        self._rows = rows

    def __getitem__(self, i: int) -> dict[str, int]:
        return {"messages": i}

    def __len__(self) -> int:
        return len(self._rows)

    def process(self, item: dict[str, int]) -> tuple[list[int], int]:
        tokens, offset = self._rows[item["messages"]]
        return list(tokens), offset


class _Callback:
    def __init__(self) -> None:
        self.ends: list[Clocks] = []
        self.losses: list[float] = []

    def on_train_loss_report(self, info: dict[str, Any]) -> None:
        self.ends.append(_clocks())
        self.losses.append(info["train_loss"])

    def on_val_loss_report(self, info: dict[str, Any]) -> None: ...


def _rows_in_order(rows: list[Any], size: int) -> Callable[..., Iterator[Any]]:
    import mlx.core as mx
    import numpy as np

    def batches(**_: Any) -> Iterator[Any]:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            tokens = np.zeros((size, max(len(t) for t, _ in part)), np.int32)
            for i, (t, _) in enumerate(part):
                tokens[i, : len(t)] = t
            # Its loss takes the first position of the padding along, unless a row is said to be one shorter.
            yield mx.array(tokens), mx.array([(offset, len(t) - 1) for t, offset in part])

    return batches


def _reset_memory() -> int:
    """Bytes of the weights, from which the peak is counted."""
    import mlx.core as mx

    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _clocks() -> Clocks:
    return time.perf_counter(), time.process_time()


def _result(job: Job, ends: list[Clocks], losses: list[float], weights: int) -> dict[str, Any]:
    import mlx.core as mx

    tokens = sum(len(row[0]) for row in job["rows"])
    wall, cpu = (end - begin for begin, end in zip(ends[len(ends) // 2 - 1], ends[-1], strict=True))
    return {
        "losses": losses,
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "peak_bytes": mx.get_peak_memory() - weights,
    }


def main(engine: str, blas: str, job: str) -> None:
    os.environ["MLXGEN_BLAS"] = "off" if blas == "off" else "auto"
    if blas == "on":
        import mlxgen.device  # noqa: F401  for mlx-lm too: the same BLAS in both
    answers, sys.stdout = sys.stdout, sys.stderr
    run = {"mlxgen": mlxgen_run, "mlx_lm": mlx_lm_run}[engine]
    print(json.dumps(run(json.loads(Path(job).read_text()))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A tiny model, and data that is a function of the step."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

from mlxgen.testing.models import tiny_decoder
from mlxgen.training.batch import Batch
from mlxgen.training.optimizers import AdamW, GroupedOptimizer
from mlxgen.training.schedules import Constant
from mlxgen.training.trainer import LoopConfig, Trainer


def make_batch(number: int, rows: int = 2, length: int = 12, share: float = 0.6) -> Batch:
    """Random tokens, of which about `share` are learned."""
    text, learned = mx.random.split(mx.random.key(number))
    tokens = mx.random.randint(0, 298, (rows, length + 1), key=text)
    weights = (mx.random.uniform(shape=(rows, length), key=learned) < share).astype(mx.float32)
    names = tuple(f"train.jsonl line {number * rows + row + 1}" for row in range(rows))
    return Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], weights=weights, num_tokens=rows * length, names=names)


class Listed:
    """Batches from a list; every epoch has them in the same order."""

    def __init__(self, batches):
        self.batches = list(batches)

    def __len__(self):
        return len(self.batches)

    def at(self, step):
        return self.batches[step % len(self)]


def make_trainer(batches=None, *, optimizer=None, decoder=None, schedule=None, loop=None, **others):
    decoder = decoder if decoder is not None else tiny_decoder()
    parameters = dict(tree_flatten(decoder.trainable_parameters()))
    return Trainer(
        decoder=decoder,
        optimizer=GroupedOptimizer(optimizer or AdamW(learning_rate=1e-3), parameters),
        schedule=schedule or Constant(),
        train=Listed(batches or [make_batch(i) for i in range(4)]),
        config=LoopConfig(**(loop or {})),
        **others,
    )

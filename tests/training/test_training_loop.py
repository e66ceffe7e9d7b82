import math

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from training_batches import Listed, make_batch, make_trainer

from mlxgen.errors import ConfigError, RunError
from mlxgen.testing.models import tiny_decoder
from mlxgen.training.batch import Batch
from mlxgen.training.checkpoints import Checkpoints
from mlxgen.training.optimizers import SGD, Adafactor, AdamW, GroupedOptimizer, Lion, Muon
from mlxgen.training.schedules import Constant, Cosine, Linear, WarmupStableDecay

OPTIMIZERS = [
    AdamW(learning_rate=1e-3, weight_decay=0.1),
    Muon(learning_rate=1e-2),
    Adafactor(learning_rate=1e-2),
    Lion(learning_rate=1e-4),
    SGD(learning_rate=0.1, momentum=0.9),
]


def equal(a, b):
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]).item() for name in a)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_optimizer_learns_and_goes_on_exactly(optimizer, tmp_path):
    """Ten steps, against five, a checkpoint, and five more."""
    loop = {"steps": 10, "save_every": 5, "ema": 0.9, "accumulate": 2, "neftune": 5.0}
    valid = Listed([make_batch(0)])

    def trainer(folder):
        checkpoints = Checkpoints(tmp_path / folder)
        return make_trainer(
            optimizer=optimizer, schedule=Cosine(warmup=2), loop=loop, valid=valid, checkpoints=checkpoints, seed=3
        )

    whole, first, second = trainer("whole"), trainer("broken"), trainer("broken")
    before = whole.evaluate()
    whole.run()
    first.stop = lambda: first.progress.step == 5
    assert first.run().ended == "interrupted"
    second.restore(Checkpoints(tmp_path / "broken").load(5))
    assert second.run().ended == "done"
    assert whole.evaluate() < before
    assert equal(second.parameters, whole.parameters)
    ends = [Checkpoints(tmp_path / name).load(10) for name in ("whole", "broken")]
    assert equal(ends[0].arrays, ends[1].arrays) and ends[0].values == ends[1].values


def test_accumulated_batches_equal_the_big_batch():
    """Weighted by tokens: batches of different weight give the gradient of all their tokens."""
    small = [make_batch(0, share=0.1), make_batch(1, share=1.0), make_batch(2, share=0.5)]
    joined = {n: mx.concatenate([getattr(b, n) for b in small]) for n in ("inputs", "targets", "weights")}
    big = Batch(**joined, num_tokens=sum(b.num_tokens for b in small))
    one = make_trainer([big], optimizer=SGD(learning_rate=0.5), loop={"steps": 1})
    many = make_trainer(small, optimizer=SGD(learning_rate=0.5), loop={"steps": 1, "accumulate": 3})
    assert one.run().loss == pytest.approx(many.run().loss, rel=1e-6)
    for name, value in one.parameters.items():
        assert mx.allclose(value, many.parameters[name], rtol=1e-5, atol=1e-6).item(), name


def test_every_batch_is_seen_once_an_epoch_and_the_last_update_may_be_smaller():
    seen = []

    class Noted(Listed):
        def at(self, step):
            seen.append(step)
            return super().at(step)

    trainer = make_trainer(loop={"epochs": 2, "accumulate": 3})
    trainer.train = Noted([make_batch(i) for i in range(4)])
    assert trainer.total == 4 and trainer.run().steps == 4
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


def test_schedules():
    """Warm-up of 100 to 1e-5, then a cosine to 1e-6 over 1000: by hand."""
    cosine = Cosine(warmup=100, end=0.1)
    rates = [1e-5 * cosine(step, 1100) for step in (0, 50, 100, 600, 1100)]
    assert rates == pytest.approx([0, 5e-6, 1e-5, 5.5e-6, 1e-6])
    assert [Linear(end=0.5)(step, 10) for step in (0, 5, 10)] == pytest.approx([1, 0.75, 0.5])
    assert [WarmupStableDecay(decay=0.2)(step, 10) for step in (0, 8, 9, 10)] == pytest.approx([1, 1, 0.5, 0])
    assert Constant(warmup=0.1)(5, 100) == 0.5 and Constant()(99, 100) == 1
    with pytest.raises(ConfigError, match="`decay` must be in"):
        WarmupStableDecay(decay=0)


def test_long_gradients_are_scaled():
    batch = make_batch(0)
    norms = []
    trainer = make_trainer([batch], optimizer=SGD(learning_rate=1.0), loop={"steps": 1, "max_grad_norm": 0.1})
    before = dict(trainer.parameters)
    trainer.report = lambda event: norms.append(event["grad_norm"])
    trainer.run()
    moved = math.sqrt(sum(((trainer.parameters[n] - before[n]) ** 2).sum().item() for n in before))
    assert norms[0] > 0.1 and moved == pytest.approx(0.1, rel=1e-3)


def test_vectors_do_not_decay_and_some_parameters_learn_faster():
    parameters = {"a": mx.ones((2, 2)), "b": mx.ones((2, 2)), "norm": mx.ones((2,))}
    optimizer = GroupedOptimizer(SGD(learning_rate=0.1, weight_decay=1.0), parameters, {"b": 4.0})
    zero = {name: mx.zeros_like(p) for name, p in parameters.items()}
    after = optimizer.update(parameters, zero, 1.0)
    assert [after[n].reshape(-1)[0].item() for n in ("a", "b", "norm")] == pytest.approx([0.9, 0.6, 1.0])


def test_muon_leaves_embeddings_and_vectors_to_adamw():
    trained = dict(tree_flatten(tiny_decoder().trainable_parameters()))
    kinds = {name: type(Muon(learning_rate=1e-3).of(name, p)).__name__ for name, p in trained.items()}
    assert kinds["embed_tokens.weight"] == kinds["final_norm.weight"] == "AdamW"
    assert kinds["layers.0.mlp.up_proj.weight"] == "Muon"


def test_adam_by_hand():
    """First step of Adam with bias correction: the sign of the gradient times the learning rate."""
    parameters = {"a": mx.array([[1.0, 2.0]])}
    optimizer = GroupedOptimizer(AdamW(learning_rate=0.1), parameters)
    after = optimizer.update(parameters, {"a": mx.array([[0.5, -3.0]])}, 0.5)
    assert after["a"].tolist()[0] == pytest.approx([0.95, 2.05], rel=1e-5)


def test_a_loss_that_is_no_number_names_its_row_and_keeps_the_weights(tmp_path):
    decoder = tiny_decoder(tie_word_embeddings=False)
    poison = 17
    decoder.embed_tokens.weight[poison] = math.inf
    clean = [
        Batch(**{**vars(b), "inputs": mx.where(b.inputs == poison, 1, b.inputs)}) for b in map(make_batch, range(3))
    ]
    bad = Batch(**{**vars(clean[2]), "inputs": clean[2].inputs.at[1, 3].add(poison - clean[2].inputs[1, 3])})
    decoder.freeze()
    decoder.layers[1].unfreeze()
    checkpoints = Checkpoints(tmp_path)
    trainer = make_trainer([clean[0], clean[1], bad], decoder=decoder, loop={"save_every": 1}, checkpoints=checkpoints)
    with pytest.raises(RunError, match=r"loss of step 3 is nan; it comes from train.jsonl line 6\. The checkpoint of"):
        trainer.run()
    assert checkpoints.steps() == [1, 2] and equal(checkpoints.load().part("parameters"), trainer.parameters)


def test_a_batch_that_teaches_nothing_is_no_step_of_the_weights():
    events = []
    trainer = make_trainer([make_batch(0, share=-1.0)], loop={"steps": 1}, report=events.append)
    before = dict(trainer.parameters)
    trainer.run()
    assert equal(before, trainer.parameters) and events[0]["event"] == "skipped"


def test_stops_early_and_takes_the_best(tmp_path):
    """Learning at an absurd rate makes it worse and worse."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    loop = {"epochs": 50, "evaluate_every": 1, "patience": 3}
    valid = Listed([make_batch(100, rows=4)])
    trainer = make_trainer(
        loop=loop, optimizer=AdamW(learning_rate=3e-2), valid=valid, checkpoints=checkpoints, evaluation_loss=None
    )
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.1, 3.2, 1.0])
    trainer.evaluate = lambda: next(losses)
    outcome = trainer.run()
    assert (outcome.ended, outcome.steps, outcome.best_step, outcome.best_loss) == ("early", 5, 2, 3.0)
    assert checkpoints.best() == 2 and checkpoints.steps() == [2, 5]
    assert equal(checkpoints.load(2).part("parameters"), dict(tree_flatten(trainer.decoder.trainable_parameters())))


def test_evaluation_is_weighted_by_tokens_and_repeats():
    trainer = make_trainer(valid=Listed([make_batch(0, share=0.1), make_batch(1, rows=1, share=1.0)]))
    losses, weights = [], []
    for batch in trainer.valid.batches:
        losses.append(trainer.loss(trainer.decoder, batch).item())
        weights.append(batch.weights.sum().item())
    assert trainer.evaluate() == pytest.approx(sum(losses) / sum(weights), rel=1e-6)
    assert trainer.evaluate() == trainer.evaluate()


def test_average_of_the_weights():
    trainer = make_trainer(loop={"steps": 2, "ema": 0.5}, optimizer=SGD(learning_rate=0.1))
    first = dict(trainer.parameters)
    kept = []
    trainer.report = lambda event: kept.append(dict(trainer.parameters))
    trainer.run()
    name = "layers.0.mlp.up_proj.weight"
    expected = 0.25 * first[name] + 0.25 * kept[0][name] + 0.5 * kept[1][name]
    assert mx.allclose(trainer.decoder.layers[0].mlp.up_proj.weight, expected, atol=1e-7).item()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "`epochs` must be above 0"),
        ({"accumulate": 0}, "`accumulate` must be at least 1"),
        ({"ema": 1.0}, r"`ema` must be in \(0, 1\)"),
        ({"max_grad_norm": 0.0}, "`max_grad_norm` must be above 0"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(loop=values)

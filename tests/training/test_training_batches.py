"""Batches: every example once an epoch, the same for the same seed and step, packed or padded."""

import math
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxgen.errors import ConfigError
from mlxgen.testing.models import tiny_decoder
from mlxgen.training.batch import Example
from mlxgen.training.batches import Batches, pack, padded
from mlxgen.training.forward import Forward
from mlxgen.training.loss import evaluation_loss, next_token_loss, total_weight

few = settings(max_examples=30, deadline=None)
LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def examples_of(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [
        Example(
            tokens=tuple(random.integers(1, 298, length).tolist()),
            learned=(False, *(random.random(length - 1) < 0.7).tolist()),
            name=f"line {number}",
        )
        for number, length in enumerate(lengths, 1)
    ]


def held(batch):
    """(inputs, targets, weights) of each example of a batch, found again."""
    found = []
    segments = np.array(batch.segments) if batch.segments is not None else None
    for row in range(batch.inputs.shape[0]):
        inputs, targets, weights = (np.array(a[row]) for a in (batch.inputs, batch.targets, batch.weights))
        marks = segments[row] if segments is not None else np.where(inputs > 0, 0, -1)
        for number in range(marks.max() + 1):
            at = marks == number
            found.append((tuple(inputs[at].tolist()), tuple(targets[at].tolist()), tuple(weights[at].tolist())))
        assert not weights[marks < 0].any()
    return found


@few
@given(lengths=LENGTHS, size=st.integers(1, 5), packing=st.booleans(), shuffle=st.booleans(), seed=st.integers(0, 3))
def test_an_epoch_has_every_example_once(lengths, size, packing, shuffle, seed):
    examples = examples_of(lengths)
    options = dict(batch_size=size, packing=packing, max_length=64, shuffle=shuffle, seed=seed)
    batches = Batches(examples, **options)
    wanted = Counter((e.tokens[:-1], e.tokens[1:], tuple(map(float, e.learned[1:]))) for e in examples)
    for epoch in range(2):
        steps = range(epoch * len(batches), (epoch + 1) * len(batches))
        epoch_batches = [batches.at(step) for step in steps]
        assert Counter(example for batch in epoch_batches for example in held(batch)) == wanted
        assert sum(batch.num_tokens for batch in epoch_batches) == sum(lengths) - len(lengths)
        assert all(batch.inputs.shape[0] == len(batch.names) <= size for batch in epoch_batches)
    again = Batches(examples, **options).at(steps[-1])  # without the steps before
    assert mx.array_equal(again.inputs, epoch_batches[-1].inputs) and again.names == epoch_batches[-1].names


def test_every_epoch_has_an_order_of_its_own_and_every_seed_others():
    examples = examples_of(range(2, 42))

    def order(seed, epoch):
        batches = Batches(examples, seed=seed)
        return [batches.at(epoch * len(batches) + i).names for i in range(len(batches))]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)


def test_without_shuffling_examples_come_as_they_stand():
    batches = Batches(examples_of([9, 3, 20, 5, 4]), batch_size=2, shuffle=False)
    assert [name for i in range(3) for name in batches.at(i).names] == [f"line {i}" for i in range(1, 6)]


def test_examples_of_a_batch_are_of_about_the_same_length_and_there_are_few_shapes():
    random = np.random.default_rng(0)
    batches = Batches(examples_of(random.integers(20, 251, 256)), batch_size=4)
    assert batches.padding() < 0.1
    shapes = {batches.at(i).inputs.shape for i in range(len(batches))}
    assert len(shapes) <= 24 and all(shape[1] % 8 == 0 for shape in shapes)


@given(length=st.integers(1, 10_000))
def test_padding_is_of_an_eighth_at_most(length):
    assert length <= padded(length) < length * 1.126 + 8


@few
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80), capacity=st.integers(50, 120))
def test_rows_hold_what_fits_and_are_well_filled(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert max(used) <= capacity
    # What any greedy packing holds to: two rows that would fit into one are never left.
    assert all(a + b > capacity for n, a in enumerate(used) for b in used[:n])


def test_packing_leaves_hardly_any_padding():
    lengths = np.random.default_rng(0).integers(20, 251, 400)
    assert Batches(examples_of(lengths), batch_size=1, packing=True, max_length=1024).padding() < 0.02


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma2", dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=16)),
        ("lfm2", dict(layer_types=["conv", "full_attention"])),
        ("mamba", {}),
    ],
)
def test_packed_and_padded_rows_have_the_same_loss(family, changes):
    decoder, examples = tiny_decoder(family, **changes), examples_of([2, 30, 17, 9, 40, 12, 5])
    losses = []
    for packing in (False, True):
        batches = Batches(examples, batch_size=2, packing=packing, max_length=48)
        parts = [batches.at(i) for i in range(len(batches))]
        weight = sum(map(total_weight, parts))
        losses.append(sum(evaluation_loss(decoder, part).item() for part in parts) / weight)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "mamba"])
def test_layers_of_packed_rows_computed_again_give_the_same_gradients(family):
    sharing = dict(
        num_hidden_layers=4, num_kv_shared_layers=2, head_dim=16, vocab_size_per_layer_input=298,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    decoder = tiny_decoder(family, **(sharing if family == "gemma3n_text" else {}))
    batch = Batches(examples_of([2, 30, 17, 9]), batch_size=2, packing=True, max_length=40).at(0)
    kept, again = (
        dict(tree_flatten(nn.value_and_grad(decoder, next_token_loss)(decoder, batch, Forward(recompute=recompute))[1]))
        for recompute in (False, True)
    )
    for name, gradient in kept.items():
        assert mx.abs(again[name] - gradient).max().item() <= 1e-5 * (mx.abs(gradient).max().item() + 1), name


def test_noise_on_embeddings_of_packed_rows_is_by_the_length_of_each_text():
    decoder = tiny_decoder()
    layer = decoder.layers[0]
    batch = Batches(examples_of([4, 17, 9, 3]), batch_size=2, packing=True, max_length=21, shuffle=False).at(0)
    seen = []

    class Spy:
        def __call__(self, x, *args):
            seen.append(x)
            return x

        def __getattr__(self, name):
            return getattr(layer, name)

    decoder["layers"] = [Spy(), Spy()]
    for forward in (Forward(neftune=5.0, key=mx.random.key(0)), Forward()):
        forward(decoder, batch)
    noise = np.abs(np.array(seen[0] - seen[2])).max(-1).reshape(batch.inputs.shape)
    segments = np.array(batch.segments)
    for row, marks in enumerate(segments):
        for number in range(marks.max() + 1):
            at = marks == number
            bound = 5.0 / math.sqrt(at.sum() * 64)
            assert 0.8 * bound < noise[row, at].max() <= bound * 1.0001


def test_what_cannot_be_batched_is_an_error():
    with pytest.raises(ConfigError, match=r"`data.max_length` must be at least 19, but is 10\."):
        Batches(examples_of([5, 20]), packing=True, max_length=10)
    with pytest.raises(ConfigError, match=r"`data\.path` must hold an example"):
        Batches([])
    with pytest.raises(ConfigError, match=r"`data\.batch_size` must be at least 1"):
        Batches(examples_of([5]), batch_size=0)

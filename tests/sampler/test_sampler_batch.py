"""Many requests in one batch: the same tokens as each alone. States are values. Nothing waits for a value."""

import io
import re

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracles import Only

from mlxgen.sampler import Sampler, process, sample

V = 40
configs = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0, 0.3, 0.7, 1.0, 1.5])},
    optional={
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0, 1),
        "top_n_sigma": st.floats(0, 3),
        "xtc": st.fixed_dictionaries({"probability": st.floats(0, 1), "threshold": st.floats(0, 0.5)}),
        "dry": st.fixed_dictionaries(
            {
                "multiplier": st.floats(0.1, 2),
                "allowed_length": st.integers(1, 3),
                "window": st.integers(0, 9),
            },
            optional={"sequence_breakers": st.lists(st.integers(0, 3), max_size=2)},
        ),
        "repetition_penalty": st.fixed_dictionaries(
            {"penalty": st.floats(0.5, 2), "window": st.integers(0, 9)}
        ),
        "frequency_penalty": st.floats(-1, 1),
        "presence_penalty": st.floats(-1, 1),
        "mirostat": st.fixed_dictionaries({"tau": st.floats(0.5, 6), "eta": st.floats(0, 1)}),
        "dynamic_temperature": st.fixed_dictionaries({"range": st.floats(0, 1), "exponent": st.floats(0, 2)}),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=3),
    },
)
requests = st.tuples(configs, st.lists(st.integers(0, 3), max_size=12), st.integers())


def run(requests, steps=4, vocab_size=V, eos_ids=(0,)):
    """Tokens [steps, B] and the final processed logits [B, V]; every row has logits of its own."""
    samplers = [Sampler.from_config(config, eos_ids=eos_ids) for config, _, _ in requests]
    states = [s.start(prompt, seed) for s, (_, prompt, seed) in zip(samplers, requests, strict=True)]
    out, logits = [], mx.zeros((0,))
    for step in range(steps):
        rows = [np.random.default_rng([step, abs(seed)]).normal(size=vocab_size) * 3 for *_, seed in requests]
        raw = mx.array(np.array(rows, dtype=np.float32))
        logits = process(raw, samplers, states)
        tokens, states = sample(raw, samplers, states)
        out.append(tokens.tolist())
    return np.array(out), np.array(logits)


def assert_batch_equals_alone(batch, **kwargs):
    tokens, logits = run(batch, **kwargs)
    for row, request in enumerate(batch):
        alone_tokens, alone_logits = run([request], **kwargs)
        assert tokens[:, row].tolist() == alone_tokens[:, 0].tolist()
        np.testing.assert_array_equal(logits[row], alone_logits[0])  # bit for bit


@settings(max_examples=25, deadline=None)
@given(st.lists(requests, min_size=2, max_size=6))
def test_a_row_does_not_depend_on_its_neighbours(batch):
    assert_batch_equals_alone(batch)


@settings(max_examples=20, deadline=None)
@given(configs, st.lists(requests, min_size=2, max_size=5), st.data())
def test_rows_of_one_kind_with_other_numbers_are_sampled_together(config, others, data):
    batch = []
    for other, prompt, seed in others:
        mixed = {
            key: other[key] if key in other and data.draw(st.booleans()) else config[key] for key in config
        }
        batch.append((mixed, prompt, seed))
    assert_batch_equals_alone(batch, steps=2)


def test_large_vocabularies_in_a_batch():
    batch = [
        ({"temperature": 0.7, "top_p": 0.9}, [], 1),
        ({"temperature": 0.9, "top_p": 0.5}, [], 2),
        ({"temperature": 1.1, "top_p": 0.99}, [], 3),
        ({"temperature": 0.7, "top_k": 40, "top_p": 0.9}, [], 4),
        ({"temperature": 0.7, "top_k": 50, "top_p": 0.9}, [], 5),
        ({"temperature": 1, "typical_p": 0.9}, [], 6),
        ({"temperature": 1, "typical_p": 0.3}, [], 7),
        ({}, [], 8),
    ]
    assert_batch_equals_alone(batch, steps=2, vocab_size=9001)


def test_rows_with_equal_stages_share_a_group():
    first = Sampler.from_config({"temperature": 0.5, "top_p": 0.9, "logit_bias": {1: 2}})
    other = Sampler.from_config({"temperature": 0.7, "top_p": 0.2, "logit_bias": {3: 1, 4: 1}})
    assert first.batch_key == other.batch_key != Sampler.from_config({"temperature": 0.5}).batch_key


# ---- states


def test_a_state_can_be_rolled_back_and_continued():
    sampler = Sampler.from_config({"temperature": 1, "mirostat": 3, "repetition_penalty": 1.3, "dry": 1})
    row = mx.array(np.random.default_rng(0).normal(size=(1, V)).astype(np.float32))
    states, tokens = [sampler.start([1, 2, 3], seed=9)], []
    for _ in range(6):
        token, (state,) = sample(row, [sampler], [states[-1]])
        tokens.append(token.item())
        states.append(state)
    again, (state,) = sample(row, [sampler], [states[3]])
    assert again.item() == tokens[3]
    assert sample(row, [sampler], [state])[0].item() == tokens[4]
    assert states[6].history.tolist() == [1, 2, 3, *tokens]


def test_all_positions_of_a_draft_can_be_sampled_at_once():
    sampler = Sampler.from_config({"temperature": 1, "frequency_penalty": 0.5, "top_p": 0.9})
    rows = mx.array(np.random.default_rng(1).normal(size=(5, V)).astype(np.float32))
    state, tokens = sampler.start([1, 2], seed=3), []
    for i in range(5):
        token, (state,) = sample(rows[i : i + 1], [sampler], [state])
        tokens.append(token.item())
    drafts = [sampler.start([1, 2], seed=3)]
    for token in tokens[:-1]:
        drafts.append(drafts[-1].push(token))
    assert sample(rows, [sampler] * 5, drafts)[0].tolist() == tokens


def test_history_is_kept_only_where_a_stage_wants_it():
    assert Sampler.from_config({"temperature": 1, "top_p": 0.9}).start([1, 2]).history is None
    assert Sampler.from_config({"presence_penalty": 1}).start([1, 2]).history.tolist() == [1, 2]
    assert Sampler.from_config({"presence_penalty": 1}).start(mx.array([1, 2])).history.tolist() == [1, 2]


# ---- laziness and cost


def primitives(array):
    """The names of the operations that evaluating the array would run, views left out."""
    file = io.StringIO()
    mx.export_to_dot(file, array)
    names = re.findall(r'label ="(\w+)", shape=rectangle', file.getvalue())
    return [name for name in names if name not in ("Broadcast", "Squeeze", "Reshape", "ExpandDims", "Slice")]


def evaluated(*shape):
    logits = mx.array(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    mx.eval(logits)
    return logits


@pytest.mark.parametrize(
    "config",
    [{}, {"temperature": 1, "top_p": 0.9, "dry": 1, "mirostat": 2, "xtc": 1, "typical_p": 0.9, "top_k": 3}],
)
def test_nothing_is_evaluated_and_the_next_step_builds_on_unknown_tokens(config):
    sampler = Sampler.from_config(config)
    logits = mx.arcsinh(evaluated(1, V))
    state = sampler.start([1, 2, 1], seed=0)
    first, (state,) = sample(logits, [sampler], [state])
    second, _ = sample(mx.arcsinh(first[:, None] + evaluated(1, V)), [sampler], [state])
    names = primitives(second)
    assert names.count("ArcSinh") == 2  # an evaluated array has no history left


def test_greedy_is_one_argmax_and_the_check():
    sampler = Sampler.from_config({})
    names = primitives(sample(evaluated(1, V), [sampler], [sampler.start()])[0])
    assert sorted(names) == ["Abs", "ArgReduce", "AsType", "Less", "Max", "Select"]


def test_neutral_stages_cost_nothing():
    neutral = {
        "temperature": 1,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "typical_p": 1,
        "top_n_sigma": 0,
        "xtc": 0,
        "dry": 0,
        "mirostat": 0,
        "dynamic_temperature": 0,
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "logit_bias": {},
    }
    assert Sampler.from_config(neutral).stages == ()
    assert Sampler.from_config({"temperature": 1, "top_k": V}, vocab_size=V).stages == ()
    plain = Sampler.from_config({"temperature": 1})
    assert len(primitives(sample(evaluated(1, V), [plain], [plain.start()])[0])) < 30


def test_a_cpu_never_sorts_a_vocabulary():
    sampler = Sampler.from_config(
        {"temperature": 1, "top_p": 0.9, "top_k": 100, "typical_p": 0.9, "min_p": 0.1}
    )
    names = primitives(sample(evaluated(1, 4097), [sampler], [sampler.start()])[0])
    assert names.count("Partition") == 3  # top_k once, the other two once per halving
    assert names.count("Sort") == 2  # of the last half


# ---- a stage from outside


def test_a_stage_of_the_users_own_is_batched_too():
    samplers = [Sampler(stages=(Only(token=token),)) for token in (3, 5)]
    assert samplers[0].batch_key == samplers[1].batch_key
    states = [sampler.start(seed=1) for sampler in samplers]
    assert sample(evaluated(2, V), samplers, states)[0].tolist() == [3, 5]

"""What requests have held is free again, whoever was cancelled; a step's graph stays small."""

import random

import mlx.core as mx
import pytest
from engine_oracles import PARTS, POLICIES, alone, family, finish, new_sequence, random_request, random_tokens

from mlxgen.bench.counts import primitives
from mlxgen.bench.memory import held
from mlxgen.cache import Full, Rows, Window, merge
from mlxgen.engine import Engine, PrefixStore
from mlxgen.engine.batch import Batch
from mlxgen.engine.prefill import prefill
from mlxgen.sampler import Sampler, sample
from mlxgen.testing.models import tiny_decoder

KINDS = [("llama", Full()), ("llama", POLICIES[3]), ("gemma2", Window(size=9, sinks=2)), ("lfm2", Full())]


@pytest.mark.parametrize("name, policy", KINDS)
def test_rising_and_falling_lengths_leave_no_memory_behind(name, policy):
    found = held(family(name), 60, longest=80, policy=policy)
    requests = found.highest - found.before  # whatever else the process holds
    assert requests > 500_000  # there was something to give back
    assert found.after - found.before <= min(0.01 * found.before, 0.01 * requests)


def test_a_store_holds_its_budget_and_no_more():
    rnd, model = random.Random(5), family("llama")
    alone(model, random_request(rnd), Full())  # the model keeps some of what it needs at first
    mx.synchronize(), mx.clear_cache()
    before, store = mx.get_active_memory(), PrefixStore(400_000)
    engine = Engine(model, PARTS, store=store)
    for _ in range(25):
        engine.submit(random_request(rnd, prompt=random_tokens(rnd, 60)), new_sequence(model, Full()))
        engine.step()
    finish(engine)
    mx.clear_cache()
    assert 200_000 < store.nbytes <= 400_000
    assert store.nbytes <= mx.get_active_memory() - before <= 1.2 * store.nbytes  # MLX rounds small arrays up
    store.clear()
    mx.clear_cache()
    assert mx.get_active_memory() - before <= 8192


@pytest.mark.parametrize("policy", [*POLICIES, Window(size=400, sinks=4)])
def test_a_step_of_eight_rows_has_about_as_many_primitives_as_one_of_one(policy):
    """Each is a launch on a GPU. The layers are those of SmolLM2, but narrower and fewer."""
    shape = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=288, num_hidden_layers=6)
    model = tiny_decoder("llama", **shape)
    alone, together = (_step_size(model, policy, rows) for rows in (1, 8))
    assert together <= 1.3 * alone


def _step_size(model, policy, rows):
    sequences = [new_sequence(model, policy) for _ in range(rows)]
    for i, sequence in enumerate(sequences):
        prefill(model, sequence, list(range(3, 20 + 5 * i)), 512)
    batch, tokens = Batch(merge, Rows), mx.array([5] * rows)
    batch.change(sequences)
    for _ in range(2):
        mx.eval(batch.step(model, tokens), batch.state)
    samplers = [Sampler.from_config({"temperature": 0.8, "top_p": 0.9, "seed": i}) for i in range(rows)]
    picked, _ = sample(batch.step(model, tokens), samplers, [sampler.start(()) for sampler in samplers])
    return primitives(picked, *batch.state)

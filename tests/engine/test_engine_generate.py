"""The loop, against a loop of a few lines without cache, and with a model that says what it is told."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.cache import Full, Quantized, Rows, Window, merge
from mlxgen.engine import Engine, Parts, Request, TokenSequence
from mlxgen.errors import RequestError
from mlxgen.sampler import Sampler, logprobs, sample
from mlxgen.testing.models import ScriptedModel, tiny_decoder, tiny_spec

PARTS = Parts(sample=sample, logprobs=logprobs, merge=merge, rows=Rows)
GREEDY = Sampler.from_config({"temperature": 0})

POLICIES = [Full(), Window(size=600, sinks=2), Quantized(group_size=32, start=600)]  # none of them forgets here


def naive(model, prompt, count):
    """The oracle: the whole sequence anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(mx.argmax(model(mx.array([tokens]))[0, -1]).item())
    return tokens[len(prompt) :]


def run(model, prompt, policy=POLICIES[0], sequence=None, spec=None, **options):
    spec = spec or model.spec
    sequence = sequence or TokenSequence(lambda: policy(spec))
    engine = Engine(model, PARTS)
    generation = engine.submit(Request(prompt=tuple(prompt), sampler=GREEDY, **options), sequence)
    return [token.id for token in stream(engine, generation)]


def stream(engine, generation):
    while True:
        yield from generation.take()
        if generation.done:
            break
        engine.step()
    if generation.error:
        raise generation.error


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "gemma3_text"])
def model(request):
    extra = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32) if "moe" in request.param else {}
    extra |= dict(sliding_window=6, head_dim=32) if "gemma" in request.param else {}
    return tiny_decoder(request.param, **extra)


@settings(max_examples=8, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 297), min_size=1, max_size=23), chunk=st.sampled_from([1, 2, 5, 7, 22, 23, 24, 512])
)
def test_cached_and_chunked_equals_the_oracle(model, prompt, chunk):
    want = naive(model, prompt, 6)
    first = model.spec.layers[0].mixer
    exact = 1 if first.head_dim < 32 else 2 if first.window else 3  # own windows are quantized from their start
    for policy in POLICIES[:exact]:
        assert run(model, prompt, policy, max_tokens=6, prefill_chunk=chunk) == want


def test_the_next_prompt_goes_on_from_the_cache(model):
    sequence = TokenSequence(lambda: Full()(model.spec))
    first = run(model, [1, 2, 3, 4], sequence=sequence, max_tokens=5)
    longer = [1, 2, 3, 4, *first, 7, 8]
    assert len(sequence.tokens) >= 8
    assert run(model, longer, sequence=sequence, max_tokens=5) == naive(model, longer, 5)


def test_the_same_prompt_again_computes_at_least_one_token(model):
    sequence = TokenSequence(lambda: Full()(model.spec))
    want = naive(model, [5, 6, 7], 4)
    assert [run(model, [5, 6, 7], sequence=sequence, max_tokens=4) for _ in range(2)] == [want, want]


def test_an_early_close_leaves_caches_and_tokens_in_step(model):
    sequence = TokenSequence(lambda: Full()(model.spec))
    engine = Engine(model, PARTS)
    generation = engine.submit(Request(prompt=(1, 2, 3), sampler=GREEDY, max_tokens=50), sequence)
    tokens = stream(engine, generation)
    given_out = [next(tokens).id for _ in range(4)]
    engine.cancel(generation)
    assert sequence.tokens == [1, 2, 3, *given_out][: sequence.caches[0].offset]
    longer = [1, 2, 3, *given_out, 9]
    assert run(model, longer, sequence=sequence, max_tokens=4) == naive(model, longer, 4)


def scripted(script, **options):
    model = ScriptedModel(script, prompt_length=3)
    tokens = run(model, [7, 8, 9], spec=tiny_spec(), **options)
    return tokens, model


def test_end_of_sequence_ends():
    assert scripted([5, 6, 2, 8], max_tokens=10, eos_ids=frozenset({2, 3}))[0] == [5, 6, 2]
    assert scripted([5, 6, 3, 8], max_tokens=10, eos_ids=frozenset({2, 3}))[0] == [5, 6, 3]
    assert scripted([5, 6, 7, 8], max_tokens=2, eos_ids=frozenset({2}))[0] == [5, 6]
    assert scripted([5], max_tokens=0)[0] == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 512])
def test_the_output_head_sees_one_position_of_the_prompt(chunk):
    _, model = scripted([5, 6, 2], max_tokens=1, prefill_chunk=chunk)
    assert model.head_rows == 1


def test_scores_that_are_no_numbers_are_an_error():
    class Broken(ScriptedModel):
        def logits(self, hidden):
            return super().logits(hidden) * mx.nan

    with pytest.raises(RequestError, match="not numbers"):
        run(Broken([5], prompt_length=1), [1], spec=tiny_spec(), max_tokens=2)


def test_longrope_is_recomputed_where_its_factors_change():
    """A sequence that grows past the original context is rotated anew, as if it had been computed at once."""
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[3.0] * 8, rope_theta=1e4)
    model = tiny_decoder("phi3", rope_scaling=rope, original_max_position_embeddings=16, sliding_window=None)
    assert model.recompute_at == 16
    prompt = list(range(3, 15))
    assert run(model, prompt, max_tokens=10) == naive(model, prompt, 10)
    assert run(model, [*prompt, *prompt], max_tokens=3, prefill_chunk=5) == naive(model, [*prompt, *prompt], 3)

"""Log-probabilities of a prompt's tokens: those of one plain forward pass, in bounded memory, whatever is cached."""

import random

import mlx.core as mx
import pytest
from engine_oracles import GREEDY, PARTS, POLICIES, alone, finish, new_sequence, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.cache import Full
from mlxgen.engine import Engine, PrefixStore, Request, Scheduler
from mlxgen.testing.models import ScriptedModel, tiny_spec


def plain_scores(model, prompt):
    """[L - 1, V] log-probabilities of what follows each token."""
    logits = model(mx.array([prompt]))[0, :-1]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def check(model, prompt, scores, top):
    want = plain_scores(model, prompt) if len(prompt) > 1 else []  # nothing comes before the first token
    assert [token.id for token in scores] == list(prompt[1:])
    for row, token in zip(want, scores, strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        assert [value for _, value in token.top_logprobs] == pytest.approx(
            mx.sort(row)[::-1][:top].tolist(), abs=1e-4
        )
        assert all(row[i].item() == pytest.approx(value, abs=1e-4) for i, value in token.top_logprobs)


@pytest.mark.parametrize("length", [1, 2, 9, 70])
def test_they_are_those_of_one_plain_forward_pass(model, length):
    rnd = random.Random(length)
    prompt = random_tokens(rnd, length)
    engine = Engine(model, PARTS, store=PrefixStore(1 << 30))
    for chunk in (512, 7, 1)[: 3 if length < 20 else 2]:  # what the store knows from the first time must not be missing
        request = Request(prompt=prompt, sampler=GREEDY, max_tokens=3, prompt_logprobs=2, prefill_chunk=chunk)
        generation = engine.submit(request, new_sequence(model, Full()))
        finish(engine)
        check(model, prompt, generation.prompt_scores, 2)
        assert generation.produced == alone(model, request, Full()).produced


@settings(max_examples=10, deadline=None)
@given(prompt=st.lists(st.integers(0, 297), min_size=1, max_size=9))
def test_a_prompt_alone_can_be_scored(llama, prompt):
    """No token is asked for: the prompt is computed all the same, and may be used by others."""
    engine = Engine(llama, PARTS, store=PrefixStore(1 << 30))
    request = Request(prompt=tuple(prompt), sampler=GREEDY, max_tokens=0, prompt_logprobs=0)
    generation = engine.submit(request, new_sequence(llama, Full()))
    finish(engine)
    assert (generation.finish, generation.produced) == ("length", [])
    check(llama, prompt, generation.prompt_scores, 0)
    after = engine.submit(Request(prompt=(*prompt, 5), sampler=GREEDY, max_tokens=1), new_sequence(llama, Full()))
    finish(engine)
    assert after.cached_tokens == len(prompt)


@pytest.mark.parametrize("policy", POLICIES)
def test_among_others_that_run_and_make_room(model, policy):
    if policy != POLICIES[0] and model.spec.layers[-1].mixer is None:
        pytest.skip("this family has no such cache")
    rnd = random.Random(3)
    start = random_tokens(rnd, 20)
    options = dict(sampler=GREEDY, max_tokens=6, prefill_chunk=5)
    requests = [
        Request(prompt=start, **options),
        Request(prompt=start, prompt_logprobs=1, **options),  # the same, but its prompt must be looked at
        Request(prompt=(*start, 9), prompt_logprobs=0, priority=1, **options),
        Request(prompt=start[:9], **options),
    ]
    want = [alone(model, request, policy) for request in requests]
    engine = Engine(model, PARTS, Scheduler(max_rows=2), PrefixStore(1 << 30))
    running = []
    for request in requests:
        running.append(engine.submit(request, new_sequence(model, policy)))
        engine.step(), engine.step()
    finish(engine)
    for generation, expected in zip(running, want, strict=True):
        assert generation.produced == expected.produced
        scores = [token.logprob for token in generation.prompt_scores]
        assert scores == pytest.approx([token.logprob for token in expected.prompt_scores], abs=5e-2)


def test_the_logits_of_all_positions_are_never_held_at_once():
    class Watched(ScriptedModel):
        most = 0

        def logits(self, hidden):
            self.most = max(self.most, hidden.shape[1])
            return super().logits(hidden)

    model = Watched([5], prompt_length=300)
    request = Request(prompt=(1,) * 300, sampler=GREEDY, max_tokens=1, prompt_logprobs=0)
    generation = alone_with(model, request)
    assert len(generation.prompt_scores) == 299 and model.most <= 64


def test_scores_that_are_no_numbers_are_an_error():
    class Broken(ScriptedModel):
        def logits(self, hidden):
            return super().logits(hidden) * mx.nan

    for count in (0, 3):
        request = Request(prompt=(1, 2, 3), sampler=GREEDY, max_tokens=count, prompt_logprobs=0)
        generation = alone_with(Broken([5], prompt_length=3), request)
        assert generation.finish == "error" and "not numbers" in str(generation.error)


def alone_with(model, request):
    model.spec = tiny_spec()
    return alone(model, request, Full())

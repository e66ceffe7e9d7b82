"""Benchmarks: what lm-evaluation-harness is told, with a stand-in for it."""

import json
import math
import sys
import types

import mlx.core as mx
import pytest

import mlxgen
from mlxgen.tasks.harness import Scorer


@pytest.fixture(scope="module")
def scorer(tiny_checkpoint):
    return Scorer(mlxgen.load(f"model={tiny_checkpoint}", "sampler=greedy"))


def log_probability(scorer, tokens, count):
    """Of the last `count` tokens, one forward pass for each."""
    total = 0.0
    for end in range(len(tokens) - count, len(tokens)):
        logits = scorer._decoder(mx.array([tokens[:end]]))[0, -1]
        total += (logits[tokens[end]] - mx.logsumexp(logits)).item()
    return total


def test_continuations_in_batches_equal_one_by_one(scorer):
    pairs = [("the cat", " sat on"), ("a", " b"), ("one two three four", " five"), ("", "alone")]
    for (context, continuation), (score, greedy) in zip(pairs, scorer.loglikelihood(pairs), strict=True):
        first, rest = scorer._encoded(context, continuation)
        assert rest and score == pytest.approx(log_probability(scorer, [*first, *rest], len(rest)), rel=1e-4)
        assert greedy is False


def test_greedy_continuations_are_known(scorer):
    text = scorer.generate("the cat", {"max_gen_toks": 3, "until": []})
    first = scorer._encode("the cat")
    said = list(scorer._pipeline.generate("the cat", raw=True, max_tokens=3).tokens)
    assert scorer._scores([(first, said)])[0][1] is True and isinstance(text, str)


def test_whole_texts_longer_than_the_context(scorer):
    short = Scorer(scorer._pipeline)
    short._context = 5
    text = "the cat and the dog in the house"
    tokens = short._encode(text)
    expected = sum(
        log_probability(
            short, [*(short._start() if i == 0 else [tokens[i - 1]]), *tokens[i : i + 4]], len(tokens[i : i + 4])
        )
        for i in range(0, len(tokens), 4)
    )
    assert short.rolling(text) == pytest.approx(expected, rel=1e-4) and math.isfinite(expected)


def test_the_task_hands_the_model_to_the_harness(cli, tiny_checkpoint, monkeypatch):
    api, model, package = (types.ModuleType(name) for name in ("lm_eval.api", "lm_eval.api.model", "lm_eval"))
    model.LM = object

    def simple_evaluate(model, tasks, num_fewshot, limit):
        request = types.SimpleNamespace(args=("the cat", " sat"))
        return {
            "results": {tasks[0]: {"score": model.loglikelihood([request])[0][0], "shots": num_fewshot, "alias": "x"}}
        }

    package.simple_evaluate = simple_evaluate
    for module in (package, api, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    ran = cli("evaluate", f"model={tiny_checkpoint}", "task.benchmarks=[piqa]", "task.shots=2")
    assert ran.code == 0
    result = json.loads(ran.out)["piqa"]
    assert result.keys() == {"score", "shots"} and result["shots"] == 2 and result["score"] < 0


def test_without_the_harness(cli, tiny_checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ran = cli("evaluate", f"model={tiny_checkpoint}", "task.benchmarks=[piqa]")
    assert ran.code == 2 and "pip install lm-eval" in ran.err

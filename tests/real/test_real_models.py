"""Pretrained models, against transformers in float32 on the same dequantized weights (golden.json says how made)."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlxgen
from mlxgen.cache import Quantized

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
# Float32 on both sides; what is left is the order of sums over 30 layers, near 1e-4.
TOLERANCE = 1e-2


@pytest.fixture(scope="module", params=["smollm2_135m", pytest.param("gemma3_270m_base", marks=pytest.mark.full)])
def model(request):
    mx.reset_peak_memory()
    return request.param, mlxgen.load(f"model={request.param}", "model.dtype=float32", "sampler=greedy")


def test_prompt_logits_and_greedy_answer(model):
    name, pipeline = model
    for case in GOLDEN[name]["cases"]:
        ids = pipeline.encode(case["prompt"], pipeline.settings())
        assert ids == case["prompt_ids"]
        logits = pipeline.decoder(mx.array([ids]))[0, -1]
        assert mx.argsort(-logits)[:5].tolist() == case["top5_ids"]
        assert logits[mx.array(case["top5_ids"])].tolist() == pytest.approx(case["top5_logits"], abs=TOLERANCE)
        answer = pipeline.generate(case["prompt"], max_tokens=len(case["greedy_ids"]))
        ends = answer.finish_reason == "stop"
        assert answer.tokens == (case["greedy_ids"][:-1] if ends else case["greedy_ids"])


def test_loading_peaks_near_the_weights(model):
    """Read before anything else has been generated would be purer; the answers above need only little."""
    _, pipeline = model
    weights = sum(array.nbytes for _, array in tree_flatten(pipeline.decoder.parameters()))
    assert mx.get_peak_memory() <= 1.15 * weights


def test_a_conversation_keeps_its_cache(model):
    name, pipeline = model
    if name != "smollm2_135m":
        return  # the base model has no chat template
    chat = pipeline.chat(max_tokens=12)
    first = chat("My name is Ada. Say hello.")
    second = chat("What is my name?")
    assert second.stats.cached_tokens >= first.prompt_tokens
    messages = [dict(m) for m in chat.messages[:-1]]
    assert pipeline.generate(messages, max_tokens=12).text == second.text


def test_eight_bit_keys_and_values_barely_change_the_answer(model):
    """Measured: about 0.1 of logits near 25; 4 bits would be above 1."""
    name, pipeline = model
    policy = Quantized(k_bits=8, v_bits=8, group_size=64)
    tokens = mx.array([GOLDEN[name]["cases"][0]["prompt_ids"]])
    exact, rounded = (pipeline.decoder(tokens, caches)[0, -1] for caches in (None, policy(pipeline.spec)))
    assert 0 < mx.abs(exact - rounded).max() < 0.5

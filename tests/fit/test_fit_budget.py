"""What does not fit is refused with what would, before anything is loaded; what comes is queued."""

import gc
import json

import mlx.core as mx
import pytest

import mlxgen
from mlxgen.batching import answer_all
from mlxgen.errors import FitError
from mlxgen.fit.limit import _group, memory_limit_bytes


def limit_of(free: int) -> str:
    """The word for a limit that leaves so many bytes free: what other tests hold in this process is not."""
    gc.collect()
    mx.clear_cache()
    return f"memory_limit={free + mx.get_active_memory()}"


def test_a_run_that_does_not_fit_is_refused_with_what_would(cli, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(mlxgen.loading, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    ran = cli(f"model={tiny_checkpoint}", "prompt=Hi", limit_of(12_000_000), "batch=40", "context=500")
    assert ran.code == 4 and ran.err.count("\n") == 1
    assert "what fits: batch=" in ran.err and "or context=" in ran.err and "cache=quantized" in ran.err
    ran = cli(f"model={tiny_checkpoint}", "prompt=Hi", limit_of(100_000))
    assert ran.code == 4 and "take a smaller model" in ran.err


def test_plan_says_what_a_run_holds(cli, tiny_checkpoint):
    words = ("plan", f"model={tiny_checkpoint}", "batch=4", "context=400")
    report = json.loads(cli(*words, "output=json").out)
    parts = ("weights_bytes", "cache_bytes", "activations_bytes")
    assert report["total_bytes"] == sum(report[part] for part in parts) and report["fits"]
    assert report["cache_bytes"] == 4 * 2 * 2 * 2 * 16 * 4 * 512  # rows, layers, k and v, heads, size, float32, slots
    small = json.loads(cli(*words, "output=json", f"memory_limit={report['total_bytes'] - 1}").out)
    assert not small["fits"] and 0 < small["largest_batch"] < 4 and 0 < small["largest_context"] < 400
    ran = cli(*words, f"memory_limit={report['total_bytes'] - 1}")
    assert ran.code == 4 and "it does not fit; at most batch=" in ran.out
    for batch, fits in ((small["largest_batch"], True), (4, False)):
        limit = limit_of(small["limit_bytes"] - 1000)
        ran = cli(f"model={tiny_checkpoint}", "prompt=Hi", "max_tokens=1", f"batch={batch}", "context=400", limit)
        assert (ran.code == 0) == fits


def test_requests_queue_where_memory_is_short_and_the_impossible_fails_alone(tiny_checkpoint):
    words = [f"model={tiny_checkpoint}", "sampler=greedy", "max_tokens=8", "prefill_chunk=64"]
    ample = mlxgen.load(*words)
    jobs = [([5 + i] * 20, {"max_tokens": 400 if i == 3 else 8}) for i in range(9)]
    want = [ample.generate(p, **o).tokens for p, o in jobs]
    tight = mlxgen.load(*words)
    scheduler = tight.engine.scheduler
    scheduler.budget_bytes = scheduler.cost([type("G", (), {"request": r}) for r in [_request(28)]])
    together = []
    admit = scheduler.admit
    scheduler.admit = lambda: (admit(), together.append(len(scheduler.running) + len(scheduler.prefilling)))[0]
    results = dict(answer_all(tight, jobs))
    assert max(together) == 1
    for place, tokens in enumerate(want):
        assert isinstance(results[place], FitError) if place == 3 else results[place].tokens == tokens


def _request(tokens):
    from mlxgen.engine import Request

    return Request(prompt=(1,) * (tokens - 8), sampler=None, max_tokens=8, prefill_chunk=64)


def test_context_bounds_prompt_and_answer(tiny_checkpoint):
    pipe = mlxgen.load(f"model={tiny_checkpoint}", "context=30", "batch=2", "sampler=greedy")
    assert pipe.generate([5] * 20).completion_tokens <= 10 and pipe.engine.scheduler.max_rows == 2
    with pytest.raises(mlxgen.RequestError, match="context of 30 tokens, but has 31"):
        pipe.generate([5] * 31)


def test_limits(tmp_path):
    assert memory_limit_bytes(5) == 5 and memory_limit_bytes() > 10**8
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert _group(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert _group(tmp_path) is None and _group(tmp_path / "none") is None

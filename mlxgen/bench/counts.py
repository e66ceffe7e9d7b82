"""What carries over from a CPU to a GPU: primitives per decode step, host time to build it, and one sampler."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlxgen.device

# isort: split
import mlx.core as mx

import mlxgen
from mlxgen.bench.compare import Row, row
from mlxgen.cache import Full
from mlxgen.sampler import Sampler, sample

VOCABULARY = 151_936


def primitives(*outputs: mx.array) -> int:
    """Nodes of the graph that computes `outputs`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *outputs)
        return len(re.findall(r"\[label ?=", path.read_text()))


def decode_step(folder: Path, repeats: int = 40) -> list[Row]:
    """One decode step behind 32 tokens, in both engines: graph nodes, and the least host time to build the graph."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    decoder = mlxgen.load_model(folder)
    caches = Full()(decoder.spec)
    other, _ = load_model(folder)
    other_caches = make_prompt_cache(other)
    prompt, token = mx.arange(100, 132)[None], mx.array([[5]])
    mx.eval(decoder(prompt, caches), other(prompt, cache=other_caches))
    steps = [lambda: decoder(token, caches)[:, -1], lambda: other(token, cache=other_caches)[:, -1]]
    counts = [primitives(step()) for step in steps]
    ours, theirs = least_seconds(steps, repeats, build_only=True)
    return [
        row("primitives in the graph of one decode step", "", [counts[0]], [counts[1]], "<= 0.8"),
        row("host time to build it", "ms", [ours * 1e3], [theirs * 1e3], "<= 0.7"),
    ]


def top_p(repeats: int = 30) -> Row:
    """Nucleus sampling of one row over 151,936 candidates, against mlx-lm's."""
    from mlx_lm.sample_utils import apply_top_p

    logits = 3 * mx.random.normal((1, VOCABULARY), key=mx.random.key(0))
    sampler = Sampler.from_config({"temperature": 1.0, "top_p": 0.9}, vocab_size=VOCABULARY)
    state = sampler.start((), seed=1)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logits, logprobs)
    ours, theirs = least_seconds(
        [
            lambda: sample(logits, [sampler], [state])[0],
            lambda: mx.random.categorical(apply_top_p(logprobs, 0.9)),
        ],
        repeats,
    )
    return row(f"top-p at {VOCABULARY:,} tokens, one row", "ms", [ours * 1e3], [theirs * 1e3], "<= 0.4")


def least_seconds(steps: list[Callable[[], Any]], repeats: int, build_only: bool = False) -> list[float]:
    """The least time of each step, taken in turns; `build_only` stops the clock before anything is computed."""
    least = [float("inf")] * len(steps)
    for _ in range(repeats):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            result = step()
            if not build_only:
                mx.eval(result)
            least[i] = min(least[i], time.perf_counter() - start)
            mx.eval(result)
    return least

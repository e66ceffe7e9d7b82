"""Whether memory comes back: many requests of rising and falling length, some of them cancelled, through one engine."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx

from mlxgen.bench.compare import Row, row
from mlxgen.cache import Full, Rows, merge
from mlxgen.engine import Engine, Parts, Request, TokenSequence
from mlxgen.protocols import LanguageModel
from mlxgen.sampler import Sampler, logprobs, sample
from mlxgen.testing.models import tiny_decoder


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of MLX's arrays that are alive."""

    before: int
    highest: int
    after: int


def held(model: LanguageModel, requests: int, *, longest: int = 160, policy: Full | None = None) -> Held:
    """What is held around so many requests, weights included. Some warm the engine up before it is measured."""
    policy, rnd = policy or Full(), random.Random(0)
    parts = Parts(sample=sample, logprobs=logprobs, merge=merge, rows=Rows)
    engine = Engine(model, parts)
    _serve(engine, policy, rnd, min(requests, 20), longest)
    before = _alive()
    highest = _serve(engine, policy, rnd, requests, longest)
    return Held(before=before, highest=highest, after=_alive())


def returns(requests: int = 500) -> list[Row]:
    """On a tiny model, whose few weights hide nothing: what one forgotten row holds is more than 1 % of them."""
    others = _alive()  # models of other measurements
    found = held(tiny_decoder(), requests)
    after, before = ([(size - others) / 1e6] for size in (found.after, found.before))
    what = f"memory held after {requests} requests of rising and falling length"
    return [row(what, "MB", after, before, "<= 1.01", "before them")]


def _serve(engine: Engine, policy: Full, rnd: random.Random, count: int, longest: int) -> int:
    """Requests come faster than they are done. Returns the most bytes that were held."""
    highest, running = 0, []
    for place in range(count):
        length = 1 + int(longest * (1 - abs(2 * place / count - 1)))
        request = Request(
            prompt=tuple(rnd.randrange(298) for _ in range(length)),
            sampler=Sampler.from_config({"temperature": 1.0, "seed": place, "repetition_penalty": 1.1}),
            max_tokens=1 + length // 8,
            prefill_chunk=64,
        )
        running.append(engine.submit(request, TokenSequence(lambda: policy(engine.model.spec))))  # type: ignore[attr-defined]
        engine.step()
        if rnd.random() < 0.1:
            engine.cancel(running.pop(rnd.randrange(len(running))))
        running = [generation for generation in running if not generation.done]
        highest = max(highest, mx.get_active_memory())
    while engine.step():
        highest = max(highest, mx.get_active_memory())
    return highest


def _alive() -> int:
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()

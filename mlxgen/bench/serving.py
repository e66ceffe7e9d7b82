"""Many requests at once: against mlx-lm's batches, against fewer requests, and while a long prompt arrives."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlxgen.device

# isort: split
import mlx.core as mx

import mlxgen
from mlxgen.bench.compare import Row, row
from mlxgen.bench.counts import primitives
from mlxgen.engine import Generation, Request
from mlxgen.pipeline import Pipeline
from mlxgen.sampler import Sampler

Clock = Callable[[], float]
Job = tuple[list[int], int]
"""The tokens of a prompt, and how many new ones are wanted."""

_PROMPTS = (24, 200, 64, 350, 128, 16, 90, 260)
_ANSWERS = (64, 32, 48, 64, 40, 64, 56, 64)


def some_tokens(count: int, which: int = 0) -> list[int]:
    """An arbitrary text, another one for each `which`."""
    return [100 + (i * 7919 + which * 31) % 20000 for i in range(count)]


class Ours:
    """mlxgen's engine with one checkpoint; answers are greedy and of a fixed length.

    clock: seconds; time.process_time, of all threads together, on a machine that others use too.
    """

    def __init__(self, folder: Path, clock: Clock = time.perf_counter):
        self.clock = clock
        self.pipeline: Pipeline = mlxgen.load(f"model={folder}", "sampler=greedy")
        self.engine = self.pipeline.engine
        self.sampler = Sampler.from_config({"temperature": 0}).seeded()

    def submit(self, prompt: Sequence[int], count: int) -> Generation:
        chunk = self.pipeline.config.prefill_chunk
        vocabulary = self.pipeline.spec.vocab_size
        prompt = [token % vocabulary for token in prompt]
        request = Request(prompt=tuple(prompt), sampler=self.sampler, max_tokens=count, prefill_chunk=chunk)
        return self.engine.submit(request, self.pipeline.new_sequence())

    def decoding(self, jobs: Sequence[Job]) -> list[Generation]:
        """Requests that all have their first token."""
        generations = [self.submit(*job) for job in jobs]
        while not all(g.produced for g in generations):
            self.engine.step()
            for error in (g.error for g in generations if g.error is not None):
                raise error
        return generations

    def finish(self) -> None:
        while self.engine.step():
            pass

    def run(self, jobs: Sequence[Job]) -> float:
        """Seconds until all are done."""
        start = self.clock()
        for job in jobs:
            self.submit(*job)
        self.finish()
        return self.clock() - start


class Theirs:
    """What mlx-lm's batch_generate does, without its text: the same answers of a fixed length."""

    def __init__(self, folder: Path, clock: Clock):
        from mlx_lm.utils import load_model

        self.clock = clock
        self._model, _ = load_model(folder)

    def run(self, jobs: Sequence[Job]) -> float:
        from mlx_lm.generate import BatchGenerator

        start = self.clock()
        generator = BatchGenerator(self._model, stop_tokens=[])
        generator.insert([prompt for prompt, _ in jobs], [count for _, count in jobs])
        while generator.next_generated():
            pass
        generator.close()
        return self.clock() - start


def ragged(ours: Ours, folder: Path, repeats: int) -> list[Row]:
    """Eight requests of different lengths, in turns with mlx-lm."""
    theirs = Theirs(folder, ours.clock)
    jobs = [(some_tokens(length, i), count) for i, (length, count) in enumerate(zip(_PROMPTS, _ANSWERS, strict=True))]
    total = sum(_ANSWERS)
    for engine in (ours, theirs):
        engine.run([(some_tokens(32), 4)] * 2)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for engine, out in zip((ours, theirs), rates, strict=True):
            out.append(total / engine.run(jobs))
    return [row("8 ragged requests, same BLAS: all their tokens", "tok/s", *rates, ">= 1.2")]


def more_and_more(
    ours: Ours, repeats: int, counts: Sequence[int] = (1, 2, 4, 8, 16), new_tokens: int = 32
) -> list[Row]:
    """Tokens per second while so many requests decode, each against half as many."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        for count in counts:
            running = ours.decoding([(some_tokens(48, i), new_tokens + count) for i in range(count)])
            before, start = sum(len(g.produced) for g in running), ours.clock()
            while not any(g.done for g in running):
                ours.engine.step()
            rates[count].append((sum(len(g.produced) for g in running) - before) / (ours.clock() - start))
            ours.finish()
    return [
        row(f"decode of {more} requests at once", "tok/s", rates[more], rates[fewer], ">= 1.0", f"{fewer} at once")
        for fewer, more in itertools.pairwise(counts)
    ]


def arrival(ours: Ours, repeats: int, *, rows: int = 4, prompt_tokens: int = 2000) -> list[Row]:
    """The longest time between two tokens of requests that decode, while a long prompt arrives."""
    gaps, chunks = [], []
    prompt = some_tokens(prompt_tokens, 99)
    for _ in range(repeats):
        generation, times = ours.submit(prompt, 1), []
        while not generation.done:
            before = ours.clock()
            ours.engine.step()
            times.append(ours.clock() - before)
        chunks.append(max(times))
        running = ours.decoding([(some_tokens(48, i), 256) for i in range(rows)])
        arriving = ours.submit(prompt, 1)
        last, longest = ours.clock(), 0.0
        while not arriving.done:
            before = [len(g.produced) for g in running]
            ours.engine.step()
            assert [len(g.produced) for g in running] != before
            now = ours.clock()
            longest, last = max(longest, now - last), now
        gaps.append(longest)
        for generation in running:
            ours.engine.cancel(generation)
    what = f"a prompt of {prompt_tokens:,} arrives while {rows} requests decode: longest gap between their tokens"
    return [row(what, "s", gaps, chunks, "<= 1.5", f"one chunk of {ours.pipeline.config.prefill_chunk}")]


def step_size(ours: Ours, rows: int = 8) -> list[Row]:
    """Nodes of the graph of one decode step of several requests, against one."""
    counts = [_step_primitives(ours, count) for count in (rows, 1)]
    what = f"primitives in the graph of a decode step of {rows} requests"
    return [row(what, "", [counts[0]], [counts[1]], "<= 1.3", "one request")]


def _step_primitives(ours: Ours, count: int) -> int:
    """Of what the engine computes in one step, sampling included."""
    engine, seen = ours.engine, list[int]()
    running = ours.decoding([(some_tokens(32 + 3 * i, i), 16) for i in range(count)])
    for _ in range(2):
        engine.step()
    parts = engine.parts

    def counted(logits: mx.array, samplers: Sequence, states: Sequence) -> tuple:
        picked = parts.sample(logits, samplers, states)
        seen.append(primitives(picked[0]))
        return picked

    engine.parts = replace(parts, sample=counted)
    engine.step()
    engine.parts = parts
    for generation in running:
        engine.cancel(generation)
    return max(seen)

"""mlxgen and mlx-lm taking turns: whole processes, and workers that hold a model.

Both do the same work on the same weights in one run, so that a machine whose speed drifts treats them alike.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `ratio` is mlxgen's figure by the other; the bar says which side of it is right.

    against: whose or which the other figure is.
    """

    what: str
    unit: str
    mlxgen: float
    other: float
    against: str
    ratio: float
    bar: str

    @property
    def met(self) -> bool:
        if " to " in self.bar:
            least, most = map(float, self.bar.split(" to "))
            return least <= self.ratio <= most
        sign, limit = self.bar.split()
        return self.ratio <= float(limit) if sign == "<=" else self.ratio >= float(limit)


def row(what: str, unit: str, ours: list[float], theirs: list[float], bar: str, against: str = "mlx-lm") -> Row:
    """Medians, and the median of the ratios of neighbouring runs."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    a, b = statistics.median(ours), statistics.median(theirs)
    return Row(what=what, unit=unit, mlxgen=a, other=b, against=against, ratio=ratio, bar=bar)


def whole_process(folder: Path, repeats: int) -> Row:
    """CPU seconds, user and system, of a command that answers with one token."""
    prompt = "Hello"
    ours = [sys.executable, "-m", "mlxgen", f"model={folder}", f"prompt={prompt}", "max_tokens=1", "sampler=greedy"]
    theirs = [
        *(sys.executable, "-m", "mlx_lm", "generate", "--model", str(folder)),
        *("--prompt", prompt, "--max-tokens", "1", "--temp", "0"),
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for command, out in zip((ours, theirs), seconds, strict=True):
            used = _cpu_seconds(command)
            if turn:  # the first turn fills the disk cache
                out.append(used)
    return row("whole process, tiny checkpoint, one token: CPU time", "s", *seconds, "<= 0.45")


def _cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


class Worker:
    """A process of mlxgen.bench.worker."""

    def __init__(self, engine: str, folder: Path, blas: str):
        command = [sys.executable, "-m", "mlxgen.bench.worker", engine, str(folder), blas]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def time(self, prompt_tokens: int, count: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prompt_tokens} {count}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def speed(folder: Path, their_blas: str, prompt_tokens: int, new_tokens: int, repeats: int) -> list[Row]:
    """Prefill and decode tokens per second; `their_blas`: off, as pip installs mlx-lm, or on, the same as ours."""
    workers = [Worker("mlxgen", folder, "on"), Worker("mlx_lm", folder, their_blas)]
    prefill: tuple[list[float], list[float]] = ([], [])
    decode: tuple[list[float], list[float]] = ([], [])
    try:
        for _ in range(repeats):
            for worker, p, d in zip(workers, prefill, decode, strict=True):
                took = worker.time(prompt_tokens, new_tokens + 1)
                p.append(prompt_tokens / took["prefill_s"])
                d.append(took["decoded_tokens"] / took["decode_s"])
    finally:
        for worker in workers:
            worker.close()
    bars, case = (
        ((">= 10", ">= 2.5"), "as pip installs") if their_blas == "off" else ((">= 1.0", ">= 1.1"), "same BLAS")
    )
    return [
        row(f"SmolLM2 float32, {case}: prefill of {prompt_tokens}", "tok/s", *prefill, bars[0]),
        row(f"SmolLM2 float32, {case}: decode of {new_tokens}", "tok/s", *decode, bars[1]),
    ]

"""What a person sees while a model learns: a live display on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

_BLOCKS = "▁▂▃▄▅▆▇█"
_LINES = 20  # of a whole run, where there is no terminal
_CURVE = 48  # columns


def curve(losses: list[float], width: int = _CURVE) -> str:
    """A learning curve of one line; each column is the mean of its share of the losses."""
    width = min(width, len(losses))
    if not width:
        return ""
    cuts = [round(i * len(losses) / width) for i in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(_BLOCKS[round((m - low) / (high - low or 1) * (len(_BLOCKS) - 1))] for m in means)


class Lines:
    """Plain lines on standard error."""

    def __init__(self, total: int):
        self._total, self._every = total, max(total // _LINES, 1)
        self._recent: deque[float] = deque(maxlen=self._every)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        if event["event"] == "valid":
            self._print(f"step {step}/{self._total}: validation loss {event['loss']:.4f}")
        elif event["event"] == "train":
            self._recent.append(event["loss"])
            if step % self._every == 0 or step in (1, self._total):
                self._print(
                    f"step {step}/{self._total}: loss {sum(self._recent) / len(self._recent):.4f} · "
                    f"{event['tokens_per_s']:.0f} tok/s · {event['peak_memory_bytes'] / 1e6:.0f} MB"
                )
        else:
            self._print(f"step {step}: {event['event']}, {event['why']}")

    @staticmethod
    def _print(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Live:
    """Progress, learning curve and throughput, redrawn in place."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.live import Live as RichLive

        self._total, self._begin, self._start_step = total, time.monotonic(), None
        self._losses: list[float] = []
        self._valid: list[tuple[int, float]] = []
        self._live = RichLive(console=Console(stderr=True), refresh_per_second=4)

    def __enter__(self) -> Live:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.__exit__(*exception)

    def show(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "valid":
            self._valid.append((event["step"], event["loss"]))
        elif event["event"] == "train":
            self._losses.append(event["loss"])
            self._live.update(self._table(event))

    def _table(self, event: Mapping[str, Any]) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        step = event["step"]
        if self._start_step is None:
            self._start_step, self._begin = step, time.monotonic()
        done = step - self._start_step
        left = (time.monotonic() - self._begin) / done * (self._total - step) if done else None
        recent = self._losses[-10:]
        table = Table.grid(padding=(0, 2))
        table.add_row(f"step {step}/{self._total}", ProgressBar(self._total, step, width=_CURVE), _clock(left))
        loss = f"{self._losses[0]:.3f} → [bold]{sum(recent) / len(recent):.4f}[/bold]"
        table.add_row("loss", f"[cyan]{curve(self._losses)}[/cyan]", loss)
        if self._valid:
            (where, best), last = min(self._valid, key=lambda v: v[1]), self._valid[-1][1]
            table.add_row("validation", f"[green]{curve([v for _, v in self._valid])}[/green]", f"{last:.4f}")
            table.add_row("", "", f"[dim]best {best:.4f} at {where}[/dim]")
        speed = f"{event['tokens_per_s']:.0f} tok/s · {event['peak_memory_bytes'] / 1e6:.0f} MB"
        table.add_row("speed", speed, f"[dim]rate {event['learning_rate']:.2g} · epoch {event['epoch']:.2f}[/dim]")
        return table


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left" if minutes >= 60 else f"{minutes}:{seconds:02} left"


def display(total: int) -> Lines | Live:
    """What suits standard error."""
    return Live(total) if sys.stderr.isatty() else Lines(total)

"""How a download shows that it is alive: a bar on a terminal, one line otherwise. Always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlxgen.checkpoint.base import Progress


@contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """`progress` itself, or one that draws on stderr while the context lasts."""
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        with _bars() as draw:
            yield draw
    else:
        announced: set[str] = set()

        def announce(label: str, done: int, total: int | None) -> None:
            if label not in announced:
                announced.add(label)
                print(f"{label} ...", file=sys.stderr, flush=True)

        yield announce


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def draw(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)  # type: ignore[arg-type]

        yield draw

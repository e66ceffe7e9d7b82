"""What a person sees: the answer on standard output, and everything else on standard error."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from mlxgen.completion import Chunk, Completion
from mlxgen.config import Config
from mlxgen.pipeline import Pipeline


def play(chunks: Generator[Chunk, None, None], config: Config) -> Completion:
    """Show an answer as it comes; returns the whole. Ctrl-C ends it with what there is, wherever it strikes.

    Raises KeyboardInterrupt where there is no answer yet, or at a second Ctrl-C.
    """
    first, interrupted, pages = True, False, Pages(config.n)
    while True:
        try:
            with status("reading the prompt") if first else nullcontext():
                first = False
                chunk = chunks.throw(KeyboardInterrupt()) if interrupted else next(chunks)
            _show(chunk, config, pages)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            continue
        if chunk.completion is not None:
            return chunk.completion


def _show(chunk: Chunk, config: Config, pages: Pages) -> None:
    done = chunk.completion
    if config.output == "text":
        write(pages.turn(chunk))
    elif config.output == "jsonl":
        print_json(_event(chunk, config), config)
    elif done is not None:
        print_json(done.as_dict(), config)


class Pages:
    """Several answers that come at the same time, as text: one below the other, each under a line with its number."""

    def __init__(self, count: int):
        self._count = count
        self._waiting: dict[int, list[Chunk]] = defaultdict(list)
        self._at = 0  # the answer that is being shown
        self._end: str | None = None  # the last character of it; None before it has begun

    def turn(self, chunk: Chunk) -> str:
        """What can be shown now."""
        self._waiting[chunk.index].append(chunk)
        shown = ""
        while self._waiting[self._at]:
            piece = self._waiting[self._at].pop(0)
            if self._end is None:
                shown += f"--- {self._at + 1} of {self._count} ---\n" if self._count > 1 else ""
                self._end = ""
            shown += piece.text
            self._end = piece.text[-1:] or self._end
            if piece.finish_reason is not None:
                shown += "" if self._end == "\n" else "\n"
                self._at, self._end = self._at + 1, None
        return shown


def _event(chunk: Chunk, config: Config) -> dict[str, Any]:
    event: dict[str, Any] = {"index": chunk.index} if config.n > 1 else {}
    event["text"] = chunk.text
    if chunk.finish_reason is None:
        event["tokens"] = list(chunk.tokens)
    else:
        event["finish_reason"] = chunk.finish_reason
    if chunk.completion is not None:
        event["completion"] = chunk.completion.as_dict()
    if chunk.logprobs:
        event["logprobs"] = [dataclasses.asdict(entry) for entry in chunk.logprobs]
    return event


def print_json(data: dict[str, Any], config: Config) -> None:
    """One object, one line; in a sweep it says which run it belongs to."""
    variant = {"variant": list(config.variant)} if config.variant else {}
    write(json.dumps({**variant, **data}, ensure_ascii=False) + "\n")


def write(text: str) -> None:
    """In one piece, so that Ctrl-C does not tear a line."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_stats(completion: Completion, pipeline: Pipeline, config: Config, *, sampling: bool = True) -> None:
    """Speed and memory, and with `sampling` the values that were in force and who chose them."""
    if config.stats is False or (config.stats == "auto" and not sys.stderr.isatty()):
        return
    s = completion.stats
    cached = f" ({s.cached_tokens} cached)" if s.cached_tokens else ""
    say(
        f"{s.prompt_tokens} prompt tokens{cached}, {s.prefill_tokens_per_s:.0f} tok/s, first {s.ttft_s:.2f} s"
        f" · {s.completion_tokens} tokens, {s.decode_tokens_per_s:.1f} tok/s"
        f" · {s.peak_memory_bytes / 1e6:.0f} MB · {completion.finish_reason}"
    )
    if completion.complete is False:
        say("the answer is incomplete: it was cut before its rule allows an end")
    if s.speculation is not None:
        g = s.speculation
        note = f", {g.note}" if g.note else ""
        share = f"{g.acceptance:.0%} of {g.drafted} guessed tokens were right, in {g.checks} checks"
        say(f"{share}; {g.skipped} guesses not worth one{note}")
    if sampling:
        effective = pipeline.effective_sampling(pipeline.settings())
        values = [f"{n} {_value(effective.values, n)} ({by})" for n, by in effective.sources.items() if n != "order"]
        say(f"{', '.join(values)} · seed {completion.seed}")


def _value(values: Any, name: str) -> Any:
    """`xtc.threshold` of nested values."""
    for part in name.split("."):
        values = values[part]
    return values


def say(text: str) -> None:
    """A remark on standard error, dimmed on a terminal."""
    dim, plain = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


@contextmanager
def status(text: str) -> Iterator[None]:
    """A line on a terminal while something takes its time; it is gone afterwards."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{text} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\033[K", end="", file=sys.stderr, flush=True)

"""task=batch: a file of prompts through one engine."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from mlxgen.batching import AT_ONCE, Job, answer_all
from mlxgen.completion import Completion
from mlxgen.config import Config
from mlxgen.device import peak_memory_bytes
from mlxgen.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ConfigError, MlxgenError, require
from mlxgen.pipeline import Pipeline
from mlxgen.tasks.output import say, status
from mlxgen.tasks.prompt_lines import Line, count_lines, read_lines
from mlxgen.tasks.result_file import ResultFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """See conf/task/batch.yaml for the fields."""

    prompts: str | None = None
    out: str = "-"
    resume: bool = False
    overwrite: bool = False
    order: Literal["input", "done"] = "input"

    def __post_init__(self) -> None:
        require(not (self.resume and self.overwrite), "resume", "false with overwrite=true", self.resume)

    def __call__(self, config: Config) -> int:
        if self.prompts is None:
            raise ConfigError("`prompts` must be given: a file with one JSON object a line, or `-`.")
        if config.prompt is not None:
            raise ConfigError("`prompt` has no place in task=batch; each line of `prompts` has its own.")
        self._check_files(self.prompts)
        results = ResultFile(self.out, resume=self.resume, overwrite=self.overwrite)
        try:
            with status("loading the model"):
                pipeline = Pipeline(config)
            return self._run(config, pipeline, results)
        finally:
            results.close()

    def _check_files(self, name: str) -> None:
        if name == "-":
            return
        prompts = Path(name).expanduser()
        if not prompts.exists() or prompts.is_dir():
            raise ConfigError(f"`prompts` must be a file, but {name} is none.")
        if self.out != "-" and Path(self.out).expanduser().exists() and prompts.samefile(Path(self.out).expanduser()):
            raise ConfigError(f"`out` must be another file than `prompts`, but both are {self.out}.")

    def _run(self, config: Config, pipeline: Pipeline, results: ResultFile) -> int:
        tally = _Tally(code=EXIT_USAGE if results.failed else EXIT_OK)
        waiting: dict[int, Line] = {}  # what has been read and has no result yet
        shown = _Progress(self.prompts, results.count) if sys.stderr.isatty() else nullcontext(_silent)
        answers = answer_all(
            pipeline,
            self._jobs(results, waiting),
            at_once=min(AT_ONCE, pipeline.engine.scheduler.max_rows),
            ordered=self.order == "input",
            watch=lambda count: progress(0, count),
        )
        try:
            with shown as progress:
                for place, result in answers:
                    line = waiting.pop(place)
                    results.write({**line.about, **self._described(result, line, tally)})
                    progress(1, 0)
        except KeyboardInterrupt:
            tally.code = EXIT_INTERRUPTED
            print("\nmlxgen: interrupted; what was done is written", file=sys.stderr)
        finally:
            answers.close()
            tally.show(config)
        return tally.code

    def _jobs(self, results: ResultFile, waiting: dict[int, Line]) -> Iterator[Job | Exception]:
        place = 0
        assert self.prompts is not None
        for line in read_lines(self.prompts):
            if not results.done(line.about["index"]):
                waiting[place] = line
                place += 1
                yield line.job

    def _described(self, result: Completion | Exception, line: Line, tally: _Tally) -> dict[str, Any]:
        """What stands in a result's line; errors are reported besides."""
        if isinstance(result, Completion):
            tally.add(result)
            return result.as_dict()
        text = str(result) if isinstance(result, MlxgenError) else f"{type(result).__name__}: {result}"
        text = " ".join(text.split())
        tally.fail(getattr(result, "exit_code", 1))
        name = "standard input" if self.prompts == "-" else self.prompts
        print(f"mlxgen: {name}, line {line.number}: {text}", file=sys.stderr)
        return {"error": text}


@dataclasses.dataclass
class _Tally:
    """What has come of it all."""

    code: int
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def add(self, completion: Completion) -> None:
        self.done += 1
        for one in (completion, *completion.others):
            self.tokens += one.completion_tokens
        self.prompt_tokens += completion.prompt_tokens

    def fail(self, code: int) -> None:
        self.failed += 1
        self.code = max(self.code, code)

    def show(self, config: Config) -> None:
        if config.stats is False or (config.stats == "auto" and not sys.stderr.isatty()):
            return
        seconds = time.perf_counter() - self.started
        say(
            f"{self.done} answered, {self.failed} failed · {self.prompt_tokens} prompt tokens · {self.tokens} tokens, "
            f"{self.tokens / seconds:.1f} tok/s · {seconds:.1f} s · {peak_memory_bytes() / 1e6:.0f} MB"
        )


def _silent(prompts: int, tokens: int) -> None:
    pass


class _Progress(AbstractContextManager):
    """A bar on a terminal: prompts done, tokens a second, time left."""

    def __init__(self, prompts: str | None, done: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        speed = TextColumn("{task.fields[speed]:.0f} tok/s")
        columns = (BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=count_lines(prompts or "-"), completed=done, speed=0.0)
        self._tokens, self._started = 0, time.perf_counter()

    def __enter__(self) -> Any:
        self._bar.start()
        return self._advance

    def _advance(self, prompts: int, tokens: int) -> None:
        self._tokens += tokens
        speed = self._tokens / (time.perf_counter() - self._started)
        self._bar.update(self._task, advance=prompts, speed=speed)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

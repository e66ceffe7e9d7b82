"""Many prompts through one engine: they join and leave its batch at any time, and each answer comes when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlxgen.answering import Answers
from mlxgen.completion import Completion
from mlxgen.prompting import Prompt

if TYPE_CHECKING:
    from mlxgen.pipeline import Pipeline

AT_ONCE = 32  # prompts; more of them hardly make a step more worth its time


def answer_all(
    pipeline: Pipeline, jobs: Iterable[tuple[Prompt, Mapping[str, Any]]], *, at_once: int = AT_ONCE
) -> Iterator[tuple[int, Completion | Exception]]:
    """(place of the job, its completion or what it failed with), as they are done.

    jobs: prompts with what `Pipeline.generate` takes besides; read as there is room, so there may be any number.
    A job that fails, at whatever time, does not touch the others. To close the iterator cancels what is running.
    """
    queue, running = enumerate(jobs), dict[int, Answers]()
    try:
        while True:
            while len(running) < at_once and (job := next(queue, None)) is not None:
                place, (prompt, overrides) = job
                try:
                    running[place] = pipeline.start(prompt, **overrides)
                except Exception as error:
                    yield place, error
            if not running:
                return
            for place, answers in list(running.items()):
                result = _result(answers)
                if result is not None:
                    del running[place]
                    yield place, result
            pipeline.engine.step()
    finally:
        for answers in running.values():
            answers.cancel()


def _result(answers: Answers) -> Completion | Exception | None:
    """What has become of a job; None while it runs."""
    try:
        for _ in answers.chunks():
            pass
    except Exception as error:
        answers.cancel()
        return error
    return answers.completion

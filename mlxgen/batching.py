"""Many prompts through one engine: they join and leave its batch at any time, and each answer comes when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlxgen.answering import Answers
from mlxgen.completion import Completion
from mlxgen.prompting import Prompt

if TYPE_CHECKING:
    from mlxgen.pipeline import Pipeline

AT_ONCE = 32  # prompts; more of them hardly make a step more worth its time
_AHEAD = 8  # times as many may be done before the one whose turn it is

Job = tuple[Prompt, Mapping[str, Any]]
Result = tuple[int, Completion | Exception]


def answer_all(
    pipeline: Pipeline,
    jobs: Iterable[Job | Exception],
    *,
    at_once: int = AT_ONCE,
    ordered: bool = False,
    watch: Callable[[int], None] = lambda tokens: None,
) -> Iterator[Result]:
    """(place of the job, its completion or what it failed with), as they are done, or `ordered` as the jobs are.

    jobs: prompts with what `Pipeline.generate` takes besides; read as there is room, so there may be any number. One
    that could not be read is an error, and its own result. watch: is told how many tokens have come.
    A job that fails, at whatever time, does not touch the others. To close the iterator cancels what is running.
    """
    queue, running, done, turn = enumerate(jobs), dict[int, Answers](), dict[int, Completion | Exception](), 0
    more = True
    try:
        while more or running or done:
            while more and len(running) < at_once and len(running) + len(done) < _AHEAD * at_once:
                place, job = next(queue, (-1, None))
                if job is None:
                    more = False
                    break
                started = _started(pipeline, job)
                (done if isinstance(started, Exception) else running)[place] = started  # type: ignore[index]
            while done and (not ordered or turn in done):
                place = turn if ordered else next(iter(done))
                yield place, done.pop(place)
                turn += 1
            pipeline.engine.step()
            for place, answers in list(running.items()):
                result = _result(answers, watch)
                if result is not None:
                    del running[place]
                    done[place] = result
    finally:
        for answers in running.values():
            answers.cancel()


def _started(pipeline: Pipeline, job: Job | Exception) -> Answers | Exception:
    if isinstance(job, Exception):
        return job
    prompt, overrides = job
    try:
        return pipeline.start(prompt, **overrides)
    except Exception as error:
        return error


def _result(answers: Answers, watch: Callable[[int], None]) -> Completion | Exception | None:
    """What has become of a job; None while it runs."""
    try:
        tokens = sum(len(chunk.tokens) for chunk in answers.chunks())
    except Exception as error:
        answers.cancel()
        return error
    if tokens:
        watch(tokens)
    return answers.completion

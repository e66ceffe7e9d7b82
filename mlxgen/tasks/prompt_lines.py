"""A file of prompts: one JSON object a line."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxgen.batching import Job
from mlxgen.errors import ConfigError, RequestError

_FORMS = ("prompt", "messages", "tokens")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The `index`-th prompt (from 0, blank lines do not count) in line `number` (from 1).

    about: what stands in its result besides the answer. job: what is asked, or why that can't be read.
    """

    number: int
    about: dict[str, Any]
    job: Job | Exception


def read_lines(path: str) -> Iterator[Line]:
    """The prompts of a file, `-` for standard input, read as they are asked for."""
    with _opened(path) as file:
        index = 0
        for number, raw in enumerate(file, start=1):
            data = (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip()
            if data:
                yield _line(data, index, number)
                index += 1


def count_lines(path: str) -> int | None:
    """How many lines are not blank; None if that can't be known without reading them for good."""
    if path == "-" or not Path(path).is_file():
        return None
    with _opened(path) as file:
        return sum(1 for raw in file if raw.strip())


def _opened(path: str) -> Any:
    if path == "-":
        return nullcontext(_standard_input())
    try:
        return Path(path).expanduser().open("rb")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"`prompts` must be a file that can be read, but {path} can't: {why}.") from None


def _standard_input() -> BinaryIO:
    return sys.stdin.buffer


def _line(data: bytes, index: int, number: int) -> Line:
    about: dict[str, Any] = {"index": index}
    try:
        values = _object(data)
        if "id" in values:
            about["id"] = values.pop("id")
        job: Job | Exception = _job(values)
    except RequestError as error:
        job = error
    return Line(number=number, about=about, job=job)


def _object(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the line must be UTF-8, but byte {error.start} is {data[error.start]:#04x}.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line must be a JSON object: {error}.") from None
    if not isinstance(values, dict):
        raise RequestError(f"the line must be a JSON object, but is {type(values).__name__}.")
    return values


def _job(values: dict[str, Any]) -> Job:
    given = [form for form in _FORMS if form in values]
    if len(given) != 1:
        raise RequestError(f"the line must have one of {', '.join(_FORMS)}, but has {' and '.join(given) or 'none'}.")
    form = given[0]
    prompt = values.pop(form)
    if form == "prompt":
        ok, rule = isinstance(prompt, str), "text"
    elif form == "messages":
        ok, rule = _all(prompt, dict), "a list of messages, each with role and content"
        ok = ok and all("role" in message for message in prompt)
    else:
        ok, rule = _all(prompt, int), "a list of token ids"
    if not ok:
        raise RequestError(f"`{form}` must be {rule}, but is {str(prompt)[:60]!r}.")
    return prompt, values


def _all(items: Any, kind: type) -> bool:
    return isinstance(items, list) and all(isinstance(item, kind) for item in items)

"""Where the prompt comes from: the command line, standard input, or both."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sequence

from mlxgen.errors import ConfigError

_PATIENCE_S = 2.0  # a pipe that nobody writes to looks just like a slow one; a person should know what is waited for


def read_prompts(prompts: Sequence[str | None]) -> list[str]:
    """The prompts of one run, or of all runs of a sweep; standard input is read once at most.

    `-` and nothing stand for standard input; text that is piped in is added to a prompt that is given. Raises
    ConfigError if a prompt is empty, or if standard input is not UTF-8.
    """
    wanted = "-" in prompts or (None in prompts and not _is_terminal())
    piped = _read() if wanted or _is_pipe() else ""
    texts = [_joined(prompt, piped) for prompt in prompts]
    if not all(text.strip() for text in texts):
        raise ConfigError("`prompt` must not be empty; give prompt='...', pipe a text in, or talk with `mlxgen chat`.")
    return texts


def _joined(prompt: str | None, piped: str) -> str:
    if prompt in (None, "-"):
        return piped
    return f"{prompt}\n\n{piped}" if piped.strip() else prompt


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _is_pipe() -> bool:
    """Whether a text was piped in; a terminal or /dev/null is left alone."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a descriptor
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read() -> str:
    if sys.stdin is None:
        return ""
    if _is_pipe() and not select.select([sys.stdin], [], [], _PATIENCE_S)[0]:
        print("waiting for standard input (add </dev/null if there is none) ...", file=sys.stderr)
    return decoded(sys.stdin.buffer.read()).removesuffix("\n")


def decoded(data: bytes) -> str:
    """Standard input as text. Raises ConfigError with the place of the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is {data[error.start]:#04x}"
        raise ConfigError(f"standard input must be UTF-8, but {wrong}; convert it first.") from error

"""Where the prompt comes from: the command line, standard input, or both."""

from __future__ import annotations

import os
import stat
import sys

from mlxgen.errors import ConfigError


def read_prompt(prompt: str | None) -> str:
    """`-` or nothing reads standard input; text that is piped in is added to a prompt that is given.

    Raises ConfigError if there is no prompt, or if standard input is not UTF-8.
    """
    piped = _piped() if prompt not in (None, "-") else (None if prompt is None and sys.stdin.isatty() else _read())
    if prompt in (None, "-"):
        text = piped
    else:
        text = f"{prompt}\n\n{piped}" if piped else prompt
    if not text or not text.strip():
        raise ConfigError("`prompt` must not be empty; give prompt='...' or pipe a text in.")
    return text


def _piped() -> str | None:
    """Standard input, where something was piped into it; a terminal or /dev/null is left alone."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a descriptor
        return None
    return _read() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode) else None


def _read() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input must be UTF-8, but byte {error.start} is {data[error.start]:#04x}; convert it first."
        ) from error

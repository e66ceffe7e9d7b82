"""The command line: argv to a checked configuration to a task, and exit codes.

0 done · 2 configuration or usage · 3 model or data missing or broken · 4 does not fit in memory · 130 interrupted.
Standard output carries the answer only; everything else goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mlxgen.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, MlxgenError

_HYDRA_FLAGS = ("-m", "--multirun", "--info", "-i", "--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = any(w.lstrip("+") in ("debug=true", "debug=True") for w in words)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head -1`): nothing is wrong. Python must not try to flush again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except MlxgenError as error:
        if debug:
            raise
        print(f"mlxgen: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print("mlxgen: out of memory.", file=sys.stderr)
        return 4


def _dispatch(words: list[str]) -> int:
    if any(w in ("-h", "--help") for w in words):
        from mlxgen.help import show_help

        return show_help(words)
    if "--version" in words:
        import mlxgen

        print(f"mlxgen {mlxgen.__version__}")
        return EXIT_OK
    if any(w.split("=")[0] in _HYDRA_FLAGS for w in words):
        from mlxgen.hydra_app import run_hydra

        return run_hydra(words)
    return run(words)


def run(words: Sequence[str]) -> int:
    """Compose, check, and run the task."""
    from mlxgen.config import checked, compose, read_overrides

    words, show = _take_cfg(list(words))
    overrides = read_overrides(words)
    data = compose(overrides)
    if show:
        import yaml

        print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
        return EXIT_OK
    return run_task(checked(overrides, data))


def run_task(config: object) -> int:
    """Call the task that the configuration names."""
    from mlxgen.build import build
    from mlxgen.config import Config

    assert isinstance(config, Config)
    task = build(config.task, "task", config.trust)
    return int(task(config) or EXIT_OK)


def _take_cfg(words: list[str]) -> tuple[list[str], bool]:
    """Take out `--cfg job`, which shows the composed configuration instead of running it."""
    for flag in ("--cfg", "-c"):
        if flag in words:
            at = words.index(flag)
            what = words[at + 1] if at + 1 < len(words) else ""
            if what != "job":
                raise ConfigError(f"`{flag}` must be followed by job, but is by {what!r}.")
            return words[:at] + words[at + 2 :], True
    return words, False

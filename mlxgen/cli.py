"""The command line: argv to a checked configuration to a task, and exit codes.

0 done · 2 configuration or usage · 3 model or data missing or broken · 4 does not fit in memory ·
130 interrupted · 1 a fault of mlxgen's own. Standard output carries the answer, standard error all else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxgen.errors import EXIT_INTERRUPTED, EXIT_MEMORY, EXIT_OK, ConfigError, MlxgenError, did_you_mean

if TYPE_CHECKING:
    from mlxgen.config import Config

    Task = Callable[[Config], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("\nmlxgen: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head -1`): nothing is wrong. Python must not try to flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        return report(error, trace=any(word.lstrip("+").lower() == "debug=true" for word in words))


def _open_closed_streams() -> None:
    """`mlxgen <&-` closes a stream; without a stand-in the next file that is opened would take its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for the life of the process


def report(error: Exception, *, trace: bool) -> int:
    """The error in one line on standard error, after its trace if that is wanted; returns the exit code."""
    if trace:
        import traceback

        traceback.print_exception(error)
    text, code = " ".join(str(error).split()), getattr(error, "exit_code", 1)
    if isinstance(error, MemoryError):
        text, code = "out of memory.", EXIT_MEMORY
    elif not isinstance(error, MlxgenError):
        text = f"internal error: {type(error).__name__}: {text}{'' if trace else ' (debug=true shows where)'}"
    print(f"mlxgen: {text}", file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    if "-h" in words or "--help" in words or words == ["help"]:
        from mlxgen.help import show_help

        return show_help(words)
    if "--version" in words:
        import mlxgen

        print(f"mlxgen {mlxgen.__version__}")
        return EXIT_OK
    flags, words = read_flags(words)
    folder = Path(flags["--config-dir"]) if "--config-dir" in flags else None
    if "--shell-completion" in flags:
        from mlxgen.tab_completion import shell_completion

        return shell_completion(flags["--shell-completion"])
    if "--info" in flags:
        from mlxgen.config.info import show_info

        return show_info(flags["--info"], words, folder)
    if "--cfg" in flags:
        return show_config(words, folder)
    return run(words, folder, multirun="--multirun" in flags)


_SHORT = {
    "-cd": "--config-dir",
    "-m": "--multirun",
    "-c": "--cfg",
    "-i": "--info",
    "-sc": "--shell-completion",
}
# What a flag means when no value follows it; None: one must.
_FLAGS = {"--config-dir": None, "--cfg": None, "--shell-completion": None, "--info": "all", "--multirun": ""}
_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def read_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags with their values, and the other words. Raises ConfigError for a flag that there is not."""
    flags: dict[str, str] = {}
    rest, queue = [], list(words)
    while queue:
        word, equals, value = queue.pop(0).partition("=")
        flag = _SHORT.get(word, word)
        if not flag.startswith("-"):
            rest.append(word + equals + value)
            continue
        if flag not in _FLAGS:
            hint = did_you_mean(word, [*_FLAGS, "--help", "--version"])
            raise ConfigError(f"{word!r} is not a flag; `mlxgen --help` lists them.{hint}")
        if not equals:
            alone = _FLAGS[flag]
            follows = alone is None or (flag == "--info" and queue[:1] and queue[0] in _TOPICS)
            if follows and not queue:
                raise ConfigError(f"`{word}` must be followed by a value.")
            value = queue.pop(0) if follows else alone or ""
        flags[flag] = value
    if flags.get("--cfg", "job") != "job":
        raise ConfigError(f"`--cfg` must be followed by job, but is by {flags['--cfg']!r}.")
    return flags, rest


def run(words: Sequence[str], config_dir: Path | None = None, *, multirun: bool = False) -> int:
    """Compose and check all that is to run, then run it; returns the worst exit code."""
    from mlxgen.config import load_config, sweep

    combinations = sweep(words, config_dir) if multirun else [(list(words), ())]
    configs = [load_config(each, config_dir=config_dir, variant=variant) for each, variant in combinations]
    tasks = [check_parts(config) for config in configs]
    for task, config in zip(tasks, configs, strict=True):
        if hasattr(task, "check"):
            task.check(config)
    codes = []
    for task, config in zip(tasks, with_prompts(tasks, configs), strict=True):
        if config.variant:
            print(f"# {' '.join(config.variant)}", file=sys.stderr)
        codes.append(run_task(task, config))
        if codes[-1] == EXIT_INTERRUPTED:
            break
    if multirun and hasattr(tasks[0], "after_sweep"):
        tasks[0].after_sweep(configs[: len(codes)])
    return max(codes)


def show_config(words: Sequence[str], config_dir: Path | None = None) -> int:
    """`--cfg job`: the composed configuration, as a file that composes to the same again."""
    from mlxgen.config import checked, read_overrides, recipe
    from mlxgen.yaml_text import write_yaml

    overrides = read_overrides(words, config_dir)
    data, experiment = recipe(overrides)
    check_parts(checked(overrides, data))
    print("# @package _global_\n" + write_yaml(experiment), end="")
    return EXIT_OK


def check_parts(config: Config) -> Task:
    """Build what is quick to build, so that a wrong value never waits for weights; returns the task."""
    from mlxgen.build import build
    from mlxgen.sampler import Sampler

    build(config.cache, "cache", config.trust)
    Sampler.from_config(config.model.sampling, path="model.sampling")
    Sampler.from_config(config.sampler, build=lambda node, path: build(node, path, config.trust))
    return build(config.task, "task", config.trust)


def with_prompts(tasks: Sequence[Task], configs: Sequence[Config]) -> list[Config]:
    """The configurations; tasks that answer a prompt have standard input in it."""
    from mlxgen.tasks.prompt import read_prompts

    readers = [i for i, task in enumerate(tasks) if getattr(task, "reads_prompt", False)]
    texts = read_prompts([configs[i].prompt for i in readers]) if readers else []
    filled = {i: replace(configs[i], prompt=text) for i, text in zip(readers, texts, strict=True)}
    return [filled.get(i, config) for i, config in enumerate(configs)]


def run_task(task: Task, config: Config) -> int:
    """Call the task; an error is reported, so that a sweep can go on with the next."""
    try:
        return int(task(config) or EXIT_OK)
    except BrokenPipeError:
        raise
    except Exception as error:
        return report(error, trace=config.debug)

"""The command line: argv to a checked configuration to a task, and exit codes.

0 done · 2 configuration or usage · 3 model or data missing or broken · 4 does not fit in memory ·
130 interrupted · 1 a fault of mlxgen's own. Standard output carries the answer, standard error all else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.errors import EXIT_INTERRUPTED, EXIT_MEMORY, EXIT_OK, ConfigError, MlxgenError, did_you_mean

if TYPE_CHECKING:
    from mlxgen.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
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
        from mlxgen.config.hydra_app import shell_completion

        return shell_completion(flags["--shell-completion"])
    if "--info" in flags:
        from mlxgen.config.hydra_app import show_info

        return show_info(flags["--info"], words, folder)
    if "--cfg" in flags:
        return show_config(words, folder)
    return run_sweep(words, folder) if "--multirun" in flags else run(words, folder)


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


def run(words: Sequence[str], config_dir: Path | None = None) -> int:
    """Compose, check, and run the task."""
    from mlxgen.config import load_config

    config = load_config(words, config_dir=config_dir)
    check_parts(config)
    return run_task(*with_prompts([config]))


def run_sweep(words: Sequence[str], config_dir: Path | None = None) -> int:
    """One run for each combination, all checked before the first starts; returns the worst exit code."""
    from mlxgen.config import load_config, sweep

    runs = [
        load_config(each, config_dir=config_dir, variant=variant)
        for each, variant in sweep(words, config_dir)
    ]
    for config in runs:
        check_parts(config)
    codes = []
    for config in with_prompts(runs):
        print(f"# {' '.join(config.variant)}", file=sys.stderr)
        codes.append(run_task(config))
        if codes[-1] == EXIT_INTERRUPTED:
            break
    return max(codes)


def show_config(words: Sequence[str], config_dir: Path | None = None) -> int:
    """`--cfg job`: the composed configuration, as YAML that composes to the same again."""
    from mlxgen.config import checked, compose, read_overrides
    from mlxgen.yaml_text import write_yaml

    overrides = read_overrides(words, config_dir)
    data = compose(overrides)
    check_parts(checked(overrides, data))
    print(write_yaml(data), end="")
    return EXIT_OK


def check_parts(config: Config) -> None:
    """Build what is quick to build, so that a wrong value never waits for weights, whatever the task."""
    from mlxgen.build import build
    from mlxgen.sampler import Sampler

    for group in ("task", "cache"):
        build(getattr(config, group), group, config.trust)
    Sampler.from_config(config.model.sampling, path="model.sampling")
    sampler = {name: _without_texts(value) for name, value in config.sampler.items()}
    Sampler.from_config(sampler, build=lambda node, path: build(node, path, config.trust))


def _without_texts(stage: Any) -> Any:
    """A stage's fields without texts among token ids: what they become only the tokenizer knows."""
    if not isinstance(stage, Mapping) or "_target_" in stage:
        return stage
    ids = {k: [i for i in v if not isinstance(i, str)] for k, v in stage.items() if isinstance(v, list)}
    return {**stage, **ids}


def with_prompts(runs: Sequence[Config]) -> list[Config]:
    """The runs, standard input put into the prompts of tasks that answer one."""
    from mlxgen.tasks.prompt import read_prompts

    readers = [i for i, run in enumerate(runs) if _reads_prompt(run)]
    texts = read_prompts([runs[i].prompt for i in readers]) if readers else []
    filled = {i: replace(runs[i], prompt=text) for i, text in zip(readers, texts, strict=True)}
    return [filled.get(i, run) for i, run in enumerate(runs)]


def _reads_prompt(config: Config) -> bool:
    from mlxgen.build import build

    return getattr(build(config.task, "task", config.trust), "reads_prompt", False)


def run_task(config: Config) -> int:
    """Call the task that the configuration names; an error is reported."""
    from mlxgen.build import build

    try:
        return int(build(config.task, "task", config.trust)(config) or EXIT_OK)
    except BrokenPipeError:
        raise
    except Exception as error:
        return report(error, trace=config.debug)

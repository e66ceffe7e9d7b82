"""task=chat: a conversation in the terminal that keeps its cache from turn to turn."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator

from mlxgen.config import Config
from mlxgen.conversation import Conversation, check_conversation
from mlxgen.errors import EXIT_INTERRUPTED, EXIT_OK, RequestError, require
from mlxgen.pipeline import Pipeline
from mlxgen.tasks.output import play, say, show_stats, status
from mlxgen.tasks.prompt import decoded

_COMMANDS = "/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """One line is one turn, from a terminal or from a pipe; `prompt` is the first turn."""

    def __call__(self, config: Config) -> int:
        require(not config.raw, "raw", "false for task=chat, which is made of chat templates", config.raw)
        check_conversation(config)
        with status("loading the model"):
            pipeline = Pipeline(config)
        conversation = pipeline.chat()
        code = EXIT_OK
        for text in _turns(config.prompt):
            command = text.strip()
            if command in ("/exit", "/quit"):
                break
            if command == "/reset":
                conversation.reset()
                say("A new conversation.")
            elif re.fullmatch(r"/\w+", command):
                say(_COMMANDS if command == "/help" else f"{command} is not a command. {_COMMANDS}")
            elif command:
                code = max(code, self._turn(conversation, text, pipeline, config))
                if code == EXIT_INTERRUPTED:
                    break
        return code

    def _turn(self, conversation: Conversation, text: str, pipeline: Pipeline, config: Config) -> int:
        """Answer one turn. A person goes on after any; a script is told at its end, or ended by Ctrl-C."""
        person = _is_terminal()
        try:
            completion = play(conversation.stream(text), config)
        except RequestError as error:  # this turn can't be answered; the conversation goes on
            print(f"mlxgen: {error}", file=sys.stderr)
            return EXIT_OK if person else error.exit_code
        except KeyboardInterrupt:  # before the first token
            if not person:
                raise
            print(file=sys.stderr)
            return EXIT_OK
        show_stats(completion, pipeline, config, sampling=config.stats is True)
        stopped = completion.finish_reason == "interrupted" and not person
        return EXIT_INTERRUPTED if stopped else EXIT_OK


def _turns(first: str | None) -> Iterator[str]:
    """What the user says, until the end of standard input."""
    if _is_terminal():
        import readline  # noqa: F401  line editing and history for input()

        say(_COMMANDS)
        if first:
            print(f"> {first}", file=sys.stderr)
    if first:
        yield first
    while (line := _typed() if _is_terminal() else _piped()) is not None:
        yield line


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _typed() -> str | None:
    print(file=sys.stderr, flush=True)
    try:
        if sys.stdout.isatty():
            return input("> ")  # readline must know the prompt, to redraw it
        print("> ", end="", file=sys.stderr, flush=True)
        return input()
    except EOFError:
        print(file=sys.stderr)
        return None


def _piped() -> str | None:
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    return decoded(line).rstrip("\r\n") if line else None

"""task=chat: a conversation in the terminal that keeps its cache from turn to turn."""

from __future__ import annotations

import dataclasses
import sys

from mlxgen.completion import Completion
from mlxgen.config import Config
from mlxgen.conversation import Conversation
from mlxgen.errors import EXIT_OK, RequestError
from mlxgen.pipeline import Pipeline
from mlxgen.tasks.generate import show, show_stats

_COMMANDS = "/reset starts anew, /exit or Ctrl-D ends; Ctrl-C stops an answer."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """From a terminal one line is one turn; piped lines are turns too."""

    def __call__(self, config: Config) -> int:
        pipeline = Pipeline(config)
        conversation = pipeline.chat()
        if sys.stdin.isatty():
            import readline  # noqa: F401  line editing and history for input()

            print(_COMMANDS, file=sys.stderr)
        first = config.prompt
        while True:
            text, first = (first, None) if first else (_next_line(), None)
            if text is None or text.strip() == "/exit":
                return EXIT_OK
            if text.strip() == "/reset":
                conversation.reset()
            elif text.strip():
                self._turn(conversation, text, pipeline, config)

    def _turn(self, conversation: Conversation, text: str, pipeline: Pipeline, config: Config) -> None:
        completion: Completion | None = None
        try:
            for chunk in conversation.stream(text):
                show(chunk, config.output)
                completion = chunk.completion
        except RequestError as error:  # this turn can't be answered; the conversation goes on
            print(f"mlxgen: {error}", file=sys.stderr)
        if completion is not None:
            show_stats(completion, pipeline, config)


def _next_line() -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        print("\n> ", end="", file=sys.stderr, flush=True)
        return input()
    except EOFError:
        print(file=sys.stderr)
        return None

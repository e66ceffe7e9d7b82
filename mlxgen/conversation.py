"""A conversation: messages that grow, and caches that need to compute only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlxgen.completion import Chunk, Completion

if TYPE_CHECKING:
    from mlxgen.pipeline import Pipeline, Settings


class Conversation:
    """Call it with what the user says; it answers, and remembers both.

        chat = pipe.chat(system="Be brief.")
        print(chat("Hi"), chat("And in French?"))
    """

    def __init__(self, pipeline: Pipeline, settings: Settings):
        self._pipeline, self._settings = pipeline, settings
        self._sequence = pipeline.new_sequence()
        self.messages: list[dict[str, Any]] = []

    def __call__(self, text: str) -> Completion:
        *_, last = self.stream(text)
        assert last.completion is not None
        return last.completion

    def stream(self, text: str) -> Iterator[Chunk]:
        """The answer piece by piece. What was said before an error or an interruption stays said."""
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._pipeline.encode(self.messages, self._settings)
            for chunk in self._pipeline.answer(ids, self._settings, self._sequence):
                if chunk.completion is not None:
                    self.messages.append({"role": "assistant", "content": chunk.completion.text})
                yield chunk
        finally:
            if self.messages[-1]["role"] == "user":  # no answer: the turn is taken back
                self.messages.pop()

    def reset(self) -> None:
        """Start anew."""
        self.messages.clear()
        self._sequence.reset()

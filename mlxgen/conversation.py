"""A conversation: messages that grow, and caches that need to compute only what is new."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mlxgen.completion import Chunk, Completion
from mlxgen.config import Config
from mlxgen.errors import require

if TYPE_CHECKING:
    from mlxgen.pipeline import Pipeline, Settings


def check_conversation(config: Config) -> None:
    """Raise ConfigError for what does not go together with a conversation."""
    require(config.n == 1, "n", "1 in a chat, where every turn has one answer", config.n)
    require(config.beams == 1, "beams", "1 in a chat, where answers come word by word", config.beams)


class Conversation:
    """Call it with what the user says: `chat = pipe.chat(system="Be brief.")`, then `chat("Hi")`.

    It answers with a Completion and remembers both sides in `messages`. A turn that fails leaves no trace.
    """

    def __init__(self, pipeline: Pipeline, settings: Settings):
        check_conversation(settings.config)
        self._pipeline, self._settings = pipeline, settings
        self._sequence = pipeline.new_sequence(settings)
        self.messages: list[dict[str, Any]] = []

    def __call__(self, text: str) -> Completion:
        *_, last = self.stream(text)
        assert last.completion is not None
        return last.completion

    def stream(self, text: str) -> Generator[Chunk, None, None]:
        """The answer piece by piece. Throw KeyboardInterrupt into it to end the answer with what there is."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._pipeline.encode(messages, self._settings)
        inside = self._settings.config.prefill is not None
        answer = self._pipeline.answer(ids, self._settings, self._sequence, continues=inside)
        for chunk in answer:
            try:
                yield self._remembered(chunk, messages)
            except KeyboardInterrupt:
                yield self._remembered(answer.throw(KeyboardInterrupt()), messages)

    def _remembered(self, chunk: Chunk, messages: list[dict[str, Any]]) -> Chunk:
        if chunk.completion is not None:
            text = (self._settings.config.prefill or "") + chunk.completion.text
            self.messages = [*messages, {"role": "assistant", "content": text}]
        return chunk

    def reset(self) -> None:
        """Start anew."""
        self.messages = []
        self._sequence.reset()

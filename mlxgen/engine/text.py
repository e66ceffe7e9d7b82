"""From tokens to text: pieces as soon as they are certain, and stop strings wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence

from mlxgen.errors import ConfigError
from mlxgen.protocols import TextStream

THINKING = ("<think>", "</think>")


class TextAssembler:
    """Turns tokens into text and ends at the first stop string.

    Text that may still become a stop string is held back. A match is the earliest one, then the longest; nothing of it
    is given out. Inside the model's hidden reasoning, between THINKING, stop strings do not count unless asked to.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = (), *, stop_in_thinking: bool = False):
        if not all(isinstance(s, str) for s in stop):
            raise ConfigError(f"`stop` must be texts, but is {list(stop)!r}.")
        self._stream = stream
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self._markers = () if stop_in_thinking else THINKING
        self._thinking = False
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that has become certain; sets `stopped` at a stop string."""
        return self._scan(self._stream.push(token), final=False)

    def finish(self) -> str:
        """The rest, once no more tokens come."""
        return "" if self.stopped else self._scan(self._stream.finish(), final=True)

    def _scan(self, piece: str, *, final: bool) -> str:
        if not self._stop:
            return piece
        self._held += piece
        out = ""
        while not self.stopped:
            wanted = self._wanted()
            found = _first(self._held, wanted)
            cut = len(self._held) - (0 if final else _possible_beginning(self._held, wanted))
            if found is None or cut < found[0]:  # an earlier match may still be growing
                out, self._held = out + self._held[:cut], self._held[cut:]
                break
            start, text = found
            if text in self._markers:
                out += self._held[: start + len(text)]
                self._held = self._held[start + len(text) :]
                self._thinking = text == self._markers[0]
            else:
                out, self._held, self.stopped = out + self._held[:start], "", True
        return out

    def _wanted(self) -> tuple[str, ...]:
        if not self._markers:
            return self._stop
        opening, closing = self._markers
        return (closing,) if self._thinking else (*self._stop, opening)


def _first(text: str, wanted: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest of `wanted` stands; of those that start there, the longest."""
    hits = [(text.find(w), -len(w), w) for w in wanted if w in text]
    return (min(hits)[0], min(hits)[2]) if hits else None


def _possible_beginning(text: str, wanted: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of one of `wanted`."""
    longest = min(max(map(len, wanted)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(w.startswith(text[-n:]) for w in wanted)), 0)

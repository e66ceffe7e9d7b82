"""Token ids to text, one at a time: each token stands for bytes, and UTF-8 says when they are a character.

A full decode is the same stream run to its end, so the two cannot differ. That is also why no clean-up of
spaces happens anywhere: the text is what the tokens say.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import Any

BytesOf = Callable[[int], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteStream:
    """The TextStream: holds back the bytes of an unfinished character, nothing else, so at most 3 tokens.

    An unfinished character that another token or the end cuts off becomes one U+FFFD.
    """

    def __init__(self, bytes_of: BytesOf, *, strip_space: bool = False) -> None:
        """`strip_space`: the text's first space is not part of it (SentencePiece puts it there)."""
        self._bytes_of = bytes_of
        self._strip = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        data = self._bytes_of(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def byte_symbols() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class PieceDecoder:
    """What the decoder of a tokenizer.json does, as bytes per piece of the vocabulary.

    `spell` is None for a decoder that cannot be read that way.
    """

    def __init__(self, decoder: Any, pre_tokenizer: Any, normalizer: Any) -> None:
        """Each argument: that part of tokenizer.json, or None."""
        steps = list(_flatten(decoder))
        kinds = [step["type"] for step in steps]
        parts = (decoder, pre_tokenizer, normalizer)
        # Some conversions carry a SentencePiece decoder on byte-level pieces; the pieces are what counts.
        self.byte_level = any(step["type"] == "ByteLevel" for part in parts for step in _flatten(part))
        self.strip_space = False
        self.spell: Callable[[str], bytes] | None
        if self.byte_level:
            self._symbols = byte_symbols()
            self.spell = self._byte_level
        elif steps and all(map(_is_per_piece, steps)):
            self._replacements = [pair for step in steps if (pair := _replacement(step)) is not None]
            self._byte_fallback = "ByteFallback" in kinds
            self.strip_space = any(map(_strips, steps))
            self.spell = self._sentencepiece
        else:
            self.spell = None

    def _byte_level(self, piece: str) -> bytes:
        try:
            return bytes(self._symbols[character] for character in piece)
        except KeyError:
            return piece.encode()

    def _sentencepiece(self, piece: str) -> bytes:
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _flatten(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part of tokenizer.json, sequences unrolled."""
    if part is None:
        return
    inner = next((part[k] for k in ("decoders", "pretokenizers", "normalizers") if k in part), None)
    if inner is None:
        yield part
    else:
        for step in inner:
            yield from _flatten(step)


def _is_per_piece(step: dict[str, Any]) -> bool:
    """Whether the step treats each piece by itself (or only joins them)."""
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    return step["type"] in {"ByteFallback", "Fuse", "Strip", "Metaspace"}


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step.get("replacement", "▁"), " "
    if step["type"] == "Replace":
        return step["pattern"]["String"], step["content"]
    return None


def _strips(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    return step["type"] == "Strip" and step["content"] == " " and step["start"] > 0


class NeighbourBytes:
    """Bytes of a token for a decoder that is not a mapping of pieces: what it adds to the token before it."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []

    def __call__(self, token: int) -> bytes:
        known = self._decode(self._before) if self._before else ""
        text = self._decode([*self._before, token])
        self._before = [token]
        return text.removeprefix(known).encode()

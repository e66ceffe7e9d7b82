"""The vocabulary as llguidance wants it: the bytes that each token adds to the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any


class Vocabulary:
    """The tokens of a model, by id. Built from what decoding a token gives, so masks and text can't disagree.

    tokens: their bytes; b"" for ids that no text uses. control: ids that are not text; a grammar may name them, as
    <|tool|>. eos_ids: they end an answer. encode: text to ids.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        control: Iterable[int] = (),
        eos_ids: Iterable[int] = (),
        encode: Callable[[str], list[int]],
    ):
        self.size = len(tokens)
        self.tokens = list(tokens)
        self.eos_ids = sorted(token for token in eos_ids if token < self.size)
        self._encode = encode
        self._control = frozenset(control) | frozenset(self.eos_ids)

    @cached_property
    def library(self) -> Any:
        """The llguidance.LLTokenizer; a fraction of a second for 100,000 tokens."""
        from llguidance import LLTokenizer

        return LLTokenizer(_Source(self))  # type: ignore[arg-type]

    @property
    def end(self) -> int:
        """The token that stands for the end; behind the others where a model has none."""
        return self.eos_ids[0] if self.eos_ids else self.size

    def spelled(self, text: str) -> list[int]:
        """The tokens of a text by the model's own tokenizer, or at least tokens that spell just this text."""
        wanted = text.encode()
        for before in ("", "\n"):  # SentencePiece puts a blank in front of a text
            ids = self._encode(before + text)
            for cut in range(3 if before else 1):
                front, rest = self.bytes_of(ids[:cut]), self.bytes_of(ids[cut:])
                if front is not None and front.strip(b" ") == before.encode() and rest == wanted:
                    return ids[cut:]
        return self.library.greedy_tokenize(text)

    def bytes_of(self, ids: Iterable[int]) -> bytes | None:
        """What tokens spell; None if one of them is not text."""
        ids = list(ids)
        return None if self._control & set(ids) else b"".join(self.tokens[i] for i in ids)


class _Source:
    """What llguidance asks of a tokenizer that is not one of its own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary._control)
        self.eos_token_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else None
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        try:
            return self._vocabulary.spelled(text)
        except Exception:  # a panic in the library would follow
            return self._vocabulary.library.greedy_tokenize(text)

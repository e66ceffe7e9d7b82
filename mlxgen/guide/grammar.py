"""A constraint on a vocabulary, and where one answer stands in it.

Shapes: V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxgen.errors import ConfigError, RequestError
from mlxgen.guide.constraint import limits, reason, refused
from mlxgen.guide.vocabulary import Vocabulary

_DEAD_END = "no token of the vocabulary can go on from here"


class Grammar:
    """A rule that is ready for answers. Raises ConfigError if it can't be read or satisfied.

    source: of a Constraint. kind: its key in the configuration.
    """

    def __init__(self, source: str, kind: str, vocabulary: Vocabulary):
        from llguidance import LLMatcher

        self.kind, self.vocabulary = kind, vocabulary
        self._matcher = LLMatcher(vocabulary.library, source, log_level=0, limits=limits())
        if self._matcher.is_error():
            raise refused(kind, f"is none: {reason(self._matcher.get_error())}")
        try:
            self.start().masks()
        except RequestError:
            raise refused(kind, "no text of this vocabulary satisfies it") from None

    def after(self, prefix: str) -> Grammar:
        """What may follow `prefix`. Raises ConfigError if no answer begins so."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        if not _consume(other._matcher, self.vocabulary.spelled(prefix)):
            raise ConfigError(f"`prefill` must begin an answer that `{self.kind}` allows, but is {prefix!r}.")
        return other

    def start(self) -> Guide:
        """The guide of one answer."""
        return Guide(self._matcher.deep_copy(), self)

    def accepts(self, text: str) -> bool:
        """Whether the text is a whole answer."""
        matcher = self._matcher.deep_copy()
        return _consume(matcher, self.vocabulary.spelled(text)) and matcher.is_accepting()


class Guide:
    """Where one answer stands in its grammar. Implements protocols.Guide."""

    def __init__(self, matcher: Any, grammar: Grammar):
        self._matcher, self.grammar = matcher, grammar

    def masks(self, ahead: Sequence[int] = ()) -> list[mx.array]:
        """The tokens that may come next, [V] booleans; and then after each token of `ahead`, while those are allowed.

        An end-of-sequence token is allowed just where the answer may end. Raises RequestError where nothing can follow,
        or the grammar exceeds its limits.
        """
        masks, taken = [self._mask()], 0
        for token in ahead:
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                break
            taken += 1
            if self._matcher.is_stopped():
                break
            masks.append(self._mask())
        if taken:
            self._matcher.rollback(taken)
        return masks

    def advance(self, token: int) -> None:
        """`token` is the next one. Raises RequestError if it isn't allowed."""
        if self.ended and token in self.grammar.vocabulary.eos_ids:
            return
        if token in self.grammar.vocabulary.eos_ids and not self._matcher.validate_tokens([token]):
            token = self.grammar.vocabulary.end  # another end than llguidance knows of
        if not self._matcher.consume_token(token):
            why = self._matcher.get_error() if self._matcher.is_error() else ""
            raise self._failed(reason(why) if why else f"token {token} is not allowed")

    def forced(self) -> list[int]:
        """Tokens of the only text that can follow, as far as there is just one."""
        return self._matcher.compute_ff_tokens()

    def fork(self) -> Guide:
        """Another guide at the same place."""
        return Guide(self._matcher.deep_copy(), self.grammar)

    @property
    def complete(self) -> bool:
        """Whether the answer so far is a whole one."""
        return self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """Whether the answer is a whole one that nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _mask(self) -> mx.array:
        import numpy as np

        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            dead = "NoExtension" in self._matcher.get_error()
            raise self._failed(_DEAD_END if dead else reason(self._matcher.get_error()))
        vocabulary = self.grammar.vocabulary
        bits = np.unpackbits(words, count=max(vocabulary.size, vocabulary.end + 1), bitorder="little")
        if bits[vocabulary.end]:
            bits[vocabulary.eos_ids] = 1
        bits = bits[: vocabulary.size]
        if not bits.any():
            raise self._failed(_DEAD_END)
        return mx.array(bits.view(np.bool_))

    def _failed(self, why: str) -> RequestError:
        return RequestError(f"`{self.grammar.kind}` can't be followed any further: {why}.")


def _consume(matcher: Any, tokens: Sequence[int]) -> bool:
    return matcher.try_consume_tokens(list(tokens)) == len(tokens)

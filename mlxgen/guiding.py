"""Rules for answers, ready for a pipeline's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.config import Config
from mlxgen.errors import RequestError, TokenizerError
from mlxgen.guide import Constraint, Grammar, Vocabulary, constraint_of
from mlxgen.protocols import Tokenizer

_KEPT = 16  # grammars, as requests often follow the same


class Guides:
    """The grammars that the requests of one model follow. The vocabulary is read with the first."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]):
        self._tokenizer, self._size, self._eos_ids = tokenizer, vocab_size, frozenset(eos_ids)
        self._grammar = lru_cache(_KEPT)(self._compiled)

    def grammar(self, config: Config) -> Grammar | None:
        """The rule that the answer of a request must follow, None if there is none.

        Raises ConfigError for a rule that can't be read or satisfied, RequestError for a tokenizer without texts.
        """
        constraint = rule_of(config)
        if constraint is None:
            return None
        grammar = self._grammar(constraint.source(), constraint.kind)
        return grammar.after(config.prefill) if config.prefill else grammar

    def _compiled(self, source: str, kind: str) -> Grammar:
        try:
            return Grammar(source, kind, self._vocabulary)
        except TokenizerError as error:
            raise RequestError(f"`{kind}` needs to know how tokens are spelled, but {error}") from None

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        tokenizer, ids = self._tokenizer, range(self._size)
        return Vocabulary(
            [tokenizer.token_bytes(token) for token in ids],
            control=[token for token in ids if tokenizer.is_control(token)],
            eos_ids=self._eos_ids,
            encode=lambda text: tokenizer.encode(text, add_special=False),
        )


def rule_of(config: Config) -> Constraint | None:
    return constraint_of(vars(config))

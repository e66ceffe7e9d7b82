"""Structured output: what an answer may be, and which tokens may come next (the llguidance library).

    vocabulary = Vocabulary(tokens, control=..., eos_ids=..., encode=...)
    guide = Grammar(Constraint("regex", "[0-9]+").source(), "regex", vocabulary).start()
    (mask,) = guide.masks()          # [V], True for the tokens that may come next
    guide.advance(token)

It knows bytes and token ids only. llguidance and NumPy are loaded with the first constraint.
"""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.guide.constraint import KINDS, Constraint, constraint_of
from mlxgen.guide.grammar import Grammar, Guide
from mlxgen.guide.vocabulary import Vocabulary

__all__ = ["KINDS", "Constraint", "Grammar", "Guide", "Vocabulary", "constraint_of"]

"""A small model guesses what the large one will say.

Each guess is picked with the sampler and the random numbers that the large model will use there, so models that agree
about the probabilities agree about the tokens, also when sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxgen.engine.prefill import prefill
from mlxgen.engine.request import Generation
from mlxgen.engine.sequence import TokenSequence, common_length
from mlxgen.engine.speculation import Costs, Guess, Speculator
from mlxgen.engine.trial import take_back
from mlxgen.protocols import LanguageModel

_KIND = ("draft", 0.7)


class DraftModel:
    """Guess up to `tokens` tokens with another model of the same vocabulary.

    new_sequence: empty caches for it, which must be able to forget any number of tokens. sample: as in Parts.
    vocab_size: of the large model; candidates beyond it are left out. context: the longest sequence for the small one.
    """

    def __init__(
        self,
        model: LanguageModel,
        new_sequence: Callable[[], TokenSequence],
        sample: Callable[..., Any],
        *,
        vocab_size: int,
        tokens: int = 4,
        context: int | None = None,
        always: bool = False,
    ):
        self.model, self.new_sequence, self.sample = model, new_sequence, sample
        self.vocab_size, self.tokens, self.context, self.always = vocab_size, tokens, context, always
        self._costs = Costs()

    def start(self, generation: Any) -> Speculator:
        return Speculator(_Drafter(self), self._costs, self.always)


class _Drafter:
    def __init__(self, draft: DraftModel):
        self._draft = draft
        self._sequence = draft.new_sequence()

    def hopes(self, generation: Generation) -> Guess | None:
        return Guess(tokens=[0] * self._draft.tokens, kinds=[_KIND] * self._draft.tokens)

    def guess(self, generation: Generation, limit: int) -> Guess | None:
        draft, known = self._draft, generation.known
        count = min(draft.tokens, limit)
        if draft.context is not None and len(known) + count > draft.context:
            return None
        sequence, guide, state = self._sequence, generation.guide, generation.state
        self._rewind(known)
        logits = prefill(draft.model, sequence, known, generation.request.prefill_chunk)
        guide = guide.fork() if guide is not None else None
        picked: list[mx.array] = []
        while True:
            scores = self._fitted(logits)
            if guide is not None:
                scores = mx.where(guide.masks()[0], scores, -mx.inf)
            token, (state,) = draft.sample(scores, [generation.request.sampler], [state])
            picked.append(token)
            if guide is not None:
                value = token.item()
                if value < 0 or value in generation.request.eos_ids:
                    break
                guide.advance(value)
                if guide.ended:
                    break
            if len(picked) == count:
                break
            logits = draft.model(token[:, None], sequence.caches)[:, -1]
        tokens = mx.concatenate(picked).tolist()
        sequence.tokens = [*known, *tokens][: sequence.caches[0].offset]
        return Guess(tokens=tokens, kinds=[_KIND] * len(tokens))

    def _rewind(self, known: list[int]) -> None:
        """Forget the guesses that were wrong. The last known token is computed anew, for its logits."""
        sequence = self._sequence
        keep = min(common_length(sequence.tokens, known), len(known) - 1)
        if take_back(sequence.caches, sequence.caches[0].offset - keep):
            sequence.tokens = sequence.tokens[:keep]
        else:
            sequence.reset()

    def _fitted(self, logits: mx.array) -> mx.array:
        """Logits [1, V] of the large model's vocabulary: some checkpoints pad it, each in its own way."""
        size = logits.shape[-1]
        if size >= self._draft.vocab_size:
            return logits[:, : self._draft.vocab_size]
        return mx.pad(logits, [(0, 0), (0, self._draft.vocab_size - size)], constant_values=-mx.inf)

"""The rows that decode in one forward pass, one step ahead of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxgen.engine.batch import Batch
from mlxgen.engine.request import Finish, Generation, Token
from mlxgen.engine.sequence import TokenSequence
from mlxgen.errors import RequestError

if TYPE_CHECKING:
    from mlxgen.engine.engine import Engine


@dataclass
class Step:
    """Tokens that are being computed: tokens[i] belongs to rows[i]."""

    rows: list[Generation]
    tokens: mx.array  # [B]
    extras: list[Any]  # log-probabilities of a row, or None
    before: list[Any]  # the sampler states that these tokens were picked from

    def __add__(self, other: Step) -> Step:
        tokens = mx.concatenate([self.tokens, other.tokens])
        return Step(self.rows + other.rows, tokens, self.extras + other.extras, self.before + other.before)

    def only(self, keep: list[int]) -> Step | None:
        """Some of the rows."""
        if not keep:
            return None
        if len(keep) == len(self.rows):
            return self
        rows, extras, before = ([column[i] for i in keep] for column in (self.rows, self.extras, self.before))
        return Step(rows, self.tokens[mx.array(keep)], extras, before)


class Lane:
    """Rows that decode in one forward pass. Two lanes: sequences beyond a rope's change of regime can't join the others."""

    def __init__(self, engine: Engine, long: bool):
        self._engine, self._long = engine, long
        self._batch = Batch(engine.parts.merge, engine.parts.rows)
        self._step: Step | None = None

    def join(self, step: Step) -> None:
        """Rows with their first token; the batch changes before the next forward pass."""
        self._step = step if self._step is None else self._step + step

    def leave(self, rows: Sequence[Generation]) -> None:
        """Drop rows, and the tokens that were picked for them but not handed out."""
        step = self._step
        if step is None or not any(g in step.rows for g in rows):
            return
        for generation, state in zip(step.rows, step.before, strict=True):
            if generation in rows:
                generation.state = state
        self._step = step.only([i for i, g in enumerate(step.rows) if g not in rows])
        self._batch.change([s for s in self._batch.sequences if s not in [g.sequence for g in rows]])

    def give_back(self, sequence: TokenSequence) -> None:
        """Let a sequence hold its own caches until the next forward pass."""
        if sequence in self._batch.sequences:
            self._batch.change([])

    def decode(self) -> bool:
        """Hand out the tokens of the current step and start the next; False if there is none."""
        step = self._step
        if step is None:
            return False
        ahead = None if self._must_look(step) else self._forward(step)
        values = step.tokens.tolist()
        finished = [g for g, value, extra in zip(step.rows, values, step.extras, strict=True) if self._give(g, value, extra)]
        keep = [i for i, g in enumerate(step.rows) if g not in finished]
        self._step = (step if ahead is None else ahead).only(keep)
        if finished:  # their caches are their own again
            self._batch.change([s for s in self._batch.sequences if s not in [g.sequence for g in finished]])
        if ahead is None and self._step is not None:
            self._step = self._forward_where_short(self._step)
        for generation in finished:
            self._settle(generation)
        return True

    def _must_look(self, step: Step) -> bool:
        """Whether the host must see this step's tokens before the next step can start."""
        limit = self._engine.model.recompute_at
        for g in step.rows:
            if len(g.produced) + 1 >= g.request.max_tokens or (not self._long and len(g.known) == limit):
                return True
        return False

    def _give(self, generation: Generation, value: int, extra: Any) -> bool:
        """Hand out a token; True if the generation ends with it."""
        request = generation.request
        if value < 0:
            generation.error = generation.error or RequestError(
                "the model's scores are not numbers (NaN) or all excluded; the answer ends here."
            )
            return True
        ends = value in request.eos_ids
        if extra is None:
            token = Token(id=value, ends=ends)
        else:
            top = tuple(zip(extra.top_ids[0].tolist(), extra.top[0].tolist(), strict=True))
            token = Token(id=value, ends=ends, logprob=extra.chosen.item(), top_logprobs=top)
        generation.produced.append(value)
        generation.waiting.append(token)
        return ends or len(generation.produced) >= request.max_tokens

    def _settle(self, generation: Generation) -> None:
        last = generation.produced[-1] if generation.produced else None
        reason: Finish = "stop" if last in generation.request.eos_ids else "length"
        self._engine.finish(generation, "error" if generation.error else reason, generation.error)

    def _forward_where_short(self, step: Step) -> Step | None:
        """The next step of the rows that stay in this lane; those that outgrow it are computed anew for the other."""
        crossing = [g for g in step.rows if self._engine.is_long(g) != self._long]
        if not crossing:
            return self._forward(step)
        self._batch.change([s for s in self._batch.sequences if s not in [g.sequence for g in crossing]])
        for generation in crossing:
            self._engine.restart(generation)
        rest = step.only([i for i, g in enumerate(step.rows) if g not in crossing])
        return self._forward(rest) if rest is not None else None

    def _forward(self, step: Step) -> Step:
        """Feed a step's tokens, and pick the next ones."""
        sequences = [g.sequence for g in step.rows]
        if sequences != self._batch.sequences:
            self._batch.change(sequences)
        limit = self._engine.model.recompute_at
        length = None if limit is None else limit + self._long
        return self._engine.pick(step.rows, self._batch.step(self._engine.model, step.tokens, length))


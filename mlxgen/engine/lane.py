"""The rows that decode in one forward pass.

The lane runs one step ahead of the host where it can. It looks at a step's tokens first where they decide what comes
next: a guide must know them before it allows others, a rope may turn, and a row alone may guess what follows (see
speculation).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxgen.engine.batch import Batch
from mlxgen.engine.beam import grow_beams
from mlxgen.engine.request import Finish, Generation, Token
from mlxgen.engine.sequence import TokenSequence
from mlxgen.engine.speculation import TOO_LITTLE_SLACK, Speculator
from mlxgen.engine.step import Step
from mlxgen.engine.trial import Trial, allowed_part, start_trial, take_back
from mlxgen.errors import RequestError

if TYPE_CHECKING:
    from mlxgen.engine.engine import Engine


class Lane:
    """Rows that decode in one forward pass. Two lanes: rows beyond a rope's change of regime can't join the others."""

    def __init__(self, engine: Engine, long: bool):
        self._engine, self._long = engine, long
        self._batch = Batch(engine.parts.merge, engine.parts.rows, engine.parts.select)
        self._step: Step | None = None
        self._trial: Trial | None = None  # while there is one, there is no step
        self._steady = False  # whether the last step was one of the same rows

    def join(self, step: Step) -> None:
        """Rows with their first token; the batch changes before the next forward pass."""
        self._conclude()
        self._step = step if self._step is None else self._step + step
        self._steady = False

    def leave(self, rows: Sequence[Generation]) -> None:
        """Drop rows, and the tokens that were picked for them but not handed out."""
        if self._trial is not None and self._trial.row in rows:
            self._trial.row.state, self._trial = self._trial.before[0], None
            self._batch.change([])
        step = self._step
        if step is None or not any(g.owner in rows for g in step.rows):
            return
        for generation, state in zip(step.rows, step.before, strict=True):
            if generation in rows:
                generation.state = state
        gone = [g.sequence for g in step.rows if g.owner in rows]
        self._step = step.only([i for i, g in enumerate(step.rows) if g.owner not in rows])
        self._batch.change([s for s in self._batch.sequences if s not in gone])

    def give_back(self, sequence: TokenSequence) -> None:
        """Let a sequence hold its own caches until the next forward pass."""
        if sequence in self._batch.sequences:
            self._batch.change([])

    def decode(self) -> bool:
        """Hand out the tokens of the current step and start the next; False if there is none."""
        checked = self._conclude()
        step = self._step
        if step is None:
            return checked
        start = time.perf_counter()
        logits = None if self._must_look(step) else self._forward(step)
        ahead = None if logits is None or any(g.guide for g in step.rows) else self._engine.pick(step.rows, logits)
        values = step.tokens.tolist()
        if not checked:
            self._measure(step, time.perf_counter() - start)
        given = zip(step.rows, values, step.extras, strict=True)
        finished = [g for g, value, extra in given if g.search is None and self._give(g, value, extra)]
        keep = [i for i, g in enumerate(step.rows) if g not in finished]
        self._step = (ahead or step).only(keep)
        for generation in finished:
            generation.sequence.end()
        if finished:  # their caches are their own again
            self._batch.change([s for s in self._batch.sequences if s not in [g.sequence for g in finished]])
            self._steady = False
        if any(g.search for g in step.rows):
            finished += self._grow([values[i] for i in keep])
        if self._step is not None and logits is None:
            self._step = self._next(self._step)
        elif self._step is not None and ahead is None:  # the device has been at work while guides looked at the tokens
            self._step = self._engine.pick(self._step.rows, logits if not finished else logits[mx.array(keep)])
        for generation in finished:
            self._settle(generation)
        return True

    def _must_look(self, step: Step) -> bool:
        """Whether the host must see this step's tokens before the next step can start."""
        limit = self._engine.model.recompute_at
        for g in step.rows:
            if (
                g.search is not None
                or len(g.produced) + 1 >= g.request.max_tokens
                or (limit is not None and not self._long and len(g.known) == limit)
            ):
                return True
        speculator = self._speculator(step)
        return speculator is not None and speculator.hopeful(step.rows[0])

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
        ends |= generation.follow(value)
        return ends or len(generation.produced) >= request.max_tokens

    def _grow(self, values: Sequence[int]) -> list[Generation]:
        """Let beams grow; returns the requests whose search is over."""
        assert self._step is not None
        self._step, ended = grow_beams(self._step, values, lambda: self._batch.change([]))
        staying = [g.sequence for g in self._step.rows] if self._step is not None else []
        if not all(s in staying for s in self._batch.sequences):
            self._batch.change([s for s in self._batch.sequences if s in staying])
        return ended

    def _settle(self, generation: Generation) -> None:
        last = generation.produced[-1] if generation.produced else None
        whole = generation.guide is not None and generation.guide.ended
        reason: Finish = "stop" if whole or last in generation.request.eos_ids else "length"
        self._engine.finish(generation, "error" if generation.error else reason, generation.error)

    def _next(self, step: Step) -> Step | None:
        """The next step of rows whose tokens the host has seen, or a trial. Those that outgrow the lane start anew."""
        crossing = [g for g in step.rows if self._engine.is_long(g) != self._long]
        if crossing:
            self._batch.change([s for s in self._batch.sequences if s not in [g.sequence for g in crossing]])
            for generation in crossing:
                self._engine.restart(generation)
            rest = step.only([i for i, g in enumerate(step.rows) if g not in crossing])
            if rest is None:
                return None
            step = rest
        return None if self._try(step) else self._engine.pick(step.rows, self._forward(step))

    def _forward(self, step: Step) -> mx.array:
        """Feed a step's tokens: the next logits [B, V]."""
        self._seat(step)
        logits = self._batch.step(self._engine.model, step.tokens, self._length)
        if any(g.guide for g in step.rows):
            mx.async_eval(logits)
        return logits

    def _seat(self, step: Step) -> None:
        sequences = [g.sequence for g in step.rows]
        if sequences != self._batch.sequences:
            self._batch.change(sequences)

    @property
    def _length(self) -> int | None:
        limit = self._engine.model.recompute_at
        return None if limit is None else limit + self._long

    def _speculator(self, step: Step) -> Speculator | None:
        """Of a row alone: with more rows, guesses would cost the others time."""
        row = step.rows[0]
        if len(step.rows) > 1 or row.speculator is None or self._engine.parts.sample_ahead is None:
            return None
        return row.speculator if row.speculator.ready(row.sequence.caches) else None

    def _measure(self, step: Step, seconds: float) -> None:
        """How long a plain step takes, where nothing else was computed meanwhile."""
        speculator = self._speculator(step)
        if speculator is not None and self._steady:
            speculator.costs.plain(seconds)
        self._steady = not self._engine.scheduler.prefilling

    def _try(self, step: Step) -> bool:
        """Let the model check what a row alone may say next, if there is a guess."""
        speculator = self._speculator(step)
        if speculator is None:
            return False
        start, row = time.perf_counter(), step.rows[0]
        room, limit = row.request.max_tokens - len(row.produced) - 1, self._engine.model.recompute_at
        if limit is not None and not self._long:
            room = min(room, limit - len(row.known))
        guess, masks = allowed_part(row, speculator.guess(row, room))
        if guess is None:
            return False
        self._seat(step)
        logits = self._batch.several(self._engine.model, [row.known[-1], *guess.tokens], self._length)
        self._trial = start_trial(row, guess, masks, logits, self._engine)
        self._trial.seconds = time.perf_counter() - start
        return True

    def _conclude(self) -> bool:
        """Hand out the guesses that were right. What was picked behind them is the current step then."""
        trial, self._trial = self._trial, None
        if trial is None:
            return False
        row, (values, right) = trial.row, trial.outcome()
        row.state = trial.after[right]
        row.speculator.checked(trial.guess, right, trial.seconds, row)
        ended = any(self._give(row, *given) for given in zip(values[:right], trial.extras, strict=False))
        if not ended and take_back(row.sequence.caches, len(trial.guess.tokens) - right):
            self._step = trial.step(right)
            return True
        self._batch.change([])
        if ended or self._give(row, values[right], trial.extras[right]):
            self._settle(row)
        else:
            row.speculator.off = TOO_LITTLE_SLACK
            self._engine.restart(row)
        return True

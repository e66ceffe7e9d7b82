"""The autoregressive loop, for one request or many: prompts are computed once (prefill), then one token at a time (decode).

A request alone is a batch of one. The loop runs one step ahead: while the host looks at a step's tokens, the device already
computes the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.engine.batch import Batch
from mlxgen.engine.prefill import prefill_chunk
from mlxgen.engine.request import Finish, Generation, Request, Token
from mlxgen.engine.scheduler import Scheduler
from mlxgen.engine.sequence import TokenSequence
from mlxgen.errors import RequestError
from mlxgen.protocols import LanguageModel

# Now and then MLX's pool of freed buffers is given back, as buffer sizes change while the caches grow.
_CLEAR_EVERY = 256


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions that the engine calls and does not know.

    sample: (logits [B, V], samplers, states) -> (tokens [B], states), lazy; a token below 0 says that a row's logits were
    no numbers. logprobs: (logits [1, V], token [1], how many) -> an object with `chosen`, `top_ids` and `top`.
    merge, rows: see mlxgen.cache.
    """

    sample: Callable[..., Any]
    logprobs: Callable[..., Any]
    merge: Callable[..., Any]
    rows: Callable[..., Any]


@dataclass
class _Step:
    """Tokens that are being computed: tokens[i] belongs to rows[i]."""

    rows: list[Generation]
    tokens: mx.array  # [B]
    extras: list[Any]  # log-probabilities of a row, or None
    before: list[Any]  # the sampler states that these tokens were picked from

    def __add__(self, other: _Step) -> _Step:
        tokens = mx.concatenate([self.tokens, other.tokens])
        return _Step(self.rows + other.rows, tokens, self.extras + other.extras, self.before + other.before)

    def only(self, keep: list[int]) -> _Step | None:
        """Some of the rows."""
        if not keep:
            return None
        if len(keep) == len(self.rows):
            return self
        rows, extras, before = ([column[i] for i in keep] for column in (self.rows, self.extras, self.before))
        return _Step(rows, self.tokens[mx.array(keep)], extras, before)


class Engine:
    """Runs requests on a model. Call `step` until it says that there is nothing to do, or `run` a generation."""

    def __init__(self, model: LanguageModel, parts: Parts, scheduler: Scheduler | None = None):
        self.model, self._parts = model, parts
        self.scheduler = scheduler or Scheduler()
        self._lanes = {long: _Lane(self, long) for long in (False, True)}
        self._arrivals = 0
        self._steps = 0

    def submit(self, request: Request, sequence: TokenSequence) -> Generation:
        """Queue a request on caches that may hold a beginning of its prompt already. Raises FitError."""
        generation = Generation(request=request, sequence=sequence, arrival=self._arrivals)
        self._arrivals += 1
        if not request.max_tokens:
            generation.finish = "length"
            return generation
        self.scheduler.add(generation)
        return generation

    def step(self) -> bool:
        """Decode one token of every running request, then compute one chunk of one prompt. False if there was nothing."""
        _, evicted = self.scheduler.admit()
        for generation in evicted:
            self._suspend(generation)
        worked = False
        for lane in self._lanes.values():
            worked |= lane.decode()
        generation = self.scheduler.next_prefill()
        if generation is not None:
            self._guarded(generation, lambda: self._prefill_chunk(generation))
            worked = True
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return worked or bool(self.scheduler.waiting)

    def cancel(self, generation: Generation) -> None:
        """End a request now; its memory is free at once, unless the caller keeps its sequence."""
        if not generation.done:
            self.finish(generation, "cancelled")

    def finish(self, generation: Generation, reason: Finish, error: Exception | None = None) -> None:
        """Take a request out, and bring its sequence to the tokens that it has given out."""
        for lane in self._lanes.values():
            lane.leave([generation])
        self.scheduler.remove(generation)
        generation.finish, generation.error = reason, error
        sequence = generation.sequence
        if not sequence.caches or not sequence.caches[0].offset:
            return
        if error is not None:
            sequence.reset()
            return
        sequence.tokens = generation.known
        sequence.keep(min(len(sequence.tokens), sequence.caches[0].offset))

    def is_long(self, generation: Generation) -> bool:
        """Whether a sequence is beyond the length from which its rope turns otherwise."""
        limit = self.model.recompute_at
        return limit is not None and len(generation.known) > limit

    def pick(self, rows: Sequence[Generation], logits: mx.array) -> _Step:
        """One token for each row, lazily; a sampler that fails fails for its own row only."""
        samplers, states = [g.request.sampler for g in rows], [g.state for g in rows]
        try:
            tokens, after = self._parts.sample(logits, samplers, states)
        except Exception:
            tokens, after = self._pick_each(rows, logits)
        for generation, state in zip(rows, after, strict=True):
            generation.state = state
        extras = [self._extra(g, logits[i : i + 1], tokens[i : i + 1]) for i, g in enumerate(rows)]
        mx.async_eval(tokens)
        return _Step(list(rows), tokens, extras, states)

    def _pick_each(self, rows: Sequence[Generation], logits: mx.array) -> tuple[mx.array, list[Any]]:
        tokens, after = [], []
        for i, generation in enumerate(rows):
            try:
                token, (state,) = self._parts.sample(
                    logits[i : i + 1], [generation.request.sampler], [generation.state]
                )
            except Exception as error:
                generation.error = error
                token, state = mx.array([-1]), generation.state
            tokens.append(token)
            after.append(state)
        return mx.concatenate(tokens), after

    def _extra(self, generation: Generation, logits: mx.array, token: mx.array) -> Any:
        top = generation.request.top_logprobs
        return self._parts.logprobs(logits, token, top) if top >= 0 else None

    def _prefill_chunk(self, generation: Generation) -> None:
        """Compute the next chunk of a prompt; with its last one comes the first token."""
        sequence, request, tokens = generation.sequence, generation.request, generation.known
        if generation.state is None:
            sequence.rewind(tokens)
            generation.cached_tokens = len(sequence.tokens)
            generation.state = request.sampler.start(request.prompt)
        logits = prefill_chunk(self.model, sequence, tokens, request.prefill_chunk)
        if logits is not None:
            step = self.pick([generation], logits)
            self.scheduler.ready(generation)
            self._lanes[self.is_long(generation)].join(step)

    def restart(self, generation: Generation) -> None:
        """Compute everything anew, from all tokens that are known."""
        generation.sequence.reset()
        if generation in self.scheduler.running:
            self.scheduler.running.remove(generation)
            self.scheduler.prefilling.append(generation)

    def _suspend(self, generation: Generation) -> None:
        """Make room for others: what is computed is dropped, what was produced is kept."""
        for lane in self._lanes.values():
            lane.leave([generation])
        generation.sequence.reset()

    def _guarded(self, generation: Generation, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.finish(generation, "error", error)


class _Lane:
    """Rows that decode in one forward pass. Two lanes: sequences beyond a rope's change of regime can't join the others."""

    def __init__(self, engine: Engine, long: bool):
        self._engine, self._long = engine, long
        self._batch = Batch(engine._parts.merge, engine._parts.rows)
        self._step: _Step | None = None

    def join(self, step: _Step) -> None:
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

    def _must_look(self, step: _Step) -> bool:
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

    def _forward_where_short(self, step: _Step) -> _Step | None:
        """The next step of the rows that stay in this lane; those that outgrow it are computed anew for the other."""
        crossing = [g for g in step.rows if self._engine.is_long(g) != self._long]
        if not crossing:
            return self._forward(step)
        self._batch.change([s for s in self._batch.sequences if s not in [g.sequence for g in crossing]])
        for generation in crossing:
            self._engine.restart(generation)
        rest = step.only([i for i, g in enumerate(step.rows) if g not in crossing])
        return self._forward(rest) if rest is not None else None

    def _forward(self, step: _Step) -> _Step:
        """Feed a step's tokens, and pick the next ones."""
        sequences = [g.sequence for g in step.rows]
        if sequences != self._batch.sequences:
            self._batch.change(sequences)
        limit = self._engine.model.recompute_at
        length = None if limit is None else limit + self._long
        return self._engine.pick(step.rows, self._batch.step(self._engine.model, step.tokens, length))


"""The autoregressive loop for any number of requests: prompts computed once (prefill), then token by token (decode).

A request alone is a batch of one. The loop runs one step ahead: while the host looks at a step's tokens, the device
already computes the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlxgen.engine.beam import BeamSearch, check_beams
from mlxgen.engine.guided import guided
from mlxgen.engine.lane import Lane
from mlxgen.engine.prefill import prefill_chunk
from mlxgen.engine.prefix import PrefixStore
from mlxgen.engine.request import Finish, Generation, Request
from mlxgen.engine.scheduler import Scheduler
from mlxgen.engine.scoring import score_tokens
from mlxgen.engine.sequence import TokenSequence
from mlxgen.engine.sharing import borrow, join_twins
from mlxgen.engine.step import Step
from mlxgen.protocols import LanguageModel

# Now and then MLX's pool of freed buffers is given back, as buffer sizes change while the caches grow.
_CLEAR_EVERY = 256


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions that the engine calls and does not know.

    sample: (logits [B, V], samplers, states) -> (tokens [B], states), lazy; a token below 0 says that a row's logits
    were no numbers. logprobs: (logits [1, V], token [1], how many) -> an object with `chosen`, `top_ids` and `top`.
    merge, rows: see mlxgen.cache. sample_ahead, for speculation, and candidates, for beams: see mlxgen.sampler.
    select: is told before each forward pass what its rows' sequences have as their `variant`.
    """

    sample: Callable[..., Any]
    logprobs: Callable[..., Any]
    merge: Callable[..., Any]
    rows: Callable[..., Any]
    sample_ahead: Callable[..., Any] | None = None
    candidates: Callable[..., Any] | None = None
    select: Callable[[Sequence[Any]], None] | None = None


class Engine:
    """Runs requests on a model. Call `step` until it says that there is nothing to do, or `run` a generation."""

    def __init__(
        self,
        model: LanguageModel,
        parts: Parts,
        scheduler: Scheduler | None = None,
        store: PrefixStore | None = None,
    ):
        """store: what prompts begin with is looked up there before it is computed."""
        self.model, self.parts, self.store = model, parts, store
        self.scheduler = scheduler or Scheduler()
        self._lanes = {long: Lane(self, long) for long in (False, True)}
        self._arrivals = 0
        self._steps = 0

    def submit(self, request: Request, sequence: TokenSequence) -> Generation:
        """Queue a request on caches that may hold a beginning of its prompt already. Raises FitError, RequestError."""
        if request.beams > 1:
            check_beams(request, self.model.recompute_at)
        generation = Generation(request=request, sequence=sequence, arrival=self._arrivals)
        self._arrivals += 1
        if not request.max_tokens and request.prompt_logprobs < 0:
            generation.finish = "length"
            return generation
        self.scheduler.add(generation)
        return generation

    def step(self) -> bool:
        """Decode one token of every running request, then compute one chunk of one prompt. False if nothing ran."""
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
        sequence = generation.sequence
        sequence.end()
        for lane in self._lanes.values():
            lane.leave([generation])
        self.scheduler.remove(generation)
        generation.finish, generation.error = reason, error
        if sequence.ended:
            sequence.reset()
        if not sequence.caches or not sequence.caches[0].offset:
            return
        if error is not None:
            sequence.reset()
            return
        sequence.tokens = generation.known
        sequence.keep(min(len(sequence.tokens), sequence.caches[0].offset))
        if self.store is not None:
            self.store.add(sequence)

    def is_long(self, generation: Generation) -> bool:
        """Whether a sequence is beyond the length from which its rope turns otherwise."""
        limit = self.model.recompute_at
        return limit is not None and len(generation.known) > limit

    def pick(self, rows: Sequence[Generation], logits: mx.array) -> Step:
        """One token for each row, lazily; a sampler that fails fails for its own row only."""
        samplers, states = [g.request.sampler for g in rows], [g.state for g in rows]
        scores = guided(rows, logits)
        try:
            tokens, after = self.parts.sample(scores, samplers, states)
        except Exception:
            tokens, after = self._pick_each(rows, scores)
        for generation, state in zip(rows, after, strict=True):
            generation.state = state
        extras = [
            self.extra(g, logits[i : i + 1], tokens[i : i + 1])
            if g.search is None
            else self._ways_on(g, logits[i : i + 1], scores[i : i + 1], states[i])
            for i, g in enumerate(rows)
        ]
        mx.async_eval(tokens)
        return Step(list(rows), tokens, extras, states)

    def _pick_each(self, rows: Sequence[Generation], logits: mx.array) -> tuple[mx.array, list[Any]]:
        tokens, after = [], []
        for i, generation in enumerate(rows):
            try:
                token, (state,) = self.parts.sample(
                    logits[i : i + 1], [generation.request.sampler], [generation.state]
                )
            except Exception as error:
                generation.error = error
                token, state = mx.array([-1]), generation.state
            tokens.append(token)
            after.append(state)
        return mx.concatenate(tokens), after

    def extra(self, generation: Generation, logits: mx.array, token: mx.array) -> Any:
        """The log-probabilities that a request wants of a token [1], from the model's own logits [1, V]."""
        top = generation.request.top_logprobs
        return self.parts.logprobs(logits, token, top) if top >= 0 else None

    def _ways_on(self, generation: Generation, logits: mx.array, scores: mx.array, state: Any) -> Any:
        """The best next tokens of a beam, twice as many as there are beams, as some may end it; None if that fails."""
        request = generation.request
        assert self.parts.candidates is not None
        try:
            return self.parts.candidates(
                logits, scores, request.sampler, state, 2 * request.beams, request.top_logprobs
            )
        except Exception as error:
            generation.error = error
            return None

    def _prefill_chunk(self, generation: Generation) -> None:
        """Compute the next chunk of a prompt; with its last one comes the first token."""
        sequence, tokens = generation.sequence, generation.known
        if generation.state is None or not sequence.tokens:
            self._begin(generation)
        look = partial(self._score, generation) if generation.lacks_scores else None
        if self.parts.select is not None:
            self.parts.select([sequence.variant])
        logits = prefill_chunk(self.model, sequence, tokens, generation.request.prefill_chunk, look)
        if logits is not None and not generation.request.max_tokens:
            self.finish(generation, "length")
        elif logits is not None:
            rows = [generation, *join_twins(generation, self.scheduler.prefilling)]
            for row in rows:
                row.search = BeamSearch(row) if row.request.beams > 1 else None
            step = self.pick(rows, mx.repeat(logits, len(rows), axis=0) if len(rows) > 1 else logits)
            for row in rows:
                self.scheduler.ready(row)
            self._lanes[self.is_long(generation)].join(step)

    def _begin(self, generation: Generation) -> None:
        """Find what of the tokens is computed already."""
        sequence, tokens = generation.sequence, generation.known
        wanted = tokens[:-1]  # the last one is always computed, since its logits are
        if generation.lacks_scores:
            wanted = []
            generation.prompt_scores.clear()
        sequence.rewind(wanted, long=self.is_long(generation))
        admitted = [*self.scheduler.running, *self.scheduler.prefilling]
        others = [other.sequence for other in admitted if other is not generation]
        borrow(sequence, wanted, self.store, others, self._give_back)
        if generation.state is None:
            generation.begin(len(sequence.tokens))

    def _score(self, generation: Generation, hidden: mx.array, start: int, stop: int) -> None:
        """Note what the model thinks of a chunk of the prompt."""
        following, top = generation.request.prompt[start + 1 : stop + 1], generation.request.prompt_logprobs
        generation.prompt_scores += score_tokens(self.model, self.parts.logprobs, hidden, following, top)

    def _give_back(self, sequence: TokenSequence) -> None:
        for lane in self._lanes.values():
            lane.give_back(sequence)

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
        if generation.search is not None:  # it begins anew
            generation.search = generation.state = None

    def _guarded(self, generation: Generation, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.finish(generation, "error", error)

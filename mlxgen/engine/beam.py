"""Beam search: of all continuations, keep the few that are the most likely so far.

Scores are sums of log-probabilities, divided by length ** length_penalty (arXiv:1609.08144 section 7, in the form of
Hugging Face transformers); the end-of-sequence token counts for both. Candidates that end leave the search. It is over
when none that goes on could become one of the wanted answers. Each beam is a row of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxgen.engine.request import Generation, Request, Token
from mlxgen.engine.step import Step
from mlxgen.errors import RequestError
from mlxgen.protocols import Guide


@dataclass(eq=False, kw_only=True)
class Beam(Generation):
    """One beam. `total`: its sum of log-probabilities; `tokens`: of `produced`."""

    total: float
    tokens: tuple[Token, ...]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A beam that may be, grown from a row of the search."""

    row: Generation
    state: Any  # of the row's sampler
    total: float
    token: Token
    guide: Guide | None  # after the token

    @property
    def ends(self) -> bool:
        """Whether nothing follows: an end of sequence, or the rest of an answer that is whole by its rule."""
        return self.token.ends or (self.guide is not None and self.guide.ended)

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (*(self.row.tokens if isinstance(self.row, Beam) else ()), self.token)


@dataclass(eq=False)
class BeamSearch:
    """The search of one request, whose generation is its first row. `done`: (score, last token) of the best answers."""

    owner: Generation
    done: list[tuple[float, _Candidate]] = field(default_factory=list)

    def grow(self, step: Step, places: Sequence[int]) -> list[_Candidate]:
        """One token more: the beams that go on, in the order of their rows; none if the search is over."""
        request, length = self.owner.request, len(step.rows[places[0]].produced) + 1
        going: list[_Candidate] = []
        found = [c for i in places for c in _candidates(step.rows[i], step.before[i], step.extras[i])]
        for candidate in sorted(found, key=lambda c: -c.total):
            if candidate.ends or length >= request.max_tokens:
                self.done.append((candidate.total / length**request.length_penalty, candidate))
            elif len(going) < request.beams:
                going.append(candidate)
        self.done = sorted(self.done, key=lambda answer: -answer[0])[: request.best]
        if not going or self._over(going[0].total, length):
            return []
        rows = [step.rows[i] for i in places]
        return sorted(going, key=lambda c: rows.index(c.row))

    def _over(self, best: float, length: int) -> bool:
        """Whether no beam can become one of the wanted answers: `best` is the highest sum, and sums only fall."""
        request = self.owner.request
        if len(self.done) < request.best:
            return False
        longest = request.max_tokens if request.length_penalty > 0 else length + 1
        return self.done[-1][0] >= best / longest**request.length_penalty

    def hand_out(self) -> None:
        """The best answer is the owner's, and the next best are beside it."""
        owner = self.owner
        owner.others = [
            Generation(
                request=owner.request, sequence=owner.sequence, arrival=0, state=owner.state,
                cached_tokens=owner.cached_tokens,
            )
            for _ in self.done[1:]
        ]  # fmt: skip
        for generation, (score, last) in zip([owner, *owner.others], self.done, strict=True):
            generation.score, generation.produced = score, [token.id for token in last.tokens]
            generation.waiting.extend(last.tokens)
            generation.guide = last.guide
        for other, (_, last) in zip(owner.others, self.done[1:], strict=True):
            other.finish = "stop" if last.ends else "length"


def check_beams(request: Request, recompute_at: int | None) -> None:
    """Raise RequestError if the beams of a request might have to be computed anew on their way."""
    room = request.max_tokens if recompute_at is None else recompute_at - len(request.prompt)
    if 0 <= room < request.max_tokens:
        raise RequestError(
            f"`max_tokens` must be at most {room} with `beams` and this prompt, as positions change behind "
            f"{recompute_at} tokens, but is {request.max_tokens}."
        )


def grow_beams(
    step: Step, values: Sequence[int], own_caches: Callable[[], None]
) -> tuple[Step | None, list[Generation]]:
    """(the step with new beams in place of those they grew from, requests whose search has ended).

    values: the step's tokens, below 0 where logits were no numbers. own_caches: called before beams are copied, to make
    every sequence hold its caches.
    """
    searches = list(dict.fromkeys(g.search for g in step.rows if g.search is not None))
    searched = [e for g, e in zip(step.rows, step.extras, strict=True) if g.search is not None and e is not None]
    mx.eval([vars(extra) for extra in searched])
    grown, ended = step.only([i for i, g in enumerate(step.rows) if g.search is None]), []
    for search in searches:
        places = [i for i, g in enumerate(step.rows) if g.search is search]
        try:
            _check(step, values, places)
            going = search.grow(step, places)
            if not going:
                search.hand_out()
        except Exception as error:
            search.owner.error, going = error, []
        if not going:
            ended.append(search.owner)
            continue
        if len({id(c.row) for c in going}) < len(going) or len(going) < len(places):
            own_caches()
        beams = _beams(search, going)
        new = Step(beams, mx.array([c.token.id for c in going]), [None] * len(beams), [b.state for b in beams])
        grown = new if grown is None else grown + new
    return grown, ended


def _check(step: Step, values: Sequence[int], places: Sequence[int]) -> None:
    """Raise what a row of a search has failed with."""
    for i in places:
        if values[i] < 0 or step.extras[i] is None:
            raise step.rows[i].error or RequestError("the model's scores are not numbers (NaN).")


def _beams(search: BeamSearch, going: Sequence[_Candidate]) -> list[Generation]:
    """The first beam of each row takes over its caches, the others have copies. The owner keeps its own."""
    beams: list[Generation] = []
    for candidate in going:
        row = candidate.row
        taken = row is search.owner or any(beam.sequence is row.sequence for beam in beams)
        beam = Beam(
            request=row.request,
            sequence=row.sequence.fork(row.sequence.caches[0].offset) if taken else row.sequence,
            arrival=row.arrival,
            state=candidate.state.push(candidate.token.id),
            guide=candidate.guide,
            search=search,
            produced=[*row.produced, candidate.token.id],
            total=candidate.total,
            tokens=candidate.tokens,
        )
        beams.append(beam)
    return beams


def _candidates(row: Generation, state: Any, found: Any) -> list[_Candidate]:
    """The best continuations of one row by themselves. found: see mlxgen.sampler.candidates."""
    total, eos_ids = row.total if isinstance(row, Beam) else 0.0, row.request.eos_ids
    top = tuple(zip(found.top_ids.tolist(), found.top.tolist(), strict=True))
    columns = zip(found.ids.tolist(), found.scores.tolist(), found.logprobs.tolist(), strict=True)
    candidates = []
    for token, score, logprob in columns:
        if score > float("-inf"):
            detail = dict(logprob=logprob, top_logprobs=top) if row.request.top_logprobs >= 0 else {}
            entry = Token(id=token, ends=token in eos_ids, **detail)
            after = _after(row.guide, token)
            candidates.append(_Candidate(row=row, state=state, total=total + score, token=entry, guide=after))
    return candidates


def _after(guide: Guide | None, token: int) -> Guide | None:
    """A guide one token further; the beams that grow from one row each have their own."""
    if guide is None:
        return None
    guide = guide.fork()
    guide.advance(token)
    return guide

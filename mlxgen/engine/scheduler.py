"""Who computes next: plain Python over plain numbers, no arrays.

Requests wait until there is room, then their prompts are computed in chunks, one chunk at a time between steps of
decode, so a long prompt stalls nobody for longer than one chunk. Higher priority goes first, then who came first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxgen.engine.request import Generation
from mlxgen.errors import FitError


@dataclass(kw_only=True)
class Scheduler:
    """`budget_bytes` bounds what the caches of all admitted requests may come to hold; `max_rows` how many they are.

    cost: bytes that the caches of these requests hold together when they are complete; a request that needs several
    rows is there as often.
    """

    cost: Callable[[Sequence[Generation]], int] = lambda generations: 0
    budget_bytes: int | None = None
    max_rows: int = 64
    waiting: list[Generation] = field(default_factory=list)
    prefilling: list[Generation] = field(default_factory=list)
    running: list[Generation] = field(default_factory=list)

    def add(self, generation: Generation) -> None:
        """Queue a request. Raises FitError if it could never be admitted."""
        need = self._need([generation])
        if generation.request.beams > self.max_rows:
            raise FitError(
                f"`beams` must be at most {self.max_rows}, the rows of a batch, but is {generation.request.beams}."
            )
        if self.budget_bytes is not None and need > self.budget_bytes:
            raise FitError(
                f"the request needs {need:,} bytes of cache, but the budget is {self.budget_bytes:,}; "
                "ask for fewer tokens, or raise the budget."
            )
        self.waiting.append(generation)
        self.waiting.sort(key=_rank)

    def remove(self, generation: Generation) -> None:
        for queue in (self.waiting, self.prefilling, self.running):
            if generation in queue:
                queue.remove(generation)

    def admit(self) -> tuple[list[Generation], list[Generation]]:
        """(requests that may start now, requests of lower priority that must make room and wait again)."""
        started, evicted = [], []
        while self.waiting:
            first = self.waiting[0]
            victims = self._room_for(first)
            if victims is None:
                break
            for victim in victims:
                self.remove(victim)
                evicted.append(victim)
            self.waiting.remove(first)
            self.prefilling.append(first)
            started.append(first)
        for victim in evicted:
            self.waiting.append(victim)
        self.waiting.sort(key=_rank)
        return started, evicted

    def next_prefill(self) -> Generation | None:
        return min(self.prefilling, key=_rank, default=None)

    def ready(self, generation: Generation) -> None:
        """Its prompt is computed: it decodes from now on."""
        self.prefilling.remove(generation)
        self.running.append(generation)

    def _room_for(self, candidate: Generation) -> list[Generation] | None:
        """Which admitted requests of lower priority must go for this one to fit; None if that is not enough."""
        admitted = [*self.prefilling, *self.running]
        victims: list[Generation] = []
        lower = sorted(
            (g for g in admitted if g.request.priority < candidate.request.priority), key=_rank, reverse=True
        )
        while not self._fits([g for g in admitted if g not in victims], candidate):
            if not lower:
                return None
            victims.append(lower.pop(0))
        return victims

    def _fits(self, admitted: list[Generation], candidate: Generation) -> bool:
        together = [*admitted, candidate]
        if sum(generation.request.beams for generation in together) > self.max_rows:
            return False
        return self.budget_bytes is None or self._need(together) <= self.budget_bytes

    def _need(self, generations: Sequence[Generation]) -> int:
        """Each beam has its own caches, and the prompt's are kept to copy from."""
        return self.cost([g for g in generations for _ in range(g.request.beams + (g.request.beams > 1))])


def _rank(generation: Generation) -> tuple[int, int]:
    return (-generation.request.priority, generation.arrival)

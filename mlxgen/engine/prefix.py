"""Prompts share what is computed: a store of sequences, found by the tokens they begin with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from mlxgen.engine.sequence import TokenSequence
from mlxgen.engine.token_trie import TokenTrie

Key = tuple[Hashable, bool]


class LongStore(Protocol):
    """Where sequences outlive the process; see mlxgen.engine.shelf."""

    def find(self, like: TokenSequence, tokens: Sequence[int], more_than: int) -> TokenSequence | None: ...

    def add(self, sequence: TokenSequence) -> None: ...


class PrefixStore:
    """Computed sequences, the least recently used dropped first where they hold more than `budget_bytes`.

    Nothing that is stored is ever changed: users get forks. What another sequence begins with is not kept beside it.
    shelf: keeps them for the next process too.
    """

    def __init__(self, budget_bytes: int, shelf: LongStore | None = None):
        self.budget_bytes, self._shelf = budget_bytes, shelf
        self._tries: dict[Key, TokenTrie[TokenSequence]] = defaultdict(TokenTrie)
        self._entries: dict[int, TokenSequence] = {}  # by id, the least recently used first

    def find(self, like: TokenSequence, tokens: Sequence[int], more_than: int = 0) -> TokenSequence | None:
        """A sequence like another one, of the most of the first `tokens` that is stored, if more than `more_than`."""
        best, count = self._best(like.key, tokens)
        if self._shelf is not None:
            saved = self._shelf.find(like, tokens, max(count, more_than))
            if saved is not None:
                self._keep(saved)
                return saved
        if best is None or count <= more_than:
            return None
        self._touch(best)
        return best.fork(count)

    def add(self, sequence: TokenSequence) -> None:
        """Store what a sequence holds; it may go on changing."""
        if sequence.kind is None or not sequence.tokens:
            return
        if self._shelf is not None:
            self._shelf.add(sequence)
        self._keep(sequence)

    def clear(self) -> None:
        """Forget what is in memory."""
        self._tries.clear()
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries; a mark that several have inherited counts once."""
        return _nbytes(self._entries.values())

    def _best(self, key: Key, tokens: Sequence[int]) -> tuple[TokenSequence | None, int]:
        """The stored sequence that others can go on from with the most of the first `tokens`, and how many."""
        best, most = None, 0
        for sequence, shared in self._tries[key].matches(tokens):
            if shared <= most:
                break
            count = sequence.reach(shared)
            if count > most:
                best, most = sequence, count
        return best, most

    def _keep(self, sequence: TokenSequence) -> None:
        key, tokens = sequence.key, sequence.tokens
        known, count = self._best(key, tokens)
        if known is not None and count == len(tokens):
            self._touch(known)
            return
        if _nbytes([sequence], used=True) > self.budget_bytes:
            return
        entry = sequence.fork(len(tokens))
        entry.compact()
        for shorter in self._tries[key].prefixes(tokens):
            self._drop(shorter)
        self._tries[key].insert(tokens, entry)
        self._entries[id(entry)] = entry
        while self.nbytes > self.budget_bytes:
            self._drop(next(iter(self._entries.values())))

    def _touch(self, entry: TokenSequence) -> None:
        self._entries[id(entry)] = self._entries.pop(id(entry))

    def _drop(self, entry: TokenSequence) -> None:
        self._tries[entry.key].remove(entry.tokens)
        del self._entries[id(entry)]


def _nbytes(sequences: Iterable[TokenSequence], *, used: bool = False) -> int:
    """Bytes of sequences and their marks. used: not of what is allocated, but of what is in it."""
    marks = {id(mark): mark for sequence in sequences for mark in sequence.marks.values()}
    layers = [cache for mark in marks.values() for cache in mark if cache is not None]
    own = [cache for sequence in sequences for cache in sequence.caches]
    if used:
        return sum(array.nbytes for cache in own for array in cache.state) + sum(cache.nbytes for cache in layers)
    return sum(cache.nbytes for cache in [*layers, *own])

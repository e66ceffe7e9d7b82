"""Values under token sequences, found by the longest shared beginning. Plain Python, no arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from mlxgen.engine.sequence import common_length

T = TypeVar("T")


class _Node(Generic[T]):
    """`edge`: the tokens that lead here from the node above."""

    def __init__(self, edge: tuple[int, ...]):
        self.edge = edge
        self.below: dict[int, _Node[T]] = {}  # by the first token of their edge
        self.value: T | None = None


class TokenTrie(Generic[T]):
    """A trie whose chains of single branches are one node each: its size depends on how many sequences differ."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node(())

    def insert(self, tokens: Sequence[int], value: T) -> None:
        """Put a value under a sequence, in place of one that is there."""
        node, rest = self._root, tuple(tokens)
        while rest:
            child = node.below.get(rest[0])
            if child is None:
                child = node.below[rest[0]] = _Node(rest)
            shared = common_length(child.edge, rest)
            if shared < len(child.edge):
                child = self._split(node, child, shared)
            node, rest = child, rest[shared:]
        node.value = value

    def remove(self, tokens: Sequence[int]) -> None:
        """Take out the value under a sequence, which must be there, and the branch that only led to it."""
        path, rest = [self._root], tuple(tokens)
        while rest:
            path.append(path[-1].below[rest[0]])
            rest = rest[len(path[-1].edge) :]
        path[-1].value = None
        for above, node in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.value is not None or len(node.below) > 1:
                break
            if node.below:
                (only,) = node.below.values()
                only.edge = node.edge + only.edge
                above.below[only.edge[0]] = only
            else:
                del above.below[node.edge[0]]

    def matches(self, tokens: Sequence[int]) -> Iterator[tuple[T, int]]:
        """Every value, with how many tokens its sequence shares with `tokens`; those that share most come first."""
        done = None
        for node, depth in reversed(self._path(tokens)):
            for value in _values(node, done):
                yield value, depth
            done = node

    def prefixes(self, tokens: Sequence[int]) -> list[T]:
        """The values under sequences that `tokens` begins with, itself included; the shortest first."""
        steps = pairwise(self._path(tokens))
        whole = [node.value for (_, above), (node, depth) in steps if depth - above == len(node.edge)]
        return [value for value in whole if value is not None]

    def _path(self, tokens: Sequence[int]) -> list[tuple[_Node[T], int]]:
        """The nodes that `tokens` leads through, and how many tokens are shared there; the last in part perhaps."""
        node, depth = self._root, 0
        path, rest = [(node, depth)], tuple(tokens)
        while rest and rest[0] in node.below:
            node = node.below[rest[0]]
            shared = common_length(node.edge, rest)
            depth, rest = depth + shared, rest[shared:]
            path.append((node, depth))
            if shared < len(node.edge):
                break
        return path

    def _split(self, above: _Node[T], node: _Node[T], at: int) -> _Node[T]:
        middle: _Node[T] = _Node(node.edge[:at])
        node.edge = node.edge[at:]
        middle.below[node.edge[0]] = node
        above.below[middle.edge[0]] = middle
        return middle


def _values(node: _Node[T], done: _Node[T] | None) -> Iterator[T]:
    """All values at and below a node but for a branch that is done."""
    stack = [node]
    while stack:
        here = stack.pop()
        if here is done:
            continue
        if here.value is not None:
            yield here.value
        stack.extend(here.below.values())

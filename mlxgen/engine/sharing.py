"""What a prompt need not compute: because its own caches hold it, the store does, or another request is at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mlxgen.engine.prefix import PrefixStore
from mlxgen.engine.request import Generation
from mlxgen.engine.sequence import TokenSequence, common_length

# Taking a running request's caches out of its batch and back costs about a step, so it must be worth it.
_WORTHWHILE = 16


def borrow(
    sequence: TokenSequence,
    tokens: Sequence[int],
    store: PrefixStore | None,
    others: Iterable[TokenSequence],
    give_back: Callable[[TokenSequence], None],
) -> None:
    """Go on from the longest beginning of `tokens` that somebody has computed, if `sequence` holds less.

    others: sequences of running requests. give_back: makes such a sequence hold its caches, if a batch does.
    """
    if sequence.kind is None:
        return
    if store is not None:
        found = store.find(sequence, tokens, len(sequence.tokens))
        if found is not None:
            sequence.adopt(found)
    lenders = [other for other in others if other.key == sequence.key]
    lender = max(lenders, key=lambda other: _promise(other, tokens), default=None)
    if lender is None or _promise(lender, tokens) < len(sequence.tokens) + _WORTHWHILE:
        return
    give_back(lender)
    count = lender.reach(common_length(lender.tokens, tokens))
    if count > len(sequence.tokens):
        sequence.adopt(lender.fork(count))


def _promise(other: TokenSequence, tokens: Sequence[int]) -> int:
    """How many of `tokens` a running sequence can surely give. It knows its prompt, not what came after."""
    shared = common_length(other.tokens, tokens)
    if other.trims_freely:
        return shared
    return max((place for place in other.marks if place <= shared), default=0)


def join_twins(generation: Generation, queue: Iterable[Generation]) -> list[Generation]:
    """The requests of the queue that want the very prompt that was just computed: now they hold it too."""
    sequence, request = generation.sequence, generation.request
    if generation.produced or sequence.kind is None:
        return []
    same = [g for g in queue if g.request.prompt == request.prompt and g.sequence.kind == sequence.kind]
    twins = []
    for twin in [g for g in same if g is not generation and g.state is None and g.request.prompt_logprobs < 0]:
        try:
            twin.begin(cached_tokens=len(sequence.tokens))
        except Exception:  # it will meet it again when it is its turn
            continue
        twin.sequence.long = sequence.long
        twin.sequence.adopt(sequence.fork(len(sequence.tokens)))
        twins.append(twin)
    return twins

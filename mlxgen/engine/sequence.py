"""The tokens that a set of caches has seen, so that the next prompt can go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxgen.protocols import LayerCache


class TokenSequence:
    """Caches and the token ids they hold, kept in step."""

    def __init__(self, new_caches: Callable[[], list[LayerCache]]):
        self._new_caches = new_caches
        self.caches = new_caches()
        self.tokens: list[int] = []

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` need no computing. The last one always does, since its logits are wanted."""
        count = 0
        for have, want in zip(self.tokens, prompt[:-1], strict=False):
            if have != want:
                break
            count += 1
        surplus = self.caches[0].offset - count
        return count if all(cache.can_trim(surplus) for cache in self.caches) else 0

    def rewind(self, prompt: Sequence[int]) -> None:
        """Keep what the caches share with `prompt`."""
        self.keep(self.shared(prompt))

    def keep(self, count: int) -> None:
        """Forget all but the first `count` tokens, or everything where the caches can't go back that far."""
        surplus = self.caches[0].offset - count
        if surplus == 0:
            self.tokens = self.tokens[:count]
        elif all(cache.can_trim(surplus) for cache in self.caches):
            for cache in self.caches:
                cache.trim(surplus)
            self.tokens = self.tokens[:count]
        else:
            self.reset()

    def reset(self) -> None:
        self.caches = self._new_caches()
        self.tokens = []

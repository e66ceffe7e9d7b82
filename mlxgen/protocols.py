"""What the parts promise each other. Nothing here computes; nothing here imports mlx at run time.

Shapes: B rows of the batch, L new tokens, S tokens stored, H query heads, K key/value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx

    Array = mx.array
else:
    Array = Any

Message = Mapping[str, Any]  # {"role": ..., "content": ...} as in the chat templates of the hub


@runtime_checkable
class LayerCache(Protocol):
    """The memory of one layer. `offset` counts the tokens it has seen, also those it has dropped."""

    offset: int
    trims_freely: bool  # whether it can forget any number of tokens at any time

    def make_mask(self, length: int) -> Any:
        """Mask for `length` new tokens: None, "causal", or a boolean array [.., L, S] where True is visible.

        Called once per kind of layer before `attend`.
        """
        ...

    def attend(self, q: Array, k: Array, v: Array, mask: Any, attention: Callable[..., Array]) -> Array:
        """Store k, v [B, K, L, D] and return the attention of q [B, H, L, D] over all that is stored.

        `attention(q, keys, values, mask)` is the layer's own arithmetic for plain arrays; a cache that
        stores something else than plain arrays may do its own.
        """
        ...

    @property
    def state(self) -> list[Array]:
        """The arrays that hold the memory, for evaluation, copying and saving. May be set, after `counters`."""
        ...

    @property
    def counters(self) -> dict[str, int]:
        """The numbers that belong to the state. May be set."""
        ...

    def copy(self) -> LayerCache:
        """Another cache of the same memory. Arrays are shared, and never written to while they are."""
        ...

    @property
    def nbytes(self) -> int: ...

    def can_trim(self, count: int) -> bool:
        """Whether the newest `count` tokens can be forgotten as if they had never come."""
        ...

    def trim(self, count: int) -> int:
        """Forget the newest `count` tokens; returns how many were forgotten (0 where it can't)."""
        ...


class StateCache(Protocol):
    """The memory of a recurrent mixer: what it wrote last. The other promises are those of LayerCache."""

    def read(self) -> tuple[Array, ...]:
        """The arrays that were written last; none before the first token."""
        ...

    def write(self, state: Sequence[Array], length: int) -> None:
        """Keep these arrays instead, after `length` more tokens."""
        ...


class LanguageModel(Protocol):
    """Tokens in, logits out: all the engine needs to know of a decoder."""

    @property
    def recompute_at(self) -> int | None:
        """The length beyond which a sequence must be computed anew; None for nearly all models."""
        ...

    def __call__(
        self, tokens: Array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> Array:
        """tokens [B, L] -> logits [B, L, V]."""
        ...

    def hidden(
        self, tokens: Array, caches: Sequence[LayerCache] | None = None, *, length: int | None = None
    ) -> Array:
        """tokens [B, L] -> the last hidden states, normalized [B, L, hidden].

        `length` tells of how long a sequence these tokens are a part, where more of it is still to come.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """hidden [B, L, hidden] -> logits [B, L, V]: the output head."""
        ...


class Guide(Protocol):
    """Where an answer stands whose tokens must follow a rule: a schema, a regular expression, a grammar."""

    def masks(self, ahead: Sequence[int] = ()) -> list[Array]:
        """The tokens that may come next, [V] booleans; and then after each token of `ahead`, while those are allowed.

        End-of-sequence tokens are allowed just where the answer may end. Raises MlxgenError where nothing can follow.
        """
        ...

    def advance(self, token: int) -> None:
        """`token` is the next one."""
        ...

    def forced(self) -> list[int]:
        """Tokens that surely follow, as far as the rule leaves no choice; others may spell the same text."""
        ...

    def fork(self) -> Guide:
        """Another guide at the same place."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the answer so far is a whole one."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is a whole one that nothing can follow."""
        ...


class TextStream(Protocol):
    """Token ids in, text out, as soon as it is certain. All pieces joined equal the full decode."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str:
        """The rest, once no more tokens come."""
        ...


class Tokenizer(Protocol):
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Text to ids. `add_special` adds what the model wants around a raw prompt (BOS).

        Control tokens written in the text stay ordinary text, unless `parse_special`.
        """
        ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **template_args: Any,
    ) -> list[int]:
        """A conversation to ids through the chat template.

        The prompt ends with the opening of an assistant turn, or with `continue_final` exactly with the
        text of the last message.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def piece(self, token: int) -> str:
        """How one token of the vocabulary is written, for display."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that a token stands for; none for an id that no text uses.

        Raises TokenizerError where they depend on the token before.
        """
        ...

    def is_control(self, token: int) -> bool:
        """Whether a token is no part of the text, such as the end of a turn."""
        ...

    def stream(self, *, skip_special: bool = True, continues: bool = False) -> TextStream:
        """`continues`: the text goes on in the middle, so a first space is not dropped."""
        ...


class TensorSource(Protocol):
    """An opened checkpoint: names, shapes and dtypes are known, values are read when asked for."""

    config: Mapping[str, Any]

    def names(self) -> Iterator[str]: ...

    def load(self, name: str) -> Array: ...

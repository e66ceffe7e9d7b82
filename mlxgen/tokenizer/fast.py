"""The tokenizer: a vocabulary of the `tokenizers` library, a chat format, and streaming text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.errors import RequestError, TokenizerError
from mlxgen.protocols import Message
from mlxgen.tokenizer.chat import TURN_ENDS, ChatFormat
from mlxgen.tokenizer.guard import ControlGuard
from mlxgen.tokenizer.stream import BytesOf, ByteStream, NeighbourBytes, PieceDecoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NO_TEMPLATE = (
    "This model has no chat template. Give a plain prompt instead of messages, or set "
    "`tokenizer.chat_template` to a .jinja file (or to `chatml` if the model was trained on it)."
)


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokens that a checkpoint names. `names`: `bos_token` and so on -> text, as templates know them."""

    names: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None  # None: as the tokenizer's own post-processor does
    add_eos: bool | None = None
    eos_ids: frozenset[int] = frozenset()  # more than `eos_token`


class FastTokenizer:
    """Implements the Tokenizer protocol on a `tokenizers.Tokenizer`.

    vocab_size: the highest id + 1, added tokens included. eos_ids: every token that ends an answer: the
    end of a document and the end of a turn. prefix_ids, suffix_ids: what training put around a document.
    """

    def __init__(
        self,
        backend: Backend,
        special: SpecialTokens | None = None,
        *,
        chat: ChatFormat | None = None,
        config: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`config`: further keys of tokenizer_config.json, kept for saving. `vocab_size`: if it is known."""
        special = special or SpecialTokens()
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = special
        self.chat = chat
        self._config = dict(config or {})
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._control = {number: token.content for number, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}
        # A count would not do: ids may have gaps.
        self.vocab_size: int = vocab_size or max(backend.get_vocab().values(), default=-1) + 1
        self.bos_id = self._id_of("bos_token")
        self.end_of_text = self._id_of("eos_token")
        self.eos_ids = frozenset(self._find_eos())
        self.prefix_ids, self.suffix_ids = self._find_surroundings()
        unknown = special.names.get("unk_token") or getattr(backend.model, "unk_token", None)
        self._guard = ControlGuard(backend, self._control, unknown)

    # -- what the vocabulary says

    def _id_of(self, name: str) -> int | None:
        text = self.special.names.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _find_eos(self) -> Iterable[int]:
        yield from self.special.eos_ids
        for name in ("eos_token", "eot_token", "eom_token"):
            if (found := self._id_of(name)) is not None:
                yield found
        written = "".join(self.chat.sources.values()) if self.chat else ""
        control = {text: i for i, text in self._control.items()}
        for text in TURN_ENDS:
            inside_turn = text == "<|end|>" and "<|return|>" in control
            if text in control and text in written and not inside_turn:
                yield control[text]

    def _find_surroundings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What goes before and after a document: the post-processor's, unless the files say otherwise."""
        bare = [(text, self.backend.encode(text, add_special_tokens=False).ids) for text in ("a", "0", "\n")]
        text, inner = next((pair for pair in bare if pair[1]), ("", []))
        outer = self.backend.encode(text).ids
        at = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), 0) if inner else None
        prefix, suffix = (outer, []) if at is None else (outer[:at], outer[at + len(inner) :])
        eos = self._id_of("eos_token")
        if self.special.add_bos is not None and self.bos_id is not None:
            prefix = [self.bos_id] if self.special.add_bos else [i for i in prefix if i != self.bos_id]
        if self.special.add_eos is not None and eos is not None:
            suffix = [eos] if self.special.add_eos else [i for i in suffix if i != eos]
        return tuple(prefix), tuple(suffix)

    @property
    def has_chat_template(self) -> bool:
        return self.chat is not None

    # -- text to ids

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Text to ids, BOS in front if the model wants it. Control tokens written in the text stay text,
        unless `parse_special` (for prompts that the program writes, such as fill-in-the-middle)."""
        _check_unicode(text, "prompt")
        if parse_special:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        else:
            ids = self._guard.encode_text(text)
        prefix = list(self.prefix_ids) if add_special else []
        return ids if prefix and ids[: len(prefix)] == prefix else prefix + ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **template_args: Any,
    ) -> list[int]:
        """A conversation to ids. An assistant turn is opened at the end, also after an assistant's message;
        with `continue_final` the prompt ends exactly with the last message's text instead.

        Raises RequestError for messages the template refuses, TokenizerError without a template.
        """
        marked = self._chat.render(
            messages,
            tools=tools,
            continue_final=continue_final,
            template_args=template_args,
            mark=self._guard.mark,
        )
        _check_unicode(marked, "messages")
        return self._guard.encode_marked(marked)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **template_args: Any,
    ) -> str:
        """The prompt that `encode_chat` encodes, to look at."""
        return self._chat.render(
            messages, tools=tools, continue_final=continue_final, template_args=template_args
        )

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opened: bool = True,
        blocks: tuple[str, str] = ("", ""),
        **template_args: Any,
    ) -> str:
        """The conversation as text for `encode_marked`: control tokens that stand in messages are broken.

        opened, blocks: see ChatFormat.render.
        """
        text = self._chat.render(
            messages,
            tools=tools,
            opened=opened,
            blocks=blocks,
            template_args=template_args,
            mark=self._guard.mark,
        )
        _check_unicode(text, "messages")
        return text

    def mark(self, text: str) -> str:
        """How a message's `text` stands in what `render_marked` gives."""
        return self._guard.mark(text)

    def encode_marked(self, text: str) -> list[int]:
        """What `render_marked` gave, or the beginning of it, to ids."""
        return self._guard.encode_marked(text)

    def encode_aligned(self, text: str) -> tuple[list[int], list[int] | None]:
        """The same, and behind which character of the text each token ends, where that is known."""
        return self._guard.encode_aligned(text)

    @property
    def _chat(self) -> ChatFormat:
        if self.chat is None:
            raise TokenizerError(NO_TEMPLATE)
        return self.chat

    # -- ids to text

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continues: bool = False) -> str:
        stream = self.stream(skip_special=skip_special, continues=continues)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self, *, skip_special: bool = True, continues: bool = False) -> ByteStream:
        """`continues`: the tokens go on after a prompt, so that a SentencePiece vocabulary's first space is
        a space between words and stays."""
        strip = self._decoder.strip_space and not continues
        hidden = frozenset(self._control) if skip_special else frozenset()
        bytes_of = self._context_free if self._decoder.spell else self._by_neighbour()

        def visible(token: int) -> bytes:
            return b"" if token in hidden else bytes_of(token)

        return ByteStream(visible, strip_space=strip)

    def piece(self, token: int) -> str:
        """The text of one token; bytes that are no character by themselves as <0xE2>, a row of the embedding
        that the vocabulary does not use as <unused 7>."""
        if self.backend.id_to_token(_checked(token)) is None:
            return f"<unused {token}>"
        data = self._context_free(token) if self._decoder.spell else self._by_neighbour()(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that a token stands for, of a control token those of its name; none for unused ids.

        Raises TokenizerError for a vocabulary whose tokens are spelled by what stands before them.
        """
        if self._decoder.spell is None:
            raise TokenizerError("the spelling of this tokenizer's tokens depends on the tokens before.")
        return self._context_free(token)

    def is_control(self, token: int) -> bool:
        """Whether a token is no part of the text, such as the end of a turn."""
        return token in self._control

    @cached_property
    def _decoder(self) -> PieceDecoder:
        parts = (self.backend.decoder, self.backend.pre_tokenizer, self.backend.normalizer)
        return PieceDecoder(*(None if p is None else json.loads(p.__getstate__()) for p in parts))

    def _context_free(self, token: int) -> bytes:
        """The bytes of a token; nothing for rows of the embedding that the vocabulary does not use."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        assert self._decoder.spell is not None
        piece = self.backend.id_to_token(_checked(token))
        if piece is None:
            return b""
        # An added token is text as it stands: its characters are not byte symbols.
        literal = self._decoder.byte_level and token in self._added
        return piece.encode() if literal else self._decoder.spell(piece)

    def _by_neighbour(self) -> BytesOf:
        return NeighbourBytes(lambda ids: self.backend.decode(ids, skip_special_tokens=False))

    # -- on disk

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates, as transformers reads them."""
        from mlxgen.tokenizer.folder import save_tokenizer

        save_tokenizer(Path(folder), self.backend, self.special, self.chat, self._config)


def _checked(token: int) -> int:
    if token < 0:
        raise RequestError(f"Token ids must be 0 or more, but one is {token}.")
    return token


def _check_unicode(text: str, name: str) -> None:
    """Half of a surrogate pair, from broken JSON, has no UTF-8 and so no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"`{name}` must be valid Unicode, but has a lone surrogate at character {error.start}."
        ) from None

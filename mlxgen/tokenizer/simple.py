"""Tokenizers without a checkpoint: the bytes themselves, and none at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from mlxgen.errors import TokenizerError
from mlxgen.protocols import Message
from mlxgen.tokenizer.chat import CHATML, ChatFormat
from mlxgen.tokenizer.fast import FastTokenizer, SpecialTokens
from mlxgen.tokenizer.stream import byte_symbols

CONTROL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


class ByteTokenizer(FastTokenizer):
    """Ids 0-255 are the bytes of UTF-8, then `<s> </s> <|im_start|> <|im_end|>`. Chat is ChatML.

    For tests and for training from scratch: every text has tokens, and the vocabulary is 260.
    """

    def __init__(
        self,
        *,
        chat_template: str = CHATML,
        template_args: Mapping[str, Any] | None = None,
        fold_system: bool = False,
    ) -> None:
        vocabulary = byte_symbols()
        super().__init__(
            byte_level_backend(vocabulary, [], CONTROL_TOKENS),
            SpecialTokens(names={"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True),
            chat=ChatFormat(
                {"default": chat_template},
                tokens={"bos_token": "<s>", "eos_token": "</s>"},
                template_args=template_args,
                fold_system=fold_system,
            ),
        )


def byte_level_backend(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], control: Iterable[str]
) -> Any:
    """A `tokenizers.Tokenizer` of byte symbols and merges; control tokens not in it get the next ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(dict(vocabulary), list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    return backend


class _Silent:
    """The TextStream of a model without text."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class NoTokenizer:
    """Token ids in, token ids out. `vocab_size` 0: not known."""

    has_chat_template = False

    def __init__(
        self, vocab_size: int = 0, *, bos_id: int | None = None, eos_ids: Iterable[int] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> NoReturn:
        raise TokenizerError(
            "This model has no tokenizer, so a text has no tokens. Give the prompt as a list of token ids, "
            "or set `tokenizer=auto` with a model that brings one."
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **template_args: Any,
    ) -> NoReturn:
        self.encode("")

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return ""

    def piece(self, token: int) -> str:
        return f"<{token}>"

    def token_bytes(self, token: int) -> NoReturn:
        raise TokenizerError("this model has no tokenizer, so its tokens spell nothing; set `tokenizer=auto`.")

    def is_control(self, token: int) -> bool:
        return False

    def stream(self, *, skip_special: bool = True, continues: bool = False) -> _Silent:
        return _Silent()

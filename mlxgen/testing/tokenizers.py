"""Tiny tokenizers, made in code, the same every time: for tests that must not need a checkpoint."""

from __future__ import annotations

from typing import Literal

from mlxgen.tokenizer.chat import CHATML, ChatFormat
from mlxgen.tokenizer.fast import FastTokenizer, SpecialTokens
from mlxgen.tokenizer.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, SentencePieceModel, build
from mlxgen.tokenizer.simple import CONTROL_TOKENS, byte_level_backend
from mlxgen.tokenizer.stream import byte_symbols

# In the order in which BPE applies them; Ġ is the byte symbol of a blank.
_MERGES = (
    "Ġ t|h e|Ġt he|i n|e r|a n|Ġ a|o n|r e|Ġ s|Ġ c|a t|e n|o r|Ġa n|Ġan d|o u|Ġ w|i s|Ġ m|n d|i t|Ġ o|"
    "Ġo f|in g|Ġt o|Ġc at|l l|Ġ b|l e|Ġ l|Ġl e|a d|Ġle ad|Ġlead ing|Ġ p|Ġ d|s t"
)
_NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def tiny_bpe(*, chat_template: str | None = CHATML, add_bos: bool = False) -> FastTokenizer:
    """Byte-level BPE with 298 tokens: `<s> </s> <|im_start|> <|im_end|>` (ids 0-3), 256 bytes, 38 merges.

    Every text can be encoded. Chat is ChatML; `chat_template=None` gives a tokenizer without one.
    """
    vocabulary = {text: number for number, text in enumerate(CONTROL_TOKENS)}
    for symbol, byte in byte_symbols().items():
        vocabulary[symbol] = len(CONTROL_TOKENS) + byte
    merges = []
    for line in _MERGES.split("|"):
        left, right = line.split(" ")
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    backend = byte_level_backend(vocabulary, merges, CONTROL_TOKENS)
    return FastTokenizer(backend, SpecialTokens(names=_NAMES, add_bos=add_bos), chat=_chat(chat_template))


def tiny_sentencepiece(
    kind: Literal["bpe", "unigram"] = "bpe", *, chat_template: str | None = CHATML, add_bos: bool = True
) -> FastTokenizer:
    """SentencePiece vocabulary: `<unk> <s> </s> <|im_start|> <|im_end|>`, 256 byte pieces, then words.

    Characters that have no piece are written in bytes. A blank is put in front of every text.
    """
    words = _PIECES.split("|")
    pieces = ["<unk>", *CONTROL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    special, plain = len(CONTROL_TOKENS) + 1, len(words)
    model = SentencePieceModel(
        pieces=pieces,
        scores=[0.0] * (special + 256) + [-1.0 - number for number in range(plain)],
        types=[UNKNOWN, *[CONTROL] * len(CONTROL_TOKENS), *[BYTE] * 256, *[NORMAL] * plain],
        unigram=kind == "unigram",
        bos_id=1,
        eos_id=2,
    )
    special = SpecialTokens(names=_NAMES | {"unk_token": "<unk>"}, add_bos=add_bos)
    return FastTokenizer(build(model), special, chat=_chat(chat_template))


# Frequent first. Single characters last, as a trainer leaves them.
_PIECES = (
    "▁t|he|▁a|in|▁the|er|on|▁s|re|▁c|at|an|▁w|nd|▁of|▁and|en|▁m|or|it|is|▁to|ing|▁cat|▁p|▁b|le|es|▁in|ou|▁lead|"
    "▁x|ll|▁leading|你好|世界|"
    "▁|e|t|a|o|n|i|s|r|h|l|d|c|u|m|f|p|g|w|y|b|v|k|x|j|q|z|.|,|!|?|-|'|T|H|S|A|I|0|1|2|3|4|5|6|7|8|9|é|ï|你|好|世|界"
)


def _chat(chat_template: str | None) -> ChatFormat | None:
    return ChatFormat({"default": chat_template}, tokens=_NAMES) if chat_template else None

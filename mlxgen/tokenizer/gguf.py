"""Tokenizers from the metadata of a GGUF file: the keys `tokenizer.ggml.*`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxgen.errors import TokenizerError
from mlxgen.tokenizer.fast import SpecialTokens
from mlxgen.tokenizer.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    build,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_KEY = "tokenizer.ggml."
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "eot": "eot_token",
    "eom": "eom_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # spelled so in the format
    "mask": "mask_token",
}
ENDS = {"eos", "eot", "eom"}
# What files of these kinds mean when they do not name a token.
_LLAMA_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}

log = logging.getLogger("mlxgen.tokenizer")


def read_gguf(metadata: Mapping[str, Any]) -> tuple[Backend, SpecialTokens, dict[str, str]]:
    """(tokenizer, the tokens the file names, its chat templates by name).

    Raises TokenizerError for a kind of vocabulary that is not supported, or lists that do not fit together.
    """
    kind = metadata.get(_KEY + "model")
    tokens = _tokens(metadata)
    types = _list(metadata, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    named = _named(metadata, kind, len(tokens))
    for role in ENDS & set(named):  # some conversions forget to say so
        if types[named[role]] == NORMAL:
            types[named[role]] = CONTROL
    if kind == "gpt2":
        backend = _byte_level_bpe(metadata, tokens, types)
    elif kind in ("llama", "t5"):
        backend = build(_sentencepiece(metadata, tokens, types, named, unigram=kind == "t5"))
    elif kind == "gemma4":
        backend = _merged_bpe(metadata, tokens, types, named)
    else:
        raise TokenizerError(
            f"`{_KEY}model` must be one of gpt2, llama, gemma4 or t5, but is {kind!r}. "
            "Set `tokenizer=none` to work with token ids."
        )
    add_bos = bool(metadata.get(_KEY + "add_bos_token", _adds_bos(metadata, kind))) and "bos" in named
    add_eos = bool(metadata.get(_KEY + "add_eos_token", False)) and "eos" in named
    surround(backend, named["bos"] if add_bos else None, named["eos"] if add_eos else None)
    names = {_NAMES[key]: tokens[number] for key, number in named.items()}
    return backend, SpecialTokens(names=names, add_bos=add_bos, add_eos=add_eos), _templates(metadata)


def surround(backend: Backend, bos: int | None, eos: int | None) -> None:
    """Have the tokenizer put BOS before and EOS after a text, so that tokenizer.json says it too."""
    from tokenizers import processors

    around = [("BOS", bos), ("EOS", eos)]
    special = [
        {"id": name, "ids": [number], "tokens": [backend.id_to_token(number)]}
        for name, number in around
        if number is not None
    ]
    if special:
        single = [*(["BOS"] if bos is not None else []), "$A", *(["EOS"] if eos is not None else [])]
        pair = [*single, "$B:1"]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=special
        )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _list(metadata, "tokens")
    if not tokens:
        raise TokenizerError(
            f"`{_KEY}tokens` must be the vocabulary, but is missing: this file has no tokenizer. "
            "Set `tokenizer=none` to work with token ids."
        )
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]


def _list(metadata: Mapping[str, Any], key: str, length: int | None = None) -> list[Any]:
    value = metadata.get(_KEY + key)
    if value is None:
        return []
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    if length is not None and len(items) != length:
        raise TokenizerError(
            f"`{_KEY}{key}` must have {length} entries like the tokens, but has {len(items)}."
        )
    return items


def _named(metadata: Mapping[str, Any], kind: Any, size: int) -> dict[str, int]:
    """Ids of the tokens that have a role. Ids outside the vocabulary are not in use."""
    found = dict(_LLAMA_DEFAULTS) if kind == "llama" else {}
    for key in _NAMES:
        number = metadata.get(f"{_KEY}{key}_token_id")
        if number is not None:
            found[key] = int(number)
    return {key: number for key, number in found.items() if 0 <= number < size}


def _adds_bos(metadata: Mapping[str, Any], kind: Any) -> bool:
    from mlxgen.tokenizer.pretokenizers import ADD_BOS

    return kind in ("llama", "gemma4") or metadata.get(_KEY + "pre") in ADD_BOS


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(prefix + ".")}
    default = metadata.get(prefix)
    return ({"default": default} if default else {}) | named


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`left right`; the blank that parts them is the first one that is not the left piece itself."""
    merges = []
    for line in _list(metadata, "merges"):
        cut = line.find(" ", 1)
        merges.append((line[:cut], line[cut + 1 :]))
    if not merges:
        raise TokenizerError(f"`{_KEY}merges` must list the merges of this vocabulary, but is missing.")
    return merges


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers import models

    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"`{_KEY}merges` must fit the tokens, but: {error}") from None


def _added(backend: Backend, tokens: Sequence[str], types: Sequence[int], *, user_defined: bool) -> None:
    from tokenizers import AddedToken

    pairs = list(zip(tokens, types, strict=True))
    control = [token for token, kind in pairs if kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    if user_defined:
        own = [token for token, kind in pairs if kind == USER_DEFINED]
        backend.add_tokens([AddedToken(token, normalized=False) for token in own])


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Backend:
    from tokenizers import Tokenizer, decoders

    from mlxgen.tokenizer.pretokenizers import EXPRESSIONS, IGNORE_MERGES, byte_level

    pre = metadata.get(_KEY + "pre", "default")
    if pre not in EXPRESSIONS:
        log.warning("`%spre` is %r, which is not known: text is cut by the default rules.", _KEY, pre)
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    backend = Tokenizer(_bpe(vocabulary, _merges(metadata), ignore_merges=pre in IGNORE_MERGES))
    backend.pre_tokenizer = byte_level(pre)
    backend.decoder = decoders.ByteLevel()
    _added(backend, tokens, types, user_defined=True)
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    named: Mapping[str, int],
    *,
    unigram: bool,
) -> SentencePieceModel:
    scores = _list(metadata, "scores", len(tokens))
    if not scores:
        raise TokenizerError(f"`{_KEY}scores` must have a score for each token, but is missing.")
    return SentencePieceModel(
        pieces=_escaped(tokens, types),
        scores=scores,
        types=types,
        unigram=unigram,
        unk_id=named.get("unknown", -1),
        add_dummy_prefix=bool(metadata.get(_KEY + "add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get(_KEY + "remove_extra_whitespaces", False)),
        charsmap=bytes(value & 0xFF for value in _list(metadata, "precompiled_charsmap")),
    )


def _escaped(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """GGUF writes the blanks of user-defined pieces as they are; the model sees them escaped."""
    pairs = zip(tokens, types, strict=True)
    return [token.replace(" ", "▁") if kind == USER_DEFINED else token for token, kind in pairs]


def _merged_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: Mapping[str, int]
) -> Backend:
    """BPE over characters with SentencePiece's blanks and byte pieces, but with merges of its own."""
    from tokenizers import Tokenizer, decoders, normalizers

    tokens = _escaped(tokens, types)
    model = _bpe(
        dict(zip(tokens, range(len(tokens)), strict=True)),
        _merges(metadata),
        unk_token=tokens[named["unknown"]] if "unknown" in named else None,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    _added(backend, tokens, types, user_defined=True)
    return backend

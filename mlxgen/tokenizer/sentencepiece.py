"""SentencePiece vocabularies, from their protobuf file or from GGUF scores, as a `tokenizers.Tokenizer`.

Kudo and Richardson, arXiv:1808.06226. The file is a protobuf message (sentencepiece_model.proto); the few
fields that matter are read here. Its BPE joins, again and again, the neighbours whose union has the best
score, leftmost first; as merges that is: every split of every piece into two pieces, best score first.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # as in the .proto, and in GGUF
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """Pieces with their scores and types by id, and what happens to text before the model sees it."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    prefix_once: bool = False  # no dummy prefix after a control token ("legacy": false)


def read_model(path: Path) -> SentencePieceModel:
    """A `tokenizer.model` file. Raises TokenizerError if it is not one."""
    try:
        return _parse(path.read_bytes())
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise TokenizerError(
            f"`{path}` must be a SentencePiece model, but cannot be read as one ({error}). "
            "Incomplete download? A tiktoken file of that name needs its tokenizer.json."
        ) from None


def _parse(data: bytes) -> SentencePieceModel:
    pieces, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append(piece[1].decode() if 1 in piece else "")
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            types.append(piece.get(3, NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if not pieces or kind not in (_UNIGRAM, _BPE) or trainer.get(24):
        raise ValueError(f"{len(pieces)} pieces, model type {kind}; only BPE and Unigram are supported")
    return SentencePieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        unigram=kind == _UNIGRAM,
        unk_id=_signed(trainer.get(40, 0)),
        bos_id=_signed(trainer.get(41, 1)),
        eos_id=_signed(trainer.get(42, 2)),
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
        charsmap=bytes(normalizer.get(2, b"")),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of one protobuf message: int for a varint, bytes for anything else."""
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if position + size > end:
            raise ValueError("truncated")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def build(model: SentencePieceModel) -> Backend:
    """The tokenizer: normalizer, pre-tokenizer, model and decoder, control tokens registered."""
    from tokenizers import AddedToken, Tokenizer, decoders

    backend = Tokenizer(_unigram(model) if model.unigram else _bpe(model))
    backend.normalizer, backend.pre_tokenizer = _text_steps(model)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    control = [p for p, kind in zip(model.pieces, model.types, strict=True) if kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    return backend


def _unigram(model: SentencePieceModel) -> Any:
    from tokenizers import models

    unk = model.unk_id if 0 <= model.unk_id < len(model.pieces) else None
    return models.Unigram(list(zip(model.pieces, model.scores, strict=True)), unk, BYTE in model.types)


def _bpe(model: SentencePieceModel) -> Any:
    from tokenizers import models

    normal = {p for p, kind in zip(model.pieces, model.types, strict=True) if kind == NORMAL}
    by_score = sorted(range(len(model.pieces)), key=model.scores.__getitem__, reverse=True)
    merges = [
        (left, right)
        for piece in (model.pieces[i] for i in by_score)
        if piece in normal
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in normal and (right := piece[cut:]) in normal
    ]
    return models.BPE(
        dict(zip(model.pieces, range(len(model.pieces)), strict=True)),
        merges,
        unk_token=model.pieces[model.unk_id] if 0 <= model.unk_id < len(model.pieces) else None,
        fuse_unk=True,
        byte_fallback=BYTE in model.types,
        # A user-defined piece is one token because it stands alone, not because merges lead to it.
        ignore_merges=USER_DEFINED in model.types,
    )


def _text_steps(model: SentencePieceModel) -> tuple[Any, Any]:
    """Normalizer and pre-tokenizer. The text is not split into words: pieces say where words begin."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    normal: list[Any] = []
    splits: list[Any] = []
    if model.charsmap:
        normal.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        normal.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        normal.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.add_dummy_prefix and model.prefix_once:
        splits.append(pre_tokenizers.Metaspace(_SPACE, "first", split=False))
    elif model.add_dummy_prefix:
        normal.append(normalizers.Prepend(_SPACE))
    normal.append(normalizers.Replace(" ", _SPACE))
    own = [p for p, kind in zip(model.pieces, model.types, strict=True) if kind == USER_DEFINED]
    if own:
        longest_first = sorted(own, key=len, reverse=True)
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
    if BYTE in model.types and (model.unigram or own):
        # "<0x0A>" as text is six characters, not the byte piece of that name.
        splits.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-Fa-f]{2}>)"), "isolated"))
    return normalizers.Sequence(normal), pre_tokenizers.Sequence(splits) if splits else None

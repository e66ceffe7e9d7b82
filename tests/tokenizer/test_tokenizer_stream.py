"""Streaming text: the pieces joined are the decoded text, always."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxgen.errors import RequestError
from mlxgen.testing.tokenizers import tiny_bpe, tiny_sentencepiece
from mlxgen.tokenizer import ByteTokenizer, FastTokenizer

BPE, BYTES = tiny_bpe(), ByteTokenizer()
SPM, UNIGRAM = tiny_sentencepiece("bpe"), tiny_sentencepiece("unigram")
ALL = [BPE, SPM, UNIGRAM, BYTES]
BY_BYTE = {"bytes": BYTES, "bpe": BPE, "sentencepiece": SPM}

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
AWKWARD = [*"ab é你🙂▁Ġ \n\t", "\u0301", "\u200d", "🏳️‍🌈", " the", "<s>", "\ufffd"]
awkward = st.lists(st.sampled_from(AWKWARD), max_size=12)
texts = st.one_of(text, awkward.map("".join))


def pieces(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [*(stream.push(i) for i in ids), stream.finish()]


def byte_ids(tokenizer, data):
    """Each byte as a token of its own."""
    if tokenizer is SPM:
        return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [byte + (4 if tokenizer is BPE else 0) for byte in data]


@settings(max_examples=80, deadline=None)
@given(texts)
def test_every_text_comes_back(text):
    for tokenizer in ALL:
        ids = tokenizer.encode(text, add_special=False)
        # SentencePiece writes a blank as ▁, so it cannot tell the two apart.
        expected = text.replace("▁", " ") if tokenizer in (SPM, UNIGRAM) else text
        assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == expected


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 340), max_size=40), st.booleans(), st.booleans())
def test_the_stream_equals_the_decode_for_any_ids(ids, skip_special, continues):
    options = {"skip_special": skip_special, "continues": continues}
    for tokenizer in ALL:
        assert "".join(pieces(tokenizer, ids, **options)) == tokenizer.decode(ids, **options)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([i for i in range(351) if not 5 <= i < 261]), max_size=20))
def test_decode_equals_the_library_where_no_bytes_are_involved(ids):
    for tokenizer in (SPM, UNIGRAM):
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 297), max_size=30))
def test_byte_level_decode_equals_the_library(ids):
    assert BPE.decode(ids) == BPE.backend.decode(ids)


@settings(max_examples=80, deadline=None)
@given(texts)
def test_one_byte_per_token_never_shows_a_broken_character(text):
    for tokenizer in (BYTES, BPE, SPM):
        shown = pieces(tokenizer, byte_ids(tokenizer, text.encode()), continues=True)
        assert "".join(shown) == text
        assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in shown)


@pytest.mark.parametrize("tokenizer", BY_BYTE.values(), ids=BY_BYTE)
@pytest.mark.parametrize("text", ["ď", "你好世界", "🙂", "🏳️‍🌈", "e\u0301", "'\ufe0f", "🇨🇭"])
def test_characters_of_several_bytes_or_code_points(tokenizer, text):
    shown = pieces(tokenizer, byte_ids(tokenizer, text.encode()))
    assert [p for p in shown if p] == list(text)  # one piece per code point, none twice


def test_the_leading_space_of_a_completion_is_kept():
    ids = BPE.encode(" leading", add_special=False)
    assert BPE.decode(ids) == " leading"
    assert BPE.decode(BPE.encode("the cat") + ids) == "the cat leading"


def test_sentencepiece_strips_one_space_once():
    ids = [SPM.backend.token_to_id(piece) for piece in ("▁", "▁leading", "▁x")]
    assert pieces(SPM, ids) == ["", " leading", " x", ""]
    assert SPM.decode(ids) == " leading x"


def test_text_that_continues_a_prompt_keeps_its_space():
    ids = [SPM.backend.token_to_id("▁cat")]
    assert SPM.decode(ids) == "cat"
    assert SPM.decode(ids, continues=True) == "".join(pieces(SPM, ids, continues=True)) == " cat"


@pytest.mark.parametrize("tokenizer", BY_BYTE.values(), ids=BY_BYTE)
def test_an_unfinished_byte_before_a_word(tokenizer):
    cat = tokenizer.encode(" cat", add_special=False)
    cat = [SPM.backend.token_to_id("▁cat")] if tokenizer is SPM else cat
    ids = byte_ids(tokenizer, b"\xc3") + cat
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == "\ufffd cat"


@pytest.mark.parametrize("tokenizer", BY_BYTE.values(), ids=BY_BYTE)
def test_a_cut_in_mid_character_leaves_one_mark_at_the_end(tokenizer):
    shown = pieces(tokenizer, byte_ids(tokenizer, "ab🙂".encode()[:-1]))
    assert "".join(shown) == "ab\ufffd"
    assert shown[-1] == "\ufffd"


def test_byte_level_pieces_with_a_sentencepiece_decoder():
    backend = Tokenizer.from_str(BPE.backend.to_str())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    hybrid = FastTokenizer(backend)
    ids = hybrid.encode("Hello! How")
    assert hybrid.decode(ids) == "".join(pieces(hybrid, ids)) == "Hello! How"


def test_a_control_token_of_foreign_characters_is_silent():
    backend = Tokenizer.from_str(BPE.backend.to_str())
    backend.add_special_tokens([AddedToken("<｜end▁of▁sentence｜>", normalized=False)])
    tokenizer = FastTokenizer(backend)
    end = backend.token_to_id("<｜end▁of▁sentence｜>")
    ids = [*tokenizer.encode("White"), end]
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == "White"
    assert tokenizer.decode(ids, skip_special=False) == "White<｜end▁of▁sentence｜>"


def test_an_added_token_is_written_as_it_stands():
    backend = Tokenizer.from_str(BPE.backend.to_str())
    backend.add_tokens([AddedToken("<é>", normalized=False)])  # é is also the symbol of byte 0xE9
    tokenizer = FastTokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("x<é>y")) == "x<é>y"


@pytest.mark.parametrize("tokenizer", ALL)
def test_spaces_are_never_cleaned_up(tokenizer):
    ids = tokenizer.encode("x ,y ! don 't", add_special=False)
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == "x ,y ! don 't"


@pytest.mark.parametrize("tokenizer", BY_BYTE.values(), ids=BY_BYTE)
def test_text_without_spaces_flows(tokenizer):
    ids = byte_ids(tokenizer, ("你好世界" * 417).encode())[:5000]
    shown = [at for at, piece in enumerate(pieces(tokenizer, ids)) if piece]
    assert max(b - a for a, b in pairwise(shown)) <= 4


def test_the_time_of_a_stream_is_linear():
    def seconds(count):
        ids = byte_ids(BPE, ("你" * count).encode())[:count]
        stream = BPE.stream()
        start = time.process_time()
        for token in ids:
            stream.push(token)
        return time.process_time() - start

    # On a busy machine one measurement says little; quadratic time would give 4, every time.
    assert any(seconds(20_000) < 3 * seconds(10_000) for _ in range(6))


def test_rows_that_the_vocabulary_does_not_use_are_silent():
    for tokenizer in ALL:
        assert tokenizer.decode([10_000, *tokenizer.encode("a", add_special=False), 9999]) == "a"
        assert tokenizer.piece(10_000) == "<unused 10000>"


def test_a_negative_id_is_an_error():
    with pytest.raises(RequestError, match="-1"):
        BPE.decode([-1])


def test_pieces_for_display():
    assert [BPE.piece(i) for i in BPE.encode("the cat é")] == ["t", "he", " cat", " ", "<0xC3>", "<0xA9>"]
    assert [SPM.piece(i) for i in SPM.encode("the é🙂")[:3]] == ["<s>", " the", " "]
    assert SPM.piece(5 + 0xF0) == "<0xF0>" and SPM.piece(5 + ord("A")) == "A"
    assert BPE.piece(3) == "<|im_end|>"


WORDPIECE = models.WordPiece(
    {"[UNK]": 0, "un": 1, "##ending": 2, "text": 3, ",": 4, "é": 5}, unk_token="[UNK]"
)
SUFFIXED = models.BPE(
    {"h": 0, "i</w>": 1, "hi</w>": 2, "y": 3, "yo</w>": 4}, [("h", "i</w>")], end_of_word_suffix="</w>"
)


@pytest.mark.parametrize(
    ("model", "decoder", "ids", "expected"),
    [
        (WORDPIECE, decoders.WordPiece(cleanup=False), [1, 2, 3, 4, 5], "unending text , é"),
        (SUFFIXED, decoders.BPEDecoder(suffix="</w>"), [2, 4, 2], "hi yo hi"),
        (SUFFIXED, None, [0, 3], "h y"),
        (SUFFIXED, decoders.CTC(), [0, 3, 3], "hy"),
    ],
)
def test_decoders_that_look_at_neighbours(model, decoder, ids, expected):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = FastTokenizer(backend)
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == backend.decode(ids) == expected


@pytest.mark.parametrize(
    ("scheme", "expected"), [("always", "h  i"), ("first", "h  i"), ("never", " h  i")]
)
def test_the_older_sentencepiece_decoder(scheme, expected):
    backend = Tokenizer(models.BPE({"▁h": 0, "▁▁i": 1}, []))
    backend.decoder = decoders.Metaspace("▁", scheme)
    tokenizer = FastTokenizer(backend)
    assert (
        tokenizer.decode([0, 1]) == "".join(pieces(tokenizer, [0, 1])) == backend.decode([0, 1]) == expected
    )


def test_a_byte_level_piece_that_is_no_byte_symbols_is_text():
    backend = Tokenizer(models.BPE({"Ġa": 0, "你好": 1}, []))
    backend.decoder = decoders.ByteLevel()
    assert FastTokenizer(backend).decode([0, 1]) == backend.decode([0, 1]) == " a你好"

"""SentencePiece vocabularies: small models in fixtures/, and what their own library makes of texts."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from mlxgen.errors import TokenizerError
from mlxgen.tokenizer import load_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
CASES = json.loads((FIXTURES / "sentencepiece.json").read_text(encoding="utf-8"))["cases"]


def folder_with(tmp_path: Path, model: str, **config: object) -> Path:
    shutil.copy(FIXTURES / f"{model}.model", tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("model", CASES)
def test_ids_and_text_equal_the_sentencepiece_library(model, tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path, model))
    for text, ids, decoded in CASES[model]:
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == decoded, text


def test_bos_is_added_unless_the_configuration_says_otherwise(tmp_path):
    assert load_tokenizer(folder_with(tmp_path, "bpe")).encode("the")[0] == 1
    without = load_tokenizer(folder_with(tmp_path, "bpe", add_bos_token=False))
    assert without.encode("the") == without.encode("the", add_special=False)


def test_special_tokens_come_from_the_model(tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path, "bpe"))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {2}, 380)


def test_a_blank_follows_each_control_token_only_in_the_older_format(tmp_path):
    template = "<s>{{ messages[0]['content'] }}</s>{{ messages[0]['content'] }}"
    ids = {}
    for legacy in (True, False):
        folder = folder_with(tmp_path, "bpe", legacy=legacy, chat_template=template)
        tokenizer = load_tokenizer(folder)
        ids[legacy] = [tokenizer.piece(i) for i in tokenizer.encode_chat([{"role": "user", "content": "x"}])]
    assert ids[True] == ["<s>", " ", "x", "</s>", " ", "x"]
    assert ids[False] == ["<s>", "x", "</s>", "x"]


def test_tokens_added_after_the_model(tmp_path):
    end, tool = {"content": "<|im_end|>", "special": True}, {"content": "<tool>", "special": False}
    config = {"added_tokens_decoder": {"380": end, "381": tool}, "eos_token": "<|im_end|>"}
    tokenizer = load_tokenizer(folder_with(tmp_path, "bpe", **config))
    assert tokenizer.vocab_size == 382
    assert tokenizer.eos_ids == {380}
    assert 380 not in tokenizer.encode("<|im_end|>") and 381 in tokenizer.encode("<tool>")
    assert tokenizer.decode([380, 381]) == "<tool>"


def test_an_added_token_that_leaves_a_gap_is_an_error(tmp_path):
    added = {"400": {"content": "<|im_end|>", "special": True}}
    with pytest.raises(TokenizerError, match=r"added_tokens_decoder.400.*380"):
        load_tokenizer(folder_with(tmp_path, "bpe", added_tokens_decoder=added))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"IQ== 0\nIg== 1\n",  # a tiktoken file of the same name
        lambda data: b"",
        lambda data: data.replace(b"the", b"\xff\xfe\xfd"),
    ],
)
def test_a_damaged_model_is_an_error_that_names_the_file(damage, tmp_path):
    folder = folder_with(tmp_path, "bpe")
    data = damage((folder / "tokenizer.model").read_bytes())
    (folder / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def _field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


def test_defaults_of_the_format_hold_where_fields_are_absent(tmp_path):
    """By hand: a NORMAL piece does not write its type; a model without specs is Unigram, with a prefix."""
    pieces = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    pieces += [("▁a".encode(), -1.0, 1), (b"b", -2.0, 1)]
    data = b""
    for text, score, kind in pieces:
        body = _field(1, text) + b"\x15" + struct.pack("<f", score)
        data += _field(1, body + (bytes([0x18, kind]) if kind != 1 else b""))
    (tmp_path / "tokenizer.model").write_bytes(data)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [1, 3, 4]
    assert tokenizer.decode([3, 4, 3]) == "ab a"

"""Tokenizers from GGUF metadata."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlxgen.errors import TokenizerError
from mlxgen.testing.tokenizers import tiny_bpe
from mlxgen.tokenizer import NoTokenizer, from_gguf, load_tokenizer
from mlxgen.tokenizer.chat import CHATML
from mlxgen.tokenizer.pretokenizers import EXPRESSIONS, byte_level
from mlxgen.tokenizer.sentencepiece import read_model

FIXTURES = Path(__file__).parent / "fixtures"
CHAT = [{"role": "user", "content": "the cat <|im_end|> é🙂\n"}]
TEXTS = ["the cat and leading", " leading", "a  b ", "é🙂", "<s>", "12 345", "\n\n", "你好", "<table>  x", ""]


def ggml(**keys):
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def byte_level_metadata(**keys):
    model = json.loads(tiny_bpe().backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return ggml(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        token_type=[3] * 4 + [1] * (len(tokens) - 4),
        merges=[" ".join(pair) for pair in model["merges"]],
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=False,
    ) | {"tokenizer.chat_template": CHATML} | ggml(**keys)  # fmt: skip


def sentencepiece_metadata(name, **keys):
    model = read_model(FIXTURES / f"{name}.model")
    pairs = zip(model.pieces, model.types, strict=True)
    return ggml(
        model="t5" if model.unigram else "llama",
        tokens=[text.replace("▁", " ") if kind == 4 else text for text, kind in pairs],
        scores=np.array(model.scores, np.float32),
        token_type=np.array(model.types, np.int32),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_bos_token=True,
        add_space_prefix=model.add_dummy_prefix,
    ) | ggml(**keys)


def test_byte_level_equals_the_same_vocabulary_from_a_folder():
    tokenizer, other = from_gguf(byte_level_metadata()), tiny_bpe()
    for text in TEXTS:
        assert tokenizer.encode(text) == other.encode(text)
    assert tokenizer.encode_chat(CHAT) == other.encode_chat(CHAT)
    for name in ("vocab_size", "bos_id", "eos_ids", "prefix_ids"):
        assert getattr(tokenizer, name) == getattr(other, name)


@pytest.mark.parametrize("name", ["bpe", "bpe_user_defined", "bpe_no_prefix", "unigram"])
def test_sentencepiece_equals_its_own_file(name, tmp_path):
    shutil.copy(FIXTURES / f"{name}.model", tmp_path / "tokenizer.model")
    tokenizer, other = from_gguf(sentencepiece_metadata(name)), load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == other.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == other.decode(other.encode(text))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.prefix_ids) == (1, {2}, (1,))


def test_roles_that_a_llama_file_does_not_name():
    metadata = sentencepiece_metadata("bpe")
    for key in ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token"):
        del metadata[f"tokenizer.ggml.{key}"]
    tokenizer = from_gguf(metadata)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.prefix_ids) == (1, {2}, (1,))


def test_every_end_that_the_file_names():
    assert from_gguf(byte_level_metadata(eot_token_id=2, eom_token_id=3)).eos_ids == {1, 2, 3}
    plain = byte_level_metadata(eot_token_id=200, pad_token_id=5, padding_token_id=5)
    tokenizer = from_gguf(plain)
    assert 200 in tokenizer.eos_ids
    assert tokenizer.decode([200]) == ""  # an end is never shown, whatever its type says
    assert tokenizer.decode([5]) == "\x01"  # but padding that points at a letter stays a letter


def test_the_end_of_a_turn_that_only_the_template_knows():
    assert from_gguf(byte_level_metadata(eos_token_id=1)).eos_ids == {1, 3}


def test_roles_outside_the_vocabulary_are_not_in_use():
    tokenizer = from_gguf(byte_level_metadata(bos_token_id=999, add_bos_token=True))
    assert tokenizer.bos_id is None and tokenizer.encode("a") == [4 + ord("a")]


def test_bos_as_the_file_says_and_as_its_kind_does():
    without = byte_level_metadata()
    del without["tokenizer.ggml.add_bos_token"]
    assert from_gguf(byte_level_metadata(add_bos_token=True)).prefix_ids == (0,)
    assert from_gguf(without).prefix_ids == ()
    assert from_gguf(without | ggml(pre="llama-bpe")).prefix_ids == (0,)
    assert from_gguf(byte_level_metadata(add_eos_token=True)).suffix_ids == (1,)


def test_user_defined_tokens_are_tokens_and_are_shown():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("a<think>") == [4 + ord("a"), 298]
    assert tokenizer.decode([298]) == "<think>"


def test_merges_of_characters_with_byte_pieces():
    """The gemma4 kind: merges of its own, over characters, a blank written ▁."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<bos>", "<eos>", "<unk>", *bytes_, "▁", "a", "b", "▁a", "\n", "\n\n", "  "]
    metadata = ggml(
        model="gemma4",
        tokens=tokens,
        token_type=[3, 3, 2, *[6] * 256, *[1] * 6, 4],
        merges=["▁ a", "\n \n"],
        bos_token_id=0,
        eos_token_id=1,
        unknown_token_id=2,
    )
    tokenizer = from_gguf(metadata)
    expected = ["<bos>", "b", "▁a", "\n\n", "<0xC3>", "<0xA9>"]
    assert [tokens[i] for i in tokenizer.encode("b a\n\né")] == expected
    assert tokenizer.decode(tokenizer.encode("b a\n\né  a")) == "b a\n\né  a"


def test_named_templates():
    metadata = byte_level_metadata() | {"tokenizer.chat_template.tool_use": "tools"}
    tokenizer = from_gguf(metadata)
    assert tokenizer.render_chat(CHAT, tools=[{"a": 1}]) == "tools"
    assert tokenizer.render_chat(CHAT) == tiny_bpe().render_chat(CHAT)
    assert from_gguf(metadata, chat_template="{{ bos_token }}own").render_chat(CHAT) == "<s>own"
    bare = {key: value for key, value in metadata.items() if "chat_template" not in key}
    assert not from_gguf(bare).has_chat_template


def test_what_is_saved_reads_the_same(tmp_path):
    bpe = byte_level_metadata(add_bos_token=True, eot_token_id=2)
    for metadata in (bpe, sentencepiece_metadata("bpe_user_defined")):
        tokenizer = from_gguf(metadata)
        tokenizer.save(tmp_path)
        again = load_tokenizer(tmp_path)
        for text in TEXTS:
            assert again.encode(text) == tokenizer.encode(text)
        assert (again.eos_ids, again.prefix_ids) == (tokenizer.eos_ids, tokenizer.prefix_ids)


def test_an_unknown_way_of_cutting_is_noted_and_the_default_used(caplog):
    with caplog.at_level(logging.WARNING, "mlxgen.tokenizer"):
        tokenizer = from_gguf(byte_level_metadata(pre="something-new"))
    assert "something-new" in caplog.text
    assert tokenizer.encode("the cat") == from_gguf(byte_level_metadata(pre="default")).encode("the cat")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, r"`tokenizer\.ggml\.model` must be one of .*'rwkv'"),
        ({"model": None}, r"`tokenizer\.ggml\.model`"),
        ({"tokens": None}, r"`tokenizer\.ggml\.tokens`"),
        ({"merges": None}, r"`tokenizer\.ggml\.merges`"),
        ({"token_type": [1, 2]}, r"`tokenizer\.ggml\.token_type` must have 298 entries .* has 2"),
        ({"model": "llama"}, r"`tokenizer\.ggml\.scores`"),
        ({"merges": ["a zz"]}, r"`tokenizer\.ggml\.merges` must"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(change, message):
    with pytest.raises(TokenizerError, match=message):
        from_gguf(byte_level_metadata(**change))


def test_a_file_without_text():
    metadata = ggml(model="none") | {"general.architecture": "llama", "llama.vocab_size": 99}
    tokenizer = from_gguf(metadata)
    assert isinstance(tokenizer, NoTokenizer) and tokenizer.vocab_size == 99


# How text is cut, computed with the `regex` library from the expressions in the models' tokenizer.json.
SAMPLE = "I'm HelloWorld, 12345 don'T\n\n  x=你好カナ!\r\n\té "
CUTS = {
    "default": "I|'|m| HelloWorld|,| |123|45| don|'|T|\n\n | x|=|你好カナ|!|\r\n|\t|é| ",
    "gpt-2": "I|'m| HelloWorld|,| 12345| don|'|T|\n\n | x|=|你好カナ|!|\r\n|\t|é| ",
    "smollm": "I|'m| HelloWorld|,| |1|2|3|4|5| don|'|T|\n\n | x|=|你好カナ|!|\r\n|\t|é| ",
    "llama-bpe": "I|'m| HelloWorld|,| |123|45| don|'T|\n\n| | x|=你好カナ|!\r\n|\té| ",
    "qwen2": "I|'m| HelloWorld|,| |1|2|3|4|5| don|'T|\n\n| | x|=你好カナ|!\r\n|\té| ",
    "tekken": "I|'m| Hello|World|,| |1|2|3|4|5| don|'T|\n\n| | x|=你好カナ|!\r\n|\té| ",
    "gpt-4o": "I'm| Hello|World|,| |123|45| don'T|\n\n| | x|=你好カナ|!\r\n|\té| ",
    "deepseek-llm": "I|'|m| HelloWorld|,| |12345| don|'|T|\n|\n| | x|=|你好カナ|!|\r|\n|\té| ",
    "deepseek-v3": "I|'m| HelloWorld|,| |123|45| don|'T|\n\n| | x|=|你好カナ|!\r\n|\té| ",
    "deepseek-coder": "I|'|m| HelloWorld|,| |1|2|3|4|5| don|'|T|\n|\n| | x|=|你好カナ|!|\r|\n|\té| ",
    "falcon": "I|'|m| HelloWorld|,| |123|45| don|'|T|\n\n | x|=|你好カナ|!|\r\n|\t|é| ",
    "kimi-k2": "I'm| Hello|World|,| |123|45| don'T|\n\n| | x|=|你好|カナ|!\r\n|\té| ",
    "bloom": "I'm| HelloWorld|,| 12345| don'T|\n\n | x=你好カナ|!\r\n\t|é| ",
    "tiny_aya": "I'm| Hello|World|,| |12|345| don'T|\n\n| | x|=你好カナ|!\r\n|\té| ",
}


@pytest.mark.parametrize("pre", CUTS)
def test_cuts(pre):
    cut = byte_level(pre).pre_tokenize_str(SAMPLE)
    assert "|".join(SAMPLE[start:end] for _, (start, end) in cut) == CUTS[pre]


def test_every_expression_compiles_and_loses_nothing():
    for pre in EXPRESSIONS:
        cut = byte_level(pre).pre_tokenize_str(SAMPLE)
        assert "".join(SAMPLE[start:end] for _, (start, end) in cut) == SAMPLE, pre

"""Tokenizer files of a checkpoint folder: reading, writing, and what is said of broken ones."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from mlxgen.errors import TokenizerError
from mlxgen.testing.tokenizers import tiny_bpe, tiny_sentencepiece
from mlxgen.tokenizer import ByteTokenizer, FastTokenizer, load_tokenizer
from mlxgen.tokenizer.chat import CHATML, ChatFormat
from mlxgen.tokenizer.fast import SpecialTokens

FIXTURES = Path(__file__).parent / "fixtures"
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "the cat <|im_end|> é🙂\n"}]


@pytest.fixture
def folder(tmp_path):
    """A folder as the hub has it: tokenizer.json and tokenizer_config.json."""
    tiny_bpe(chat_template=None).save(tmp_path)
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


# -- round trips


@pytest.mark.parametrize(
    "tokenizer",
    [
        tiny_bpe(add_bos=True),
        tiny_bpe(chat_template=None),
        tiny_sentencepiece("bpe"),
        tiny_sentencepiece("unigram"),
        ByteTokenizer(),
    ],
)
def test_what_is_saved_reads_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    for name in ("vocab_size", "bos_id", "eos_ids", "prefix_ids", "suffix_ids"):
        assert getattr(again, name) == getattr(tokenizer, name)
    for text in ("the cat", " leading", "é🙂 <s>", ""):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert again.has_chat_template == tokenizer.has_chat_template
    if again.has_chat_template:
        assert again.render_chat(CHAT) == tokenizer.render_chat(CHAT)
        assert again.encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


def test_a_stand_alone_template_survives_saving(folder, tmp_path_factory):
    template = "{# crlf #}\r\n{{ messages[0].content }}|{{ bos_token }}\n\n"
    (folder / "chat_template.jinja").write_bytes(template.encode())
    source = load_tokenizer(folder)
    copy = tmp_path_factory.mktemp("copy")
    source.save(copy)
    assert (copy / "chat_template.jinja").read_bytes() == template.encode()
    assert load_tokenizer(copy).render_chat(CHAT) == source.render_chat(CHAT)


def test_further_keys_and_named_templates_survive_saving(folder, tmp_path_factory):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config = {"model_max_length": 2048, "chat_template": named, "bos_token": "<s>", "tokenizer_class": "Own"}
    write(folder, "tokenizer_config.json", config)
    copy = tmp_path_factory.mktemp("copy")
    load_tokenizer(folder).save(copy)
    saved = json.loads((copy / "tokenizer_config.json").read_text())
    assert (saved["model_max_length"], saved["tokenizer_class"]) == (2048, "Own")
    assert "chat_template" not in saved
    again = load_tokenizer(copy)
    assert again.render_chat(CHAT) == "plain" and again.render_chat(CHAT, tools=[{"a": 1}]) == "tools"


def test_saving_twice_writes_the_same_bytes(folder, tmp_path_factory):
    copies = [tmp_path_factory.mktemp("copy") for _ in range(2)]
    load_tokenizer(folder, chat_template="chatml").save(copies[0])
    load_tokenizer(copies[0]).save(copies[1])
    for path in copies[0].iterdir():
        assert path.read_bytes() == (copies[1] / path.name).read_bytes()


# -- what the configuration says


def test_tokens_are_named_by_text_or_by_object(folder):
    bos = {"content": "<s>", "lstrip": False}
    write(folder, "tokenizer_config.json", {"bos_token": bos, "eos_token": "</s>"})
    tokenizer = load_tokenizer(folder, chat_template="{{ bos_token }}{{ eos_token }}")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1})
    assert tokenizer.encode_chat(CHAT) == [0, 1]


def test_the_older_file_names_what_the_newer_does_not(folder):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    write(folder, "special_tokens_map.json", {"bos_token": "</s>", "eos_token": {"content": "<|im_end|>"}})
    assert (load_tokenizer(folder).bos_id, load_tokenizer(folder).eos_ids) == (0, {3})


@pytest.mark.parametrize(("flag", "expected"), [(True, (0,)), (False, ()), (None, (0,))])
def test_the_configuration_wins_over_the_post_processor(folder, flag, expected):
    backend = tiny_bpe().backend
    around = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": flag})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.prefix_ids == expected
    assert tokenizer.suffix_ids == (1,)
    # neither cut nor padded, and no end
    assert tokenizer.encode("x" * 30) == [*expected, *[4 + ord("x")] * 30]


def test_end_of_document_can_be_switched(folder):
    write(folder, "tokenizer_config.json", {"eos_token": "</s>", "add_eos_token": True})
    assert load_tokenizer(folder).suffix_ids == (1,)


def test_a_named_token_is_a_control_token_even_in_an_ordinary_vocabulary(folder):
    write(folder, "tokenizer_config.json", {"eos_token": " cat", "additional_special_tokens": ["Ġthe"]})
    tokenizer = load_tokenizer(folder)
    cat, the = (tiny_bpe().backend.token_to_id(piece) for piece in ("Ġcat", "Ġthe"))
    assert tokenizer.eos_ids == frozenset()  # there is no such piece; nothing is invented
    assert tokenizer.decode([the, cat]) == " cat"


def test_an_end_that_the_vocabulary_calls_ordinary_is_a_control_token(folder):
    backend = tiny_bpe().backend
    backend.add_tokens([AddedToken("<end>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"eos_token": "<end>", "pad_token": "a"})
    tokenizer = load_tokenizer(folder, chat_template="{{ messages[0].content }}<end>")
    assert tokenizer.eos_ids == {298}
    assert tokenizer.decode([4 + ord("a"), 298]) == "a"  # padding that is a letter stays one
    assert 298 not in tokenizer.encode("<end>")
    assert tokenizer.encode_chat([{"role": "user", "content": "<end>"}]).count(298) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": "config"}, "config"),
        ({"processor": "processor"}, "processor"),
        ({"config": "config", "processor": "processor"}, "config"),
        ({"config": "config", "file": "file"}, "file"),
        ({"config": None, "file": "file"}, "file"),
        ({"config": [{"name": "default", "template": "named"}]}, "named"),
        ({"config": [{"name": "rag", "template": "only"}]}, "only"),
    ],
)
def test_where_templates_are_found(folder, files, expected):
    names = {"config": "tokenizer_config.json", "processor": "chat_template.json"}
    for kind, template in files.items():
        if kind == "file":
            write(folder, "chat_template.jinja", template)
        else:
            write(folder, names[kind], {"chat_template": template})
    assert load_tokenizer(folder).render_chat(CHAT) == expected


# -- other vocabularies


def test_vocab_and_merges(tmp_path):
    source = tiny_bpe()
    state = json.loads(source.backend.to_str())["model"]
    write(tmp_path, "vocab.json", state["vocab"])
    write(tmp_path, "merges.txt", "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["merges"]))
    control = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    added = {str(i): {"content": text, "special": True} for i, text in enumerate(control)}
    write(tmp_path, "tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": added})
    tokenizer = load_tokenizer(tmp_path, chat_template=CHATML)
    for text in ("the cat and leading", "don't 123", "é🙂<s>", "  x\n\n"):
        assert tokenizer.encode(text) == source.encode(text)
    assert tokenizer.encode_chat(CHAT) == source.encode_chat(CHAT)


def test_vocab_and_merges_of_qwen_cut_numbers_into_digits(tmp_path):
    for name, expected in {"GPT2Tokenizer": [2], "Qwen2Tokenizer": [0, 1]}.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder, "vocab.json", {"1": 0, "2": 1, "12": 2})
        write(folder, "merges.txt", "1 2")
        write(folder, "tokenizer_config.json", {"tokenizer_class": name})
        assert load_tokenizer(folder).encode("12") == expected


def test_older_added_tokens(tmp_path):
    write(tmp_path, "vocab.json", {"a": 0})
    write(tmp_path, "merges.txt", "")
    write(tmp_path, "added_tokens.json", {"<tool>": 1})
    assert load_tokenizer(tmp_path).encode("a<tool>") == [0, 1]


# -- what is wrong


def test_no_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json, tokenizer\.model, vocab\.json with merges"):
        load_tokenizer(tmp_path)
    write(tmp_path, "vocab.json", {})  # half of a pair
    with pytest.raises(TokenizerError, match="must hold a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "damage", [lambda text: text[: len(text) // 2], lambda text: "not JSON", lambda text: "[1]"]
)
def test_a_broken_file_is_named(folder, name, damage):
    write(folder, "special_tokens_map.json", {"bos_token": "<s>"})
    write(folder, name, damage((folder / name).read_text(encoding="utf-8")))
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_template_file_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja.*UTF-8"):
        load_tokenizer(folder)


def test_vocab_and_merges_that_do_not_fit(tmp_path):
    write(tmp_path, "vocab.json", {"a": 0})
    write(tmp_path, "merges.txt", "a b")
    with pytest.raises(TokenizerError, match=r"vocab\.json must fit merges\.txt"):
        load_tokenizer(tmp_path)


# -- the vocabulary's size


def test_vocab_size_is_the_highest_id_and_one():
    assert tiny_bpe().vocab_size == 298
    backend = Tokenizer(models.BPE({"a": 0, "b": 7}, []))
    assert FastTokenizer(backend).vocab_size == 8
    backend.add_tokens([AddedToken("<x>")])
    assert FastTokenizer(backend).vocab_size == max(8, backend.token_to_id("<x>") + 1)


def test_surroundings_of_a_vocabulary_without_letters():
    backend = Tokenizer(models.BPE({"<s>": 0, "é": 1}, []))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert FastTokenizer(backend, SpecialTokens(names={"bos_token": "<s>"})).encode("é") == [0, 1]


def test_harmony_messages_end_inside_a_turn():
    """`<|end|>` ends a message of the analysis channel there, and the whole answer in other vocabularies."""
    ends = {}
    for more in ([], ["<|return|>"]):
        backend = Tokenizer.from_str(tiny_bpe().backend.to_str())
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in ["<|end|>", *more]])
        chat = ChatFormat({"default": "{{ messages[0].content }}<|end|>"}, tokens={})
        ends[len(more)] = FastTokenizer(backend, chat=chat).eos_ids
    assert ends == {0: {298}, 1: frozenset()}


def test_a_sentencepiece_folder_saves_a_tokenizer_json(tmp_path):
    shutil.copy(FIXTURES / "bpe_user_defined.model", tmp_path / "tokenizer.model")
    source = load_tokenizer(tmp_path)
    source.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    text = "the  <table> cat\n[X]<s>"
    assert copy.encode(text) == source.encode(text)
    assert copy.prefix_ids == source.prefix_ids == (1,)

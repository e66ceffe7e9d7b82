"""Control tokens that a user writes are text; those of the template and of the tokenizer are not."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from mlxgen.errors import RequestError
from mlxgen.testing.tokenizers import tiny_bpe, tiny_sentencepiece
from mlxgen.tokenizer import ByteTokenizer, FastTokenizer, load_tokenizer
from mlxgen.tokenizer.chat import ChatFormat

FIXTURES = Path(__file__).parent / "fixtures"
# Strings of the user stand next to each other and next to the template's own text.
TIGHT = (
    "<s>{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.name }}{{ m.content }}<|im_end|>"
    "{% endfor %}{{ tools | tojson if tools }}"
)


def stripping() -> FastTokenizer:
    """A control token that swallows blanks on both sides, and one that must be a word of its own."""
    backend = Tokenizer.from_str(tiny_bpe().backend.to_str())
    backend.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    backend.add_special_tokens([AddedToken("mask", single_word=True)])
    return FastTokenizer(backend, chat=ChatFormat({"default": TIGHT + " <|end|> mask"}, tokens={}))


def prefix_once() -> FastTokenizer:
    backend = Tokenizer.from_str(tiny_sentencepiece(chat_template=None).backend.to_str())
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    return FastTokenizer(backend, chat=ChatFormat({"default": TIGHT}, tokens={}))


def user_defined(tmp_path_factory) -> FastTokenizer:
    folder = tmp_path_factory.mktemp("user_defined")
    shutil.copy(FIXTURES / "bpe_user_defined.model", folder / "tokenizer.model")
    return load_tokenizer(folder, chat_template=TIGHT)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return [
        tiny_bpe(chat_template=TIGHT),
        tiny_sentencepiece("bpe", chat_template=TIGHT),
        tiny_sentencepiece("unigram", chat_template=TIGHT),
        ByteTokenizer(chat_template=TIGHT),
        stripping(),
        prefix_once(),
        user_defined(tmp_path_factory),
    ]


def control_ids(tokenizer, ids):
    added = tokenizer.backend.get_added_tokens_decoder()
    return [added[i].content for i in ids if i in added and added[i].special]


def letters(text):
    """Without blanks, some of which control tokens swallow and SentencePiece adds."""
    return "".join(text.replace("▁", " ").split())


def chat(tokenizer, name, content, **options):
    return tokenizer.encode_chat([{"role": "user", "name": name, "content": content}], **options)


OWN = ["<s>", "<|im_start|>", "<|im_end|>"]
SHARDS = ["<", "<|", "|>", ">", "im_end", "im_", "end|>", "s", "</", "<|im_start|>", "<|im_end|>", "<s>"]
SHARDS += ["</s>", "<unk>", "mask", " mask ", " ", "  ", "the cat", "é", "🙂", "<|end|>", "<0x0A>", "<table>"]
SHARDS += ["\n", "▁"]
shards = st.lists(st.sampled_from(SHARDS), max_size=8).map("".join)


@settings(max_examples=80, deadline=None)
@given(shards, shards)
def test_no_combination_of_user_strings_makes_a_control_token(tokenizers, name, content):
    for tokenizer in tokenizers:
        ids = chat(tokenizer, name, content)
        own = [t for t in control_ids(tokenizer, ids) if t not in ("<|end|>", "mask")]
        assert own == OWN
        rendered = tokenizer.render_chat([{"role": "user", "name": name, "content": content}])
        assert letters(tokenizer.decode(ids, skip_special=False)) == letters(rendered)


@settings(max_examples=80, deadline=None)
@given(shards, shards)
def test_the_raw_prompt_has_no_control_token_but_bos(tokenizers, first, second):
    text = first + second
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text)[len(tokenizer.prefix_ids) :]
        assert control_ids(tokenizer, ids) == []
        assert letters(tokenizer.decode(ids, skip_special=False)) == letters(text)


WORDS = ["<", "<|", "|>", ">", " ", "  ", "the", " cat", "é", "🙂", "\n", "im_", "12", "[", "<0x0A>"]
plain_words = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)


@settings(max_examples=100, deadline=None)
@given(plain_words, plain_words)
def test_ordinary_text_is_encoded_as_the_library_does(tokenizers, name, content):
    """Shards of control tokens at the ends of strings take the guarded path; the ids must not show it."""
    message = {"role": "user", "name": name, "content": content}
    for tokenizer in tokenizers:
        rendered = tokenizer.render_chat([message])
        direct = tokenizer.backend.encode(rendered, add_special_tokens=False).ids
        assert len(control_ids(tokenizer, direct)) in (len(OWN), len(OWN) + 2)  # the strings make no other
        assert tokenizer.encode_chat([message]) == direct
        raw = tokenizer.backend.encode(name + content, add_special_tokens=False).ids
        assert tokenizer.encode(name + content, add_special=False) == raw


def test_a_split_control_token_in_neighbouring_strings(tokenizers):
    for tokenizer in tokenizers:
        own = [t for t in control_ids(tokenizer, chat(tokenizer, "<|im_", "end|>")) if t in OWN]
        assert own == OWN


def test_parts_of_a_message_do_not_join_into_a_control_token():
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    tokenizer = tiny_bpe()
    ids = tokenizer.encode_chat([{"role": "user", "content": parts}])
    assert ids.count(3) == 1


def test_roles_tools_and_arguments_are_guarded_too():
    tokenizer = tiny_bpe(chat_template=TIGHT + "{{ flag }}{{ messages[0].extra | tojson }}")
    message = {"role": "user<|im_end|>", "name": "", "content": "x", "extra": {"<s>": ["</s>"]}}
    tools = [{"name": "<|im_start|>", "parameters": {"</s>": "<s>"}}]
    ids = tokenizer.encode_chat([message], tools=tools, flag="<|im_end|>")
    assert control_ids(tokenizer, ids) == OWN
    text = tokenizer.decode(ids, skip_special=False)
    assert json.dumps(tools) in text and '{"<s>": ["</s>"]}' in text and "user<|im_end|>" in text


def test_a_template_may_build_control_tokens_from_the_role():
    template = "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.content }}{% endfor %}"
    tokenizer = tiny_bpe(chat_template=template)
    roles = ["start", "end|><|im_start"]
    ids = tokenizer.encode_chat([{"role": role, "content": "a"} for role in roles])
    assert control_ids(tokenizer, ids) == ["<|im_start|>"]


def test_control_tokens_can_be_asked_for():
    tokenizer = tiny_bpe(add_bos=True)
    a = tokenizer.encode("a", add_special=False)
    assert tokenizer.encode("<|im_start|>a", parse_special=True) == [0, 2, *a]
    assert tokenizer.encode("<s>a", parse_special=True) == tokenizer.encode("a")


def test_tokens_that_are_not_control_tokens_stay_tokens():
    backend = Tokenizer.from_str(tiny_bpe().backend.to_str())
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = FastTokenizer(backend, chat=ChatFormat({"default": TIGHT}, tokens={}))
    think = backend.token_to_id("<think>")
    for content in ("<think>a", "<think><|im_end|>"):  # the second takes the guarded path
        assert chat(tokenizer, "", content).count(think) == 1
    assert tokenizer.encode("<think></s>").count(think) == 1


def test_added_tokens_outside_the_vocabulary_keep_their_ids_on_the_guarded_path():
    backend = Tokenizer.from_str(tiny_bpe().backend.to_str())
    backend.add_special_tokens([AddedToken("<a>"), AddedToken("<b>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = FastTokenizer(backend, chat=ChatFormat({"default": TIGHT + "<b>"}, tokens={}))
    ids = chat(tokenizer, "<a>", "<think>")
    assert ids[-1] == backend.token_to_id("<b>") and backend.token_to_id("<think>") in ids
    assert backend.token_to_id("<a>") not in ids


def test_lone_surrogates_are_an_error():
    tokenizer = tiny_bpe()
    with pytest.raises(RequestError, match="surrogate at character 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\udc00"}])

"""The tokenizers without a checkpoint, the tiny ones for tests, and what an import costs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen import protocols
from mlxgen.errors import TokenizerError
from mlxgen.testing.tokenizers import tiny_bpe, tiny_sentencepiece
from mlxgen.tokenizer import ByteStream, ByteTokenizer, FastTokenizer, NoTokenizer, open_tokenizer

HI = [{"role": "user", "content": "Hi"}]


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_their_own_ids(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == [256, *text.encode()]
    assert tokenizer.decode(list(text.encode())) == text


def test_the_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (260, 256, {257, 259})
    assert tokenizer.encode_chat(HI)[:6] == [258, *b"user\n"]
    assert tokenizer.encode_chat(HI)[-10:] == list(b"assistant\n")
    own = ByteTokenizer(chat_template="{{ flag }}{{ messages[0].content }}", template_args={"flag": 1})
    assert own.render_chat(HI) == "1Hi"


def test_no_tokenizer():
    tokenizer = NoTokenizer(100, bos_id=1, eos_ids=[2])
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (100, 1, {2})
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.encode_chat(HI)):
        with pytest.raises(TokenizerError, match="list of token ids"):
            call()
    assert tokenizer.decode([3, 4]) == "" and tokenizer.piece(7) == "<7>"
    stream = tokenizer.stream()
    assert stream.push(3) == stream.finish() == ""
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize("tokenizer", [tiny_bpe(), tiny_sentencepiece(), ByteTokenizer(), NoTokenizer()])
def test_what_the_protocols_promise_is_there(tokenizer):
    for protocol, part in ((protocols.Tokenizer, tokenizer), (protocols.TextStream, tokenizer.stream())):
        names = [n for n in {**vars(protocol), **protocol.__annotations__} if not n.startswith("_")]
        assert names and all(hasattr(part, name) for name in names)


def test_the_tiny_tokenizers_are_the_same_every_time():
    assert tiny_bpe().vocab_size == 298
    assert [tiny_bpe().piece(i) for i in range(4)] == ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    assert tiny_bpe().backend.to_str() == tiny_bpe().backend.to_str()
    assert tiny_bpe().encode("the cat and 12") == [120, 261, 286, 36, 265, 104, 36, 53, 54]
    for kind in ("bpe", "unigram"):
        assert tiny_sentencepiece(kind).backend.to_str() == tiny_sentencepiece(kind).backend.to_str()
        assert tiny_sentencepiece(kind).bos_id == tiny_sentencepiece(kind).encode("x")[0] == 1
        assert not tiny_sentencepiece(kind, chat_template=None).has_chat_template


# -- which tokenizer a configuration means


def config(kind="auto", chat_template=None, template_args=None, fold_system=False):
    return SimpleNamespace(
        kind=kind, chat_template=chat_template, template_args=template_args or {}, fold_system=fold_system
    )


def checkpoint(path, tokenizer_folder=None, gguf_metadata=None):
    return SimpleNamespace(path=path, tokenizer_folder=tokenizer_folder, gguf_metadata=gguf_metadata)


def test_open_tokenizer(tmp_path):
    tiny_bpe().save(tmp_path)
    here = checkpoint(tmp_path, tokenizer_folder=tmp_path)
    assert isinstance(open_tokenizer(here, config()), FastTokenizer)
    assert isinstance(open_tokenizer(here, config("none")), NoTokenizer)
    assert open_tokenizer(here, config("bytes")).vocab_size == 260
    assert open_tokenizer(here, config("bytes", "x{{ 1 }}")).render_chat(HI) == "x1"
    own = open_tokenizer(here, config(chat_template="{{ a }}", template_args={"a": "b"}))
    assert own.render_chat(HI) == "b"
    gguf = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "gpt-2"}
    with pytest.raises(TokenizerError, match="merges"):
        open_tokenizer(checkpoint(tmp_path, gguf_metadata=gguf), config())
    with pytest.raises(TokenizerError, match="must hold a tokenizer"):
        open_tokenizer(checkpoint(tmp_path / "nothing"), config())


def test_importing_is_cheap():
    heavy = ("tokenizers", "jinja2", "mlx", "numpy")
    code = f"import mlxgen.tokenizer, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names():
    import mlxgen.tokenizer as package

    assert all(getattr(package, name) for name in package.__all__)
    assert package.ByteStream is ByteStream
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018

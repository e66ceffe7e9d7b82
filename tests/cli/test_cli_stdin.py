"""The prompt from standard input."""

import json
import os
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.errors import ConfigError
from mlxgen.tasks.prompt import read_prompts
from mlxgen.testing.tokenizers import tiny_bpe


@pytest.fixture
def seen(cli, tiny_checkpoint):
    """The text that reaches the tokenizer."""

    def run(*words, stdin=None):
        ran = cli("tokenize", f"model={tiny_checkpoint}", "output=json", *words, stdin=stdin)
        assert ran.code == 0, ran.err
        return tiny_bpe().decode(json.loads(ran.out)["tokens"])

    return run


@pytest.mark.parametrize("text", ["你好, what's a=b?", r"[INST] C:\new ${oc.env:HOME}</s>", "true"])
def test_a_prompt_reaches_the_tokenizer_byte_for_byte(seen, text):
    assert seen(f"prompt={text}") == text


def test_piped_text_is_the_prompt_or_added_to_it(seen):
    assert seen(stdin=b"some text\n") == "some text"
    assert seen("prompt=-", stdin="zwei\n\nZeilen 🙂\n".encode()) == "zwei\n\nZeilen 🙂"
    assert seen("prompt=Summarize:", stdin=b"some text\n") == "Summarize:\n\nsome text"
    assert seen("prompt=Hi", stdin=b"") == seen("prompt=Hi", stdin=b" \n") == seen("prompt=Hi") == "Hi"


@pytest.mark.parametrize("words, stdin", [([], b""), (["prompt=-"], b" \n"), (["tokenize"], None), (["prompt="], None)])
def test_an_empty_prompt_is_a_usage_error(cli, words, stdin):
    ran = cli(*words, "model=/no/such/folder", stdin=stdin)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("mlxgen: `prompt` must not be empty; give prompt='...'")


def test_bytes_that_are_no_utf8_are_refused_with_their_place(cli):
    ran = cli("model=/no/such/folder", stdin=b"abc \xff def")
    assert ran.code == 2
    assert ran.err == "mlxgen: standard input must be UTF-8, but byte 4 is 0xff; convert it first.\n"


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1))
def test_every_text_is_read_as_it_is(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any_text"
    path.write_bytes(text.encode() + b"\n")
    before = sys.stdin
    try:
        with path.open(encoding="utf-8") as sys.stdin:
            if text.strip():
                assert read_prompts([None]) == [text]
            else:
                with pytest.raises(ConfigError):
                    read_prompts([None])
    finally:
        sys.stdin = before


def test_a_closed_standard_input_is_empty(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompts(["Hi"]) == ["Hi"]
    for prompt in (None, "-"):
        with pytest.raises(ConfigError):
            read_prompts([prompt])


def test_a_terminal_is_not_read_when_there_is_a_prompt(monkeypatch):
    """Reading would wait for ever: nobody types here."""
    ours, theirs = os.openpty()
    try:
        with open(theirs, encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert read_prompts(["Hi"]) == ["Hi"]
            with pytest.raises(ConfigError, match="must not be empty"):
                read_prompts([None])
    finally:
        os.close(ours)


def test_a_person_at_a_terminal_can_type_a_prompt(monkeypatch):
    ours, theirs = os.openpty()
    try:
        os.write(ours, b"typed\n\x04")
        with open(theirs, encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert read_prompts(["-"]) == ["typed"]
    finally:
        os.close(ours)


def test_a_silent_pipe_is_announced(monkeypatch, capsys):
    """A pipe that nobody closes looks like a slow one; a person is told what the command waits for."""
    reading, writing = os.pipe()
    monkeypatch.setattr("mlxgen.tasks.prompt._PATIENCE_S", 0.01)
    with open(reading, encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        threading.Timer(0.2, lambda: (os.write(writing, b"late"), os.close(writing))).start()
        assert read_prompts(["Hi"]) == ["Hi\n\nlate"]
    assert capsys.readouterr().err.startswith("waiting for standard input")

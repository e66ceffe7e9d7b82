"""task=tokenize: pieces and ids."""

import json

import pytest

import mlxgen
from mlxgen.testing.checkpoints import write_tiny
from mlxgen.testing.tokenizers import tiny_bpe


@pytest.fixture
def tokenize(cli, tiny_checkpoint):
    return lambda *words, **options: cli("tokenize", f"model={tiny_checkpoint}", *words, **options)


def test_each_token_is_a_line_with_its_id_and_piece(tokenize):
    # Ids stand flush right. What is no character by itself is shown in bytes.
    assert tokenize("prompt=the cat").out == "120  t\n261  he\n286   cat\n"
    assert tokenize("prompt=¢a").out == "198  <0xC2>\n166  <0xA2>\n101  a\n"


def test_json_is_one_object_and_jsonl_one_for_each_token(tokenize):
    ids = tiny_bpe().encode("the cat")
    assert json.loads(tokenize("prompt=the cat", "output=json").out) == {"tokens": ids, "pieces": ["t", "he", " cat"]}
    lines = tokenize("prompt=the cat", "output=jsonl").out.splitlines()
    assert json.loads(lines[-1]) == {"token": ids[-1], "piece": " cat"} and len(lines) == len(ids)


def test_control_tokens_in_the_text_stay_text(tokenize):
    assert len(tokenize("prompt=</s>").out.splitlines()) == 4


@pytest.mark.parametrize("more", [[], ["system=Be brief."], ["prefill=Well"], ["raw=true"]])
def test_with_chat_it_is_what_generate_shows_to_the_model(tokenize, tiny_checkpoint, more):
    ran = tokenize("prompt=Hi", "task.chat=true", "output=json", *more)
    answer = mlxgen.load(f"model={tiny_checkpoint}", "prompt=Hi", "max_tokens=0", *more).generate()
    assert len(json.loads(ran.out)["tokens"]) == answer.prompt_tokens


@pytest.mark.parametrize("task", ["tokenize", "generate"])
def test_what_only_a_template_can_bring_in_is_not_dropped(cli, tiny_checkpoint, task):
    words = [task, f"model={tiny_checkpoint}", "prompt=Hi", "system=Be brief.", "raw=true"]
    ran = cli(*words, *(["task.chat=true"] if task == "tokenize" else []))
    assert ran.code == 2
    assert ran.err == "mlxgen: `system` needs a chat template, but the prompt is raw; put it into the prompt.\n"


def test_a_tokenizer_is_needed(cli, tmp_path, tokenize):
    assert tokenize("prompt=Hi", "tokenizer=none").code == 2
    ran = cli("tokenize", f"model={write_tiny(tmp_path / 'bare', tokenizer=False)}", "prompt=Hi")
    assert ran.code == 3 and "tokenizer" in ran.err

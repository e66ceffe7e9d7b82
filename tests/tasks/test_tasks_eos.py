"""Tokens that end the answer besides the model's own."""

import pytest

import mlxgen
from mlxgen.errors import ConfigError


def test_ids_and_texts_end_the_answer(tiny_checkpoint):
    ask = dict(max_tokens=12)
    base = mlxgen.load(f"model={tiny_checkpoint}", "sampler=greedy").generate("hello", **ask).tokens
    ending = base[4]
    pipe = mlxgen.load(f"model={tiny_checkpoint}", "sampler=greedy", f"eos=[{ending}]")
    answer = pipe.generate("hello", **ask)
    assert answer.tokens == base[: base.index(ending)] and answer.finish_reason == "stop"
    assert 3 in mlxgen.load(f"model={tiny_checkpoint}", "eos=['<|im_end|>']")._eos_ids


@pytest.mark.parametrize("wrong", ["['no such token']", "[5000]"])
def test_what_is_no_token_is_refused(tiny_checkpoint, wrong):
    with pytest.raises(ConfigError, match="`eos` must name tokens of the vocabulary"):
        mlxgen.load(f"model={tiny_checkpoint}", f"eos={wrong}")

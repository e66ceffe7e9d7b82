"""task=data: what a model will see of its data."""

import json

import pytest

from mlxgen.tasks.data import lengths_of, visible
from mlxgen.training.batch import Example

ROWS = [
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]},
    {"messages": [{"role": "user", "content": "x" * 80}, {"role": "assistant", "content": "on \x1b[2J"}]},
    {"messages": [{"role": "user", "content": "no answer"}]},
]


@pytest.fixture
def show(cli, tiny_checkpoint, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return lambda *words: cli("data", f"model={tiny_checkpoint}", f"data.path={path}", "data.validation=0", *words)


def test_learned_tokens_are_marked_and_what_is_dropped_is_counted(show):
    out = show("data.strict=false").out
    assert "train.jsonl train: 3 rows of shape chat\n  left out: 1 × no answer (train.jsonl line 3)\n" in out
    assert "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n⟦sat<|im_end|>⟧\n" in out
    assert "⟦on ␛[2J<|im_end|>⟧" in out  # data does not steer a terminal
    assert "an epoch: 1 batches of 4 examples" in out and "█ 1" in out


def test_long_examples_are_shown_by_their_end(show):
    out = show("data.strict=false", "tokens=20").out
    assert "tokens before ...\n" in out and "xxx" not in out and "⟦on ␛[2J<|im_end|>⟧" in out


def test_json_is_one_object(show):
    data = json.loads(show("data.strict=false", "examples=1", "output=json").out)
    assert data["splits"]["train"]["examples"] == 2 and len(data["examples"]) == 1
    (example,) = data["examples"]
    assert len(example["pieces"]) == len(example["tokens"]) == len(example["learned"])
    assert example["pieces"][-1] == "<|im_end|>" and example["learned"][-1] is True
    assert sum(b["examples"] for b in data["lengths"]) == 2


def test_a_bad_row_stops_with_file_and_line(show):
    ran = show()
    assert ran.code == 3 and ran.err.strip().endswith(
        "train.jsonl line 3 must have an answer to learn, but has none; data.strict=false leaves such rows out."
    )


@pytest.mark.parametrize("lengths", [[5], [2, 3], [10, 500, 20, 20], list(range(2, 99))])
def test_the_histogram_counts_every_example(lengths):
    bins = lengths_of([Example(tokens=(1,) * n, learned=(True,) * n) for n in lengths])
    assert sum(b["examples"] for b in bins) == len(lengths) and len(bins) <= 12
    assert bins[0]["least"] == min(lengths) and bins[-1]["most"] >= max(lengths)


def test_control_characters_are_shown_as_symbols():
    assert visible("a\n\tb\x00\x1b\x7fé") == "a\n\tb␀␛␡é"

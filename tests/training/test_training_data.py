"""From files to examples: shapes, splits, mixtures, lengths, and what is wrong with a row."""

import json
import sys
import types

import pytest

from mlxgen.config import DataConfig
from mlxgen.errors import ConfigError, DataError, TokenizerError
from mlxgen.testing.tokenizers import tiny_bpe
from mlxgen.tokenizer import NoTokenizer
from mlxgen.training.data import open_data

USER, ANSWER = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}
TALK = {"messages": [USER, ANSWER]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
SHAPES = {
    "chat": TALK,
    "completion": {"prompt": "the cat", "completion": "sat"},
    "alpaca": {"instruction": "the", "input": "cat", "output": "sat"},
    "sharegpt": {"conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}]},
    "text": {"text": "the cat sat"},
}
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def rows(tmp_path):
    def write(*values, name="train.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return str(path)

    return write


def read(path, tokenizer=None, *, context=None, **config):
    config = {"validation": 0.0, **config}
    options = {name: config.pop(name) for name in ("raw", "eos_ids", "needs", "seed") if name in config}
    settings = DataConfig(**({"path": path} if path else {}), **config)
    return open_data(settings, tokenizer or tiny_bpe(), context=context, **options)


def learned_text(example, tokenizer=None):
    tokens = [token for token, learned in zip(example.tokens, example.learned, strict=True) if learned]
    return (tokenizer or tiny_bpe()).decode(tokens, skip_special=False, continues=True)


def text(example):
    return tiny_bpe().decode(example.tokens, skip_special=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_found_by_their_keys(rows, shape):
    data = read(rows(SHAPES[shape], SHAPES[shape]))
    assert data.report.sources[0].shape == shape and data.report.sources[0].rows == 2
    answer = " cat sat</s>" if shape == "text" else "sat<|im_end|>"
    assert all(learned_text(example).endswith(answer) for example in data.train)
    assert [example.name for example in data.train] == ["train.jsonl line 1", "train.jsonl line 2"]


def test_texts_end_with_the_end_of_a_text_and_begin_as_the_model_wants(rows):
    (example,) = read(rows(SHAPES["text"]), tiny_bpe(add_bos=True)).train
    assert text(example) == "<s>the cat sat</s>" and learned_text(example) == "the cat sat</s>"


def test_prompts_and_completions_without_a_template_stand_as_they_are(rows):
    path = rows({"prompt": "the cat", "completion": " sat"})
    for options in ({"raw": True}, {"tokenizer": tiny_bpe(chat_template=None)}):
        (example,) = read(path, **options).train
        assert text(example) == "the cat sat</s>" and learned_text(example) == " sat</s>"


def test_prompts_may_be_messages(rows):
    for completion in ("sat", [ANSWER]):
        (example,) = read(rows({"prompt": [USER], "completion": completion})).train
        assert example.tokens == read(rows(TALK)).train[0].tokens


def test_tools_reach_the_template_and_arguments_are_objects(rows):
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    talk = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [TOOL]}
    tokenizer = tiny_bpe(chat_template=TOOL_TEMPLATE)
    (example,) = read(rows(talk), tokenizer).train
    assert text(example).startswith('[{"type": "function"') and learned_text(example) == "Bern<|im_end|>"
    as_text = {**talk, "tools": json.dumps([TOOL])}
    assert read(rows(as_text), tokenizer).train[0].tokens == example.tokens


def test_all_answers_of_a_conversation_are_learned_but_those_of_weight_zero(rows):
    messages = [USER, ANSWER, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "on"}, USER]
    data = read(rows({"messages": messages}))
    assert learned_text(data.train[0]) == "sat<|im_end|>on<|im_end|>"
    assert dict(data.report.sources[0].noted.counts) == {"messages after the last answer are left out": 1}


def test_the_end_of_a_text_is_learned_where_a_template_ends_no_turn(rows):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    data = read(rows(TALK), tiny_bpe(chat_template=template))
    assert learned_text(data.train[0]).endswith("sat\n</s>")
    assert "the template ends no turn" in next(iter(data.report.sources[0].noted.counts))


def test_everything_is_learned_if_asked(rows):
    (example,) = read(rows(TALK), learn="all").train
    assert example.learned == (False, *[True] * (len(example.tokens) - 1))


# -- files


def test_folders_have_splits_and_json_files_are_lists(rows, tmp_path):
    rows(TALK, TALK, name="d/train.jsonl")
    (tmp_path / "d/validation.json").write_text(json.dumps({"data": [TALK]}))
    (tmp_path / "d/test.json").write_text(json.dumps([TALK, TALK, TALK]))
    data = read(str(tmp_path / "d"), validation=0.5)
    assert [len(part) for part in (data.train, data.valid, data.test)] == [2, 1, 3]
    assert data.valid[0].name == "validation.json item 1" and not data.report.validation_from_train


def test_a_share_or_a_number_is_kept_apart_without_a_valid_file(rows):
    path = rows(*({"prompt": str(i), "completion": "x"} for i in range(20)))
    for wanted, count in ((0.1, 2), (0.01, 1), (5, 5)):
        data = read(path, validation=wanted)
        assert len(data.valid) == count and data.report.validation_from_train
        assert sorted(e.tokens for e in (*data.train, *data.valid)) == sorted(e.tokens for e in read(path).train)
    assert read(path, validation=0.1, seed=1).valid != read(path, validation=0.1, seed=2).valid
    with pytest.raises(ConfigError, match=r"`data.validation` must be less than the 20 rows"):
        read(path, validation=20)


def test_sources_are_mixed_by_weight(rows):
    paths = {name: rows(*[{"prompt": name, "completion": "x"}] * 4, name=f"{name}.jsonl") for name in ("a", "b", "c")}
    data = read(None, paths=paths, weights={"b": 2.5, "c": 0.5})
    names = [example.name.split(".")[0] for example in data.train]
    assert {name: names.count(name) for name in paths} == {"a": 4, "b": 10, "c": 2}
    with pytest.raises(ConfigError, match=r"`weights\.d` must be the name of a source, but they are: a, b, c"):
        read(None, paths=paths, weights={"d": 1})


def test_so_many_rows_are_read_at_most(rows):
    assert len(read(rows(*[TALK] * 5), limit=2).train) == 2


def test_parquet_and_the_hub_need_a_library(rows, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"")
    for path in (str(tmp_path / "train.parquet"), "org/talks"):
        with pytest.raises(ConfigError, match="needs the datasets library"):
            read(path)


def test_parquet_and_the_hub_by_the_datasets_library(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, subset=None, **options):
        asked.append((name, subset, options))
        return [TALK] * 3 if options else {"train": [TALK] * 2, "validation": [TALK]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    data = read("org/talks", subset="small")
    assert [e.name for e in (*data.train, *data.valid)] == [
        "org/talks train row 1", "org/talks train row 2", "org/talks validation row 1",
    ]  # fmt: skip
    path = tmp_path / "train.parquet"
    path.write_bytes(b"")
    assert [e.name for e in read(str(path)).train] == [f"train.parquet row {i}" for i in (1, 2, 3)]
    assert asked == [("org/talks", "small", {}), ("parquet", None, {"data_files": str(path), "split": "train"})]


def test_parquet_by_pyarrow(tmp_path, monkeypatch):
    class ParquetFile:
        def __init__(self, path):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def iter_batches(self):
            return iter([types.SimpleNamespace(to_pylist=lambda: [TALK])])

    pyarrow = types.SimpleNamespace(ArrowException=ValueError)
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", types.SimpleNamespace(ParquetFile=ParquetFile))
    (tmp_path / "a.parquet").write_bytes(b"")
    assert len(read(str(tmp_path / "a.parquet")).train) == 1


# -- lengths


def test_longer_examples_are_dropped_and_counted(rows):
    long = {"prompt": "x" * 50, "completion": "sat"}
    data = read(rows(SHAPES["completion"], long), max_length=40)
    assert len(data.train) == 1
    assert data.report.sources[0].dropped.as_dict() == {
        "longer than data.max_length": {"rows": 1, "first": ["train.jsonl line 2"]}
    }


def test_a_cut_prompt_keeps_its_answer_whole(rows):
    long = {"prompt": "x" * 50, "completion": "sat on the"}
    data = read(rows(long), tiny_bpe(), max_length=20, too_long="cut")
    (example,) = data.train
    assert len(example.tokens) == 20 and learned_text(example) == "sat on the<|im_end|>"
    assert example.tokens == read(rows(long)).train[0].tokens[-20:]
    assert data.report.sources[0].noted.counts == {"cut from the left to data.max_length": 1}


def test_an_answer_that_does_not_fit_is_never_cut(rows):
    long = {"prompt": "x", "completion": "y" * 50}
    data = read(rows(SHAPES["completion"], long), max_length=40, too_long="cut")
    assert len(data.train) == 1
    assert data.report.sources[0].dropped.counts == {"the answer alone is longer than data.max_length": 1}


def test_too_long_may_be_an_error(rows):
    with pytest.raises(DataError, match=r"train.jsonl line 1 must be at most `data.max_length` \(8\) tokens, but has"):
        read(rows(TALK), max_length=8, too_long="error")


def test_texts_are_cut_into_pieces_that_learn_every_token_once(rows):
    long = {"text": "".join(chr(97 + i % 26) for i in range(100))}
    whole, pieces = read(rows(long)).train[0], read(rows(long), max_length=16).train
    assert all(len(piece.tokens) <= 16 for piece in pieces)
    learned = [t for piece in pieces for t, told in zip(piece.tokens, piece.learned, strict=True) if told]
    assert tuple(learned) == whole.tokens[1:]


def test_no_length_above_the_context(rows):
    with pytest.raises(ConfigError, match=r"`data.max_length` must be at most 64, the model's context, but is 65\."):
        read(rows(TALK), max_length=65, context=64)
    assert read(rows({"text": "x" * 200}), context=64).report.splits["train"]["longest"] == 64


# -- what is wrong

BAD = {
    "no answer": ({"messages": [USER]}, "must have an answer to learn, but has none; data.strict=false"),
    "an empty answer": ({"messages": [USER, {"role": "assistant", "content": " "}]}, "must have an answer"),
    "mixed shapes": (SHAPES["alpaca"], "must be of shape chat as train.jsonl line 1, but is of shape alpaca"),
    "no shape": ({"question": 1}, "must have messages, .* but has the keys question"),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "which is data for preferences"),
    "no object": ([1], r"but is \[1\]"),
    "a refused role": ({"messages": [{"role": "nobody", "content": "x"}, ANSWER]}, "refuses .*: no such role"),
    "no role": ({"messages": [{"content": "x"}, ANSWER]}, "must be an object with a role"),
    "an odd content": ({"messages": [{"role": "user", "content": 1}, ANSWER]}, "must be text or a list of parts"),
}
STRICT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_or_left_out_and_counted(rows, kind):
    row, message = BAD[kind]
    path, tokenizer = rows(TALK, row), tiny_bpe(chat_template=STRICT_TEMPLATE)
    with pytest.raises(DataError, match=rf"^train\.jsonl line 2.*{message}") as caught:
        read(path, tokenizer)
    assert "\n" not in str(caught.value)
    data = read(path, tokenizer, strict=False)
    assert len(data.train) == 1 and sum(data.report.sources[0].dropped.counts.values()) == 1


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "train.jsonl", "train.jsonl must have a row at least, but is empty"),
        (b"\n\n", "train.jsonl", "is empty"),
        (b'{"a": 1}\n{"a"\n', "train.jsonl", "train.jsonl line 2 must be JSON, but column 5"),
        (b"\xff\xfe", "train.jsonl", "must be UTF-8"),
        (b"{}", "train.json", "train.json must be a list of rows"),
        (b"a,b", "train.csv", "train.csv must be .jsonl, .ndjson, .json, .parquet, but is .csv"),
    ],
)
def test_a_file_that_holds_no_rows_is_an_error(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message.replace(".", r"\.")):
        read(str(tmp_path / name), strict=False)


def test_a_path_that_is_nothing_is_an_error(tmp_path, rows):
    with pytest.raises(DataError, match=r"there is no missing\.jsonl"):
        read("missing.jsonl")
    with pytest.raises(DataError, match=r"must be a folder with train\.jsonl, valid\.jsonl, test\.jsonl"):
        read(str(tmp_path))
    rows(TALK, name="val.jsonl")
    rows(TALK, name="valid.jsonl")
    with pytest.raises(DataError, match=r"one valid file, but .* has val\.jsonl and valid\.jsonl"):
        read(str(tmp_path))
    with pytest.raises(ConfigError, match=r"`data\.path` must be given"):
        read(None)


def test_a_split_that_is_needed_must_be_there(rows, tmp_path):
    rows(TALK, name="d/test.jsonl")
    assert len(read(str(tmp_path / "d"), needs=("test",)).test) == 1
    with pytest.raises(DataError, match="must give an example for train, but none is left"):
        read(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"none is left\. Left out: 1 × no answer\."):
        read(rows({"messages": [USER]}, name="x.jsonl"), strict=False)


def test_training_needs_a_tokenizer(rows):
    with pytest.raises(TokenizerError, match="needs a tokenizer that reads text"):
        read(rows(TALK), NoTokenizer())

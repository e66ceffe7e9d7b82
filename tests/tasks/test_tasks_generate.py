"""Answers from beginning to end: where they stop, and which keys change them on which path."""

import dataclasses
import functools
import io
import json
import math
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxgen
from mlxgen.config import load_config
from mlxgen.pipeline import Pipeline
from mlxgen.tasks.chat import Chat
from mlxgen.tasks.generate import Generate
from mlxgen.testing.checkpoints import write_tiny

# The tiny model says anything; only printable ASCII and its merges make text that can be searched.
READABLE = {token: -math.inf for token in range(298) if token < 36 or 130 < token < 260}


@pytest.fixture(scope="module")
def pipe(tiny_checkpoint):
    return mlxgen.load(f"model={tiny_checkpoint}", "max_tokens=24", "sampler.temperature=1", "seed=5")


@pytest.fixture(scope="module")
def whole(pipe):
    """An answer that nothing stops."""
    answer = pipe.generate("Hi", logit_bias=READABLE)
    assert answer.finish_reason == "length" and len(answer.tokens) == 24 and answer.text.isprintable()
    return answer


@pytest.fixture(autouse=True)
def _nothing_piped(monkeypatch):
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


# -- stop texts


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_stop_text_ends_the_answer_wherever_token_borders_fall(pipe, whole, data):
    start = data.draw(st.integers(0, len(whole.text) - 2))
    stop = whole.text[start : start + data.draw(st.integers(1, 6))]
    chunks = list(pipe.stream("Hi", logit_bias=READABLE, stop=[stop]))
    answer = chunks[-1].completion
    at = whole.text.index(stop)
    assert answer.text == whole.text[:at] == "".join(chunk.text for chunk in chunks)
    assert answer.finish_reason == "stop"
    assert answer == dataclasses.replace(pipe.generate("Hi", logit_bias=READABLE, stop=stop), stats=answer.stats)
    # It stops with the token that completes the match: one token less does not hold the whole of it.
    shorter = pipe.tokenizer.decode(whole.tokens[: answer.completion_tokens - 1])
    assert stop not in shorter and answer.tokens == whole.tokens[: answer.completion_tokens]


def test_forms_of_stop(pipe, whole):
    early, late = whole.text[4:6], whole.text[10:13]
    ask = functools.partial(pipe.generate, "Hi", logit_bias=READABLE)
    assert ask(stop=[late, early]).text == whole.text[: whole.text.index(early)]  # the earliest, whatever the order
    assert ask(stop=[]).text == ask(stop=None).text == ask(stop="").text == ask(stop=[""]).text == whole.text
    assert ask(stop=["no such text"]).finish_reason == "length"
    with pytest.raises(mlxgen.ConfigError, match=r"`stop\[1\]` must be text"):
        ask(stop=["a", 5])


def test_stop_on_the_command_line(cli, tiny_checkpoint, whole):
    bias = json.dumps(dict.fromkeys(READABLE, "-inf")).replace('"', "")
    words = [f"model={tiny_checkpoint}", "max_tokens=24", "sampler.temperature=1", "seed=5", "prompt=Hi"]
    ran = cli(*words, f"sampler.logit_bias={bias}", f"stop=['{whole.text[3:5]}','never']")
    assert ran.out == whole.text[: whole.text.index(whole.text[3:5])] + "\n"


# -- the end of the sequence


@pytest.fixture
def with_eos(tmp_path):
    """The same weights, with other end-of-sequence ids in config.json and generation_config.json."""

    def load(config=None, generation_config=None):
        folder = write_tiny(
            tmp_path / f"{config}{generation_config}",
            generation_config=None if generation_config is None else {"eos_token_id": generation_config},
            **({} if config is None else {"eos_token_id": config}),
        )
        return mlxgen.load(f"model={folder}", "max_tokens=24", "sampler.temperature=1", "seed=5")

    return load


def first_new(tokens, least):
    """The first place, from `least` on, of a token that did not occur before."""
    return next(i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i])


def test_the_ends_are_the_union_of_what_three_files_name(with_eos, whole):
    a, b = first_new(whole.tokens, 3), first_new(whole.tokens, 6)
    for pipe in (
        with_eos(config=whole.tokens[a]),
        with_eos(generation_config=[whole.tokens[a]]),
        with_eos(config=[whole.tokens[b], whole.tokens[a]], generation_config=whole.tokens[b]),
    ):
        answer = pipe.generate("Hi", logit_bias=READABLE)
        assert (answer.tokens, answer.finish_reason) == (whole.tokens[:a], "stop")
        # The tokenizer's own ends, </s> and the end of a turn, count as well.
        for token in (1, 3):
            assert pipe.generate("Hi", logit_bias={token: 1000}).finish_reason == "stop"


def test_the_end_is_neither_text_nor_counted(with_eos, whole):
    at = first_new(whole.tokens, 4)
    pipe = with_eos(config=whole.tokens[at])
    chunks = list(pipe.stream("Hi", logit_bias=READABLE))
    answer = chunks[-1].completion
    assert answer.text == pipe.tokenizer.decode(whole.tokens[:at]) == "".join(chunk.text for chunk in chunks)
    assert answer.completion_tokens == at == len(answer.tokens) == answer.stats.completion_tokens
    assert [token for chunk in chunks for token in chunk.tokens] == answer.tokens


def test_an_end_on_the_last_token_that_was_allowed_is_an_end(with_eos, whole):
    at = first_new(whole.tokens, 4)
    pipe = with_eos(config=whole.tokens[at])
    assert pipe.generate("Hi", logit_bias=READABLE, max_tokens=at + 1).finish_reason == "stop"
    assert pipe.generate("Hi", logit_bias=READABLE, max_tokens=at).finish_reason == "length"


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_there_is_one_last_chunk_and_only_it_says_why(pipe, limit):
    chunks = list(pipe.stream("Hi", max_tokens=limit, logit_bias=READABLE))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [chunk.completion is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].completion.completion_tokens == limit


def test_an_answer_ends_with_the_context(tmp_path):
    pipe = mlxgen.load(f"model={write_tiny(tmp_path, max_position_embeddings=24)}", "max_tokens=100", "raw=true")
    answer = pipe.generate([70, 71, 72], logit_bias={1: -math.inf, 3: -math.inf})
    assert (answer.finish_reason, answer.prompt_tokens + answer.completion_tokens) == ("length", 24)
    with pytest.raises(mlxgen.RequestError, match="must fit into a context of 24 tokens, but has 25"):
        pipe.generate([70] * 25)


def test_many_requests_leave_no_memory_behind(pipe):
    import mlx.core as mx

    pipe.generate("Hi", max_tokens=2)
    before = mx.get_active_memory()
    for length in range(1, 300, 6):
        pipe.generate([70] * length, max_tokens=2)
    assert mx.get_active_memory() <= before + 4096


# -- every key on every path: a key that a path does not read is a fault


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("keys"), head_dim=32)  # as wide as the smallest quantized group
    words = [f"model={folder}", "prompt=Why is it?", "max_tokens=12", "seed=1", "sampler.temperature=1", "output=json"]
    return load_config(words)


def by_generate(config, capsys):
    assert Generate()(config) == 0
    return capsys.readouterr()


def by_chat(config, capsys):
    assert Chat()(config) == 0  # the prompt is the first turn, and the only one
    return capsys.readouterr()


def by_python(config, capsys):
    print(json.dumps(Pipeline(config).generate().as_dict()))
    return capsys.readouterr()


def changed(config, key, value):
    """The configuration with one key, at any depth, set."""
    section, _, rest = key.partition(".")
    if not rest:
        return dataclasses.replace(config, **{section: value})
    return dataclasses.replace(config, **{section: {**getattr(config, section), rest: value}})


def observed(shown):
    """What a person sees but for times and memory."""
    lines = [line for line in shown.out.splitlines() if line.startswith("{")]
    answer = {k: v for k, v in json.loads(lines[-1]).items() if k != "stats"} if lines else None
    return answer, shown.out if answer is None else len(lines), shown.err != ""


ANSWER_KEYS = [
    ("prompt", "Why was it?"),
    ("system", "Be brief."),
    ("prefill", "Because"),
    ("max_tokens", 3),
    ("seed", 2),
    ("logprobs", True),
    ("top_logprobs", 2),
    ("cache", {"_target_": "mlxgen.cache.Window", "size": 4, "sinks": 1}),
    ("cache", {"_target_": "mlxgen.cache.Quantized", "k_bits": 2, "v_bits": 2, "group_size": 32}),
    ("sampler.temperature", 0.1),
    ("sampler.top_k", 1),
    ("sampler.top_p", 0.0),
    ("sampler.min_p", 1.0),
    ("sampler.repetition_penalty", 50.0),
    ("sampler.frequency_penalty", 50.0),
    ("sampler.presence_penalty", 50.0),
    ("sampler.logit_bias", {70: 100.0}),
    ("sampler.dynamic_temperature", {"range": 0.9}),
    ("sampler.mirostat", {"tau": 0.1}),
    ("tokenizer", "bytes"),
]


@pytest.mark.parametrize("path", [by_generate, by_chat, by_python])
def test_every_key_changes_the_answer_on_every_path(path, base, capsys):
    before = observed(path(base, capsys))
    assert before == observed(path(base, capsys))
    for key, value in ANSWER_KEYS:
        if key == "tokenizer":
            value = dataclasses.replace(base.tokenizer, kind=value)
        assert observed(path(changed(base, key, value), capsys)) != before, key
    text = before[0]["text"]
    assert observed(path(changed(base, "stop", (text[2:4],)), capsys))[0]["text"] == text[: text.index(text[2:4])]


@pytest.mark.parametrize("path", [by_generate, by_chat])
def test_every_key_changes_what_is_shown(path, base, capsys):
    before = observed(path(base, capsys))
    for key, value in [("output", "text"), ("output", "jsonl"), ("stats", True)]:
        assert observed(path(changed(base, key, value), capsys)) != before, key


@pytest.mark.parametrize("path", [by_generate, by_chat, by_python])
def test_the_chunks_of_the_prompt_are_as_configured_on_every_path(path, base, capsys, monkeypatch):
    seen = []
    original = mlxgen.Decoder.hidden

    def watched(self, tokens, caches=None, **options):
        seen.append(tokens.shape[1])
        return original(self, tokens, caches, **options)

    monkeypatch.setattr(mlxgen.Decoder, "hidden", watched)
    path(changed(base, "prefill_chunk", 10), capsys)
    prompt = [length for length in seen if length > 1]
    assert max(prompt) == 10 and len(prompt) >= 2


def test_a_raw_prompt_has_no_template(base, capsys):
    raw = changed(base, "raw", True)
    assert observed(by_generate(raw, capsys)) != observed(by_generate(base, capsys))
    assert observed(by_python(raw, capsys))[0] == observed(by_generate(raw, capsys))[0]
    with pytest.raises(mlxgen.ConfigError, match="`raw` must be false for task=chat"):
        Chat()(raw)


def test_all_paths_give_the_same_answer(base, capsys):
    answers = [observed(path(base, capsys))[0] for path in (by_generate, by_chat, by_python)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "values",
    [
        {"system": "Be brief."},
        {"prefill": "Because"},
        {"raw": True},
        {"max_tokens": 3},
        {"seed": 2},
        {"top_logprobs": 2},
        {"temperature": 0.1},
        {"logit_bias": {70: 100.0}},
        {"template_args": {"add_generation_prompt": False}},
    ],
)
def test_a_request_may_set_what_the_run_sets(base, values):
    pipe = Pipeline(base)
    ours = pipe.generate()
    theirs = pipe.generate(**values)
    assert {**ours.as_dict(), "stats": None} != {**theirs.as_dict(), "stats": None}
    with pytest.raises(mlxgen.ConfigError, match="Did you mean"):
        pipe.generate(**{f"{next(iter(values))}x": 1})


def test_ctrl_c_between_two_pieces_keeps_what_came(base, capsys, monkeypatch):
    """The interruption strikes while the answer is being written, outside of the engine."""

    class Interrupting(io.StringIO):
        writes = 0

        def write(self, text):
            self.writes += 1
            if self.writes == 3:
                raise KeyboardInterrupt
            return super().write(text)

    out = Interrupting()
    monkeypatch.setattr(sys, "stdout", out)
    assert Generate()(changed(base, "output", "jsonl")) == 130
    last = json.loads(out.getvalue().splitlines()[-1])
    assert last["finish_reason"] == "interrupted" and last["completion"]["completion_tokens"] == 3

"""The words of a command line: spellings, literal text, lists, sweeps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.config import compose, read_overrides, sweep
from mlxgen.config.words import quoted, read_list
from mlxgen.errors import ConfigError

# Each of these means something in the grammars of Hydra, YAML, OmegaConf or Python's escapes.
LITERALS = [
    "你好",
    "🙂",
    "a=b",
    "#1",
    "pink & green",
    "what's up",
    "</s>",
    "[INST] hi",
    "Hello, world",
    "true",
    "null",
    "1e-5",
    "1_000",
    r"C:\new",
    "a trailing backslash \\",
    "${oc.env:HOME}",
    "${",
    "{a: 1}",
    "choice(a,b)",
    "two\nlines",
    " blanks ",
    '"quoted"',
    "--help",
    "???",
]


def composed(*words):
    return compose(read_overrides(words))


@pytest.mark.parametrize("key", ["prompt", "system", "prefill"])
@pytest.mark.parametrize("text", LITERALS)
def test_text_is_taken_byte_for_byte(key, text):
    for word in (f"{key}={text}", f"+{key}={text}"):
        assert read_overrides([word]).literal == {key: text}


def test_text_survives_composition():
    for text in LITERALS[::5]:
        assert composed(f"prompt={text}")["prompt"] == text


@settings(max_examples=25, deadline=None)
@given(st.text())
def test_any_text_is_a_prompt(text):
    assert read_overrides([f"prompt={text}"]).literal["prompt"] == text


@pytest.mark.parametrize("group, name", [("model", "qwen3_4b"), ("sampler", "top_p"), ("cache", "window")])
def test_both_spellings_of_a_group_compose_to_the_same(group, name):
    assert composed(f"+{group}={name}") == composed(f"{group}={name}")


def test_a_plus_never_matters_for_a_key():
    plain = composed("max_tokens=5", "tokenizer.template_args.enable_thinking=false")
    assert plain == composed("+max_tokens=5", "++tokenizer.template_args.enable_thinking=false")
    assert plain["max_tokens"] == 5
    assert plain["tokenizer"]["template_args"] == {"enable_thinking": False}


def test_the_last_of_two_counts():
    words = ["sampler=top_k", "max_tokens=1", "prompt=a", "sampler=min_p", "max_tokens=2", "prompt=b"]
    data = composed(*words)
    assert data["sampler"]["min_p"] == 0.05 and data["sampler"]["top_k"] is None
    assert (data["max_tokens"], data["prompt"]) == (2, "b")
    data = composed("model=./folder", "model=qwen3_4b")
    assert data["model"]["source"] == "mlx-community/Qwen3-4B-4bit"


@pytest.mark.parametrize("words", [["tokenize"], ["task=tokenize"], ["+task=tokenize"], ["prompt=x", "tokenize"]])
def test_the_bare_word_is_the_task(words):
    assert read_overrides(words).groups["task"] == "tokenize"


@pytest.mark.parametrize(
    "value", ["./folder", "org/name", "org/name@main", "x/y.gguf", "y.gguf", "a b/c, d/what's [new]", "~/m", "/"]
)
def test_a_model_may_be_a_folder_a_file_or_a_hub_id(value):
    data = composed(f"model={value}")
    assert data["model"]["source"] == value
    assert data["model"]["package"] is None and data["model"]["sampling"] == {}


def test_a_model_may_be_a_folder_without_a_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="`model` must be one of"):
        read_overrides(["model=weights"])
    (tmp_path / "weights").mkdir()
    assert composed("model=weights")["model"]["source"] == "weights"


@pytest.mark.parametrize(
    "text, items",
    [
        ("[</s>]", ["</s>"]),
        ("</s>", ["</s>"]),
        ("['a','b']", ["a", "b"]),
        ('["a", "b"]', ["a", "b"]),
        ('["a\\n", "b"]', ["a\n", "b"]),
        ("[a, 'b, c']", ["a", "b, c"]),
        ("['it''s', it's]", ["it's", "it's"]),
        ("[User:,Human:]", ["User:", "Human:"]),
        ("[#1]", ["#1"]),
        ("[1, true]", ["1", "true"]),
        ("[' padded ']", [" padded "]),
        ("t c", ["t c"]),
        ("null", ["null"]),
        ("[]", []),
        ("", []),
    ],
)
def test_lists_of_texts(text, items):
    assert read_list(text) == items
    assert read_overrides([f"stop={text}"]).literal == {"stop": items}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(min_size=1), max_size=4))
def test_any_texts_can_be_listed_in_single_quotes(items):
    word = "[" + ",".join("'" + item.replace("'", "''") + "'" for item in items) + "]"
    assert read_list(word) == items


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="$"), max_size=8))
def test_quoted_text_passes_through_hydra(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert str(OverridesParser.create().parse_override(f"key={quoted(text)}").value()) == text


@pytest.mark.parametrize("value", ["what's up", "🙂", "C:\\new", "{{ messages[0] }}", "</s>", "a=b"])
def test_what_hydra_cannot_read_is_text(value):
    assert composed(f"tokenizer.chat_template={value}")["tokenizer"]["chat_template"] == value


def test_infinity_may_be_written_as_in_yaml():
    bias = composed("sampler.logit_bias={5: -.inf, 6: .5}", "sampler.temperature=.inf")["sampler"]
    assert bias["logit_bias"] == {5: -math.inf, 6: 0.5} and bias["temperature"] == math.inf
    assert composed("tokenizer.chat_template=x/.inf")["tokenizer"]["chat_template"] == "x/.inf"


@pytest.mark.parametrize(
    "words, message",
    [
        (["chta"], "'chta' is not a task or key=value; tasks: "),
        (["Why is it?"], "'Why is it?' is not key=value. Give free text as prompt='Why is it?'."),
        (["what is 1+1=2"], "Give free text as prompt="),
        (["chat", "hello"], "'hello' follows the task chat, but is not key=value. Give free text as prompt='...'."),
        (["sampler=topp"], "but is 'topp'. Did you mean `top_p`?"),
        (["+sampler=topp"], "but is 'topp'. Did you mean `top_p`?"),
        (["model=qwen3_4"], "a hub id `org/name`, but is 'qwen3_4'. Did you mean `qwen3_4b`?"),
        (["model="], "`model` must be one of"),
        (["sampler=top_p,min_p"], "'top_p,min_p'. Add --multirun for one run with each."),
        (["sampler.temperature=0,1"], "`sampler.temperature` must be one value, but is '0,1'. Add --multirun"),
        (["--hlep"], "'--hlep' is not a flag"),
        (["~seed"], "nothing can be deleted"),
        (["hydra.run.dir=x"], "`hydra.run.dir` has no effect"),
        (["hydra/launcher=joblib"], "`hydra/launcher` has no effect"),
        (["=x"], "'=x' is not key=value"),
    ],
)
def test_words_that_cannot_be_meant(words, message):
    with pytest.raises(ConfigError) as error:
        read_overrides(words)
    assert message in str(error.value)


def test_a_sweep_is_the_product_of_its_values():
    runs = sweep(["prompt=a,b", "sampler.temperature=0,0.5", "+seed=range(1,3)", "max_tokens=3"])
    assert [variant for _, variant in runs] == [
        ("sampler.temperature=0", "seed=1"),
        ("sampler.temperature=0", "seed=2"),
        ("sampler.temperature=0.5", "seed=1"),
        ("sampler.temperature=0.5", "seed=2"),
    ]
    assert runs[0][0] == ["prompt=a,b", "sampler.temperature=0", "seed=1", "max_tokens=3"]


@pytest.mark.parametrize(
    "word, variants",
    [
        ("model=qwen3_4b,org/name", ["model=qwen3_4b", "model=org/name"]),
        ("sampler=glob(top*)", ["sampler=top_k", "sampler=top_n_sigma", "sampler=top_p"]),
        ("sampler.top_p=choice(0.5,0.9)", ["sampler.top_p=0.5", "sampler.top_p=0.9"]),
        ("sampler.order=[top_p],[top_k]", ["sampler.order=[top_p]", "sampler.order=[top_k]"]),
    ],
)
def test_forms_of_a_sweep(word, variants):
    assert [" ".join(variant) for _, variant in sweep([word])] == variants


@pytest.mark.parametrize("word", ["prompt=a,b", "stop=a,b", "chat", "sampler.order=[top_p,top_k]"])
def test_what_is_never_swept(word):
    assert sweep([word]) == [([word], ())]


@pytest.mark.parametrize("word", ["seed=interval(0,1)", "sampler=glob(nothing*)"])
def test_sweeps_that_cannot_be_counted_out(word):
    with pytest.raises(ConfigError):
        sweep([word])

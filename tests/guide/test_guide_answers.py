"""Answers that must follow a rule do so: alone, in a batch, with guesses; and say so when they are cut."""

import json
import random
import re
import time

import pytest

import mlxgen
from mlxgen.engine import Lookup, Request
from mlxgen.errors import ConfigError, MlxgenError, RequestError
from mlxgen.sampler import Sampler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer"},
        "ok": {"enum": [True, None]},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}
SUM = 'start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,3}/'
RULES = {  # rule -> whether a text is a whole answer
    ("json_schema", json.dumps(PERSON)): lambda text: _is_person(text),
    ("regex", r"[a-c]{2,4}-\d{1,3}"): lambda text: re.fullmatch(r"[a-c]{2,4}-[0-9]{1,3}", text) is not None,
    ("grammar", SUM): lambda text: re.fullmatch(r"[0-9]{1,3}\+[0-9]{1,3}", text) is not None,
    ("choice", ("yes", "no", "yes, but")): lambda text: text in ("yes", "no", "yes, but"),
}
SAMPLING = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 4},
    {"temperature": 1.0, "xtc": {"probability": 0.5, "threshold": 0.05}, "seed": 5},
]


def _is_person(text):
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and {"name", "ok"} <= set(value) <= {"name", "age", "ok"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and value["ok"] in (True, None)
        and isinstance(value.get("age", 0), int)
    )


@pytest.fixture(scope="module")
def pipe(tiny_checkpoint):
    return mlxgen.load(f"model={tiny_checkpoint}")


def rule_id(rule):
    return rule[0]


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_an_answer_is_whole_or_says_that_it_is_not(pipe, rule, sampling):
    kind, value = rule
    for max_tokens in (3, 11, 150):
        done = pipe.generate("Hello", max_tokens=max_tokens, **{kind: value}, **sampling)
        assert done.complete == RULES[rule](done.text), done.text
        if done.finish_reason == "stop":
            assert done.complete
        else:
            assert done.finish_reason == "length" and done.completion_tokens == max_tokens


def request(pipe, kind, value, sampling, **changes):
    guide = pipe._guides.grammar(pipe.settings(**{kind: value}).config) if kind else None
    options = dict(prompt=(5, 6, 7), sampler=Sampler.from_config(sampling, vocab_size=298), max_tokens=40)
    return Request(**{**options, "guide": guide, "eos_ids": pipe._eos_ids, **changes})


def answers(pipe, requests):
    generations = [pipe.engine.submit(r, pipe.new_sequence()) for r in requests]
    while pipe.engine.step():
        pass
    return [(g.produced, g.finish, str(g.error)) for g in generations]


def test_each_row_of_a_batch_follows_its_own_rule(pipe):
    rnd = random.Random(0)
    requests = [
        request(
            pipe, *rnd.choice([*RULES, (None, None)]), rnd.choice(SAMPLING), prompt=tuple(rnd.choices(range(290), k=n))
        )
        for n in (1, 4, 9, 9, 17, 2)
    ]
    alone = [answers(pipe, [r])[0] for r in requests]
    assert answers(pipe, requests) == alone
    assert {finish for _, finish, _ in alone} <= {"stop", "length"}


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_an_answer_by_a_rule_is_the_same_with_guesses(pipe, rule):
    for sampling in SAMPLING:
        plain = request(pipe, *rule, sampling)
        guessing = request(pipe, *rule, sampling, speculation=Lookup(tokens=4, ngram=1, always=True))
        assert answers(pipe, [guessing]) == answers(pipe, [plain])


NO_RULES = [
    ("json_schema", "hello"),
    ("json_schema", '["a"]'),
    ("json_schema", {"type": "strin"}),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    ("json_schema", {"enum": []}),
    ("regex", "a(b"),
    ("regex", "a\\"),
    ("regex", "(?=a)b"),
    ("regex", "(((a{1000}){1000}){1000})"),
    ("grammar", "strt: x"),
    ("grammar", "start: missing"),
    ("grammar", "start: start"),
    ("choice", ()),
    ("choice", ("yes", 3)),
]


@pytest.mark.parametrize(("kind", "value"), NO_RULES, ids=str)
def test_what_is_no_rule_is_one_line_and_soon(pipe, kind, value):
    start = time.perf_counter()
    with pytest.raises(MlxgenError, match=rf"`{kind}") as caught:
        pipe.generate("Hello", max_tokens=30, **{kind: value})
    assert isinstance(caught.value, ConfigError | RequestError) and "\n" not in str(caught.value)
    assert time.perf_counter() - start < 30
    assert not pipe.engine.step(), "nothing of it stays in the engine"


def test_a_grammar_that_explodes_ends_its_own_row(pipe):
    many = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(2000)}}
    sick = request(pipe, "json_schema", json.dumps(many), {"temperature": 0})
    others = [request(pipe, *rule, SAMPLING[1]) for rule in RULES]
    alone = [answers(pipe, [r])[0] for r in others]
    got = answers(pipe, [*others[:2], sick, *others[2:]])
    assert got[2][1] == "error" and "`json_schema` can't be followed any further" in got[2][2]
    assert "is not allowed" not in got[2][2]  # but why
    assert [*got[:2], *got[3:]] == alone


def test_only_one_rule(pipe):
    with pytest.raises(ConfigError):
        pipe.generate("Hello", regex="a", choice=("a", "b"))


def test_an_answer_goes_on_from_its_prefill(pipe):
    done = pipe.generate("Hello", prefill="ye", choice=("yes", "no", "yes, but"), temperature=1.0, seed=1)
    assert "ye" + done.text in ("yes", "yes, but") and done.complete
    with pytest.raises(ConfigError, match="`prefill` must begin an answer"):
        pipe.generate("Hello", prefill="x", choice=("yes", "no"))

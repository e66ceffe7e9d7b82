"""Several answers to one prompt, beam search, prompt log-probabilities, several prompts: in Python and as shown."""

import itertools
import json
import math

import mlx.core as mx
import pytest

import mlxgen
from mlxgen.batching import answer_all

READABLE = {token: -math.inf for token in range(298) if token < 36 or 130 < token < 260}
BIAS = "sampler.logit_bias={" + ", ".join(f"{token}: -inf" for token in READABLE) + "}"


@pytest.fixture(scope="module")
def pipe(tiny_checkpoint):
    return mlxgen.load(f"model={tiny_checkpoint}", "max_tokens=12", "sampler.temperature=1", "seed=5")


@pytest.fixture
def command(cli, tiny_checkpoint):
    words = [f"model={tiny_checkpoint}", "max_tokens=12", "sampler.temperature=1", "seed=5", "prompt=Hi"]
    return lambda *more: cli(*words, *more)


def told(completion):
    return (completion.text, completion.tokens, completion.finish_reason, completion.seed)


# -- several answers


def test_the_first_of_several_is_the_one_alone_and_each_comes_again_with_its_seed(pipe):
    alone, several = pipe.generate("Hi"), pipe.generate("Hi", n=4)
    assert told(several) == told(alone) and alone.others == () and len(several.others) == 3
    assert told(several) == told(pipe.generate("Hi", n=2))
    assert len({tuple(one.tokens) for one in (several, *several.others)}) == 4
    for one in several.others:
        assert told(pipe.generate("Hi", seed=one.seed)) == told(one)


def test_their_prompt_is_computed_once(pipe, monkeypatch):
    seen = []
    original = mlxgen.Decoder.hidden

    def watched(self, tokens, caches=None, **options):
        seen.append(tokens.size)
        return original(self, tokens, caches, **options)

    monkeypatch.setattr(mlxgen.Decoder, "hidden", watched)
    several = pipe.generate(list(range(40, 100)), n=5, max_tokens=3)
    assert sum(seen) <= 60 + 3 * 5
    assert [one.stats.cached_tokens for one in (several, *several.others)] == [0, 60, 60, 60, 60]


@pytest.mark.parametrize("values", [{"n": 3}, {"beams": 4, "n": 3}])
def test_the_pieces_of_each_make_its_text(pipe, values):
    chunks = list(pipe.stream("Hi", stop="e", logit_bias=READABLE, logprobs=True, **values))
    whole = chunks[-1].completion
    for index, one in enumerate((whole, *whole.others)):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert one.text == "".join(chunk.text for chunk in mine) and "e" not in one.text
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [one.finish_reason]
        assert len(one.logprobs) == len(one.tokens) == sum(len(chunk.tokens) for chunk in mine)
    assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert mx.array(whole.tokens).size and not pipe.engine.scheduler.running


def test_text_shows_one_below_the_other(command, pipe):
    several = pipe.generate("Hi", n=3, logit_bias=READABLE)
    texts = [one.text for one in (several, *several.others)]
    shown = [f"--- {i} of 3 ---\n{text}\n" for i, text in enumerate(texts, 1)]
    assert command("n=3", BIAS).out == "".join(shown)
    assert command("n=1", BIAS).out == texts[0] + "\n"


def test_json_has_the_others_beside_the_first(command, pipe):
    several = pipe.generate("Hi", n=3)
    shown, alone = (json.loads(command(f"n={n}", "output=json").out) for n in (3, 1))
    assert [one["tokens"] for one in (shown, *shown["others"])] == [
        one.tokens for one in (several, *several.others)
    ]
    assert set(shown) - {"others"} == set(alone) == set(shown["others"][0])


def test_jsonl_tells_the_answers_apart(command):
    events = [json.loads(line) for line in command("n=3", "output=jsonl").out.splitlines()]
    whole = events[-1]["completion"]
    for index, one in enumerate((whole, *whole["others"])):
        assert "".join(event["text"] for event in events if event["index"] == index) == one["text"]
    assert all("index" not in json.loads(line) for line in command("output=jsonl").out.splitlines())


def test_an_interruption_keeps_what_came_of_each(pipe):
    chunks = pipe.stream("Hi", n=3)
    came = list(itertools.islice(chunks, 7))
    rest = [chunks.throw(KeyboardInterrupt()), *chunks]
    whole = rest[-1].completion
    ones = (whole, *whole.others)
    assert [one.finish_reason for one in ones] == ["interrupted"] * 3
    assert sum(len(one.tokens) for one in ones) == len(came)
    assert not pipe.engine.scheduler.running


# -- beams


def test_more_beams_find_likelier_answers(pipe):
    scores = [pipe.generate("Hi", beams=beams).score for beams in (2, 6)]
    assert scores[0] <= scores[1] + 1e-5
    best = pipe.generate("Hi", beams=6, n=3, logprobs=True)
    ranked = [one.score for one in (best, *best.others)]
    assert ranked == sorted(ranked, reverse=True)
    total = sum(entry.logprob for entry in best.logprobs)
    assert best.finish_reason == "stop" or best.score == pytest.approx(total / len(best.tokens), abs=1e-4)


def test_beams_follow_a_rule(pipe):
    best = pipe.generate("Hi", beams=3, n=3, choice=["yes", "no", "maybe"])
    assert {one.text for one in (best, *best.others)} == {"yes", "no", "maybe"}
    assert all(one.complete and one.finish_reason == "stop" for one in (best, *best.others))
    cut = pipe.generate("Hi", beams=2, regex="[a-f]{30}")
    assert cut.complete is False and cut.finish_reason == "length" and set(cut.text) <= set("abcdef")


@pytest.mark.parametrize(
    "words, message",
    [
        (["n=0"], "`n` must be at least 1, but is 0."),
        (["beams=3", "n=4"], "`n` must be at most `beams` (3), the answers that a search finds, but is 4."),
        (["beams=3", "speculation=lookup"], "`speculation` must be none with `beams`, as guesses are for one row"),
        (["chat", "n=2"], "`n` must be 1 in a chat"),
        (["chat", "beams=2"], "`beams` must be 1 in a chat"),
        (["beams=100"], "`beams` must be at most 64, the rows of a batch, but is 100."),
    ],
)
def test_what_does_not_go_together_names_both(command, words, message):
    ran = command(*words)
    assert ran.code in (2, 4) and ran.out == ""
    assert ran.err.startswith(f"mlxgen: {message}") and ran.err.count("\n") == 1


def test_a_conversation_has_one_answer_a_turn(pipe):
    for values in ({"n": 2}, {"beams": 2}):
        with pytest.raises(mlxgen.ConfigError, match="must be 1 in a chat"):
            pipe.chat(**values)


# -- the prompt's own log-probabilities


def test_a_prompt_is_scored(pipe, command):
    prompt = [70, 80, 90, 100, 110]
    logits = pipe.decoder(mx.array([prompt]))[0, :-1]
    want = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), mx.array(prompt[1:])[:, None], 1)
    answer = pipe.generate(prompt, prompt_logprobs=True, max_tokens=0)
    assert answer.tokens == [] and answer.logprobs is None
    assert [entry.token for entry in answer.prompt_logprobs] == prompt[1:]
    assert [entry.logprob for entry in answer.prompt_logprobs] == pytest.approx(want[:, 0].tolist(), abs=1e-4)
    answer = pipe.generate(prompt, prompt_logprobs=True, top_logprobs=2, n=2)
    assert [len(entry.top) for entry in answer.prompt_logprobs] == [2] * 4
    assert answer.others[0].prompt_logprobs is None and len(answer.others[0].logprobs) > 0
    shown = json.loads(command("prompt_logprobs=true", "output=json").out)
    assert len(shown["prompt_logprobs"]) == shown["prompt_tokens"] - 1 and "logprobs" not in shown


# -- several prompts


def test_several_prompts_at_once_are_each_as_alone(pipe):
    prompts = ["Hi", [70, 71, 72], "What is it?", [{"role": "user", "content": "Hi"}], "Hi"]
    together = pipe.generate_batch(prompts, top_logprobs=1)
    assert [told(one) for one in together] == [told(pipe.generate(prompt, top_logprobs=1)) for prompt in prompts]
    assert pipe.generate_batch([]) == []
    assert [len(one.others) for one in pipe.generate_batch(prompts[:2], n=3)] == [2, 2]


def test_one_prompt_that_is_wrong_is_an_error_and_the_engine_goes_on(pipe):
    want = told(pipe.generate("Hi"))
    for wrong in ([1] * 600, "", [5, 999]):
        with pytest.raises(mlxgen.RequestError, match="`prompt` must"):
            pipe.generate_batch(["Hi", wrong, "Hi"])
        assert not pipe.engine.scheduler.running and not pipe.engine.scheduler.prefilling
        assert told(pipe.generate("Hi")) == want


def test_what_is_wrong_with_one_of_many_is_its_own_result(pipe):
    """Errors of every kind, some at once and some on the way; the others never notice."""

    good = [("Hi", {}), ([70, 71, 72] * 9, {"seed": 3}), ("What?", {"n": 2}), ("Hi", {"beams": 2})]
    bad = [
        ([1] * 600, {}, "`prompt` must fit into"),
        ("", {}, "`prompt` must not be empty"),
        ("Hi", {"top_p": 7}, "`sampler.top_p` must be"),
        ("Hi", {"temprature": 1}, "is not a key of a request"),
        ("Hi", {"json_schema": {"type": "no such type"}}, "`json_schema`"),
        ("Hi", {"logit_bias": dict.fromkeys(range(298), -math.inf)}, "all excluded"),
        ("Hi", {"beams": 65}, "`beams` must be at most 64"),
        ("Hi", {"beams": 2, "n": 3}, "`n` must be at most `beams`"),
    ]
    jobs = [job for pair in itertools.zip_longest(bad, good) for job in pair if job is not None]
    results = dict(answer_all(pipe, [job[:2] for job in jobs], at_once=5))
    for place, (prompt, values, *message) in enumerate(jobs):
        if message:
            assert message[0] in str(results[place]) and "\n" not in str(results[place])
        else:
            assert told(results[place]) == told(pipe.generate(prompt, **values))
    assert not pipe.engine.scheduler.running and not pipe.engine.scheduler.prefilling

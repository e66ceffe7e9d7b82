"""What of a conversation is learned: what the assistant says, in all of its turns, with the end of each."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.errors import RequestError
from mlxgen.testing.tokenizers import tiny_bpe, tiny_sentencepiece
from mlxgen.tokenizer.answers import encode_answers
from mlxgen.tokenizer.chat import CHATML

TALK = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat and"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "on the"},
]
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Earlier thoughts are left out, as in Qwen3; the prompt for an answer begins a thought, as in DeepSeek-R1.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
INST = (  # as Llama 2's: a prompt ends with what closes the user's turn
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LAST_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if loop.last and m.role == 'assistant' %}{{ eos_token }}"
    "{% else %}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


# Of TALK with GENERATION, by transformers 5.24.0: apply_chat_template(..., return_assistant_tokens_mask=True).
TOKENS = [
    2, 121, 119, 264, 14, 120, 261, 286, 3, 14, 2, 101, 119, 119, 278, 120, 265, 120, 14, 119, 271, 36, 265, 104, 3, 14,
    2, 121, 119, 264, 14, 119, 115, 3, 14, 2, 101, 119, 119, 278, 120, 265, 120, 14, 267, 262, 3, 14,
]  # fmt: skip
MASK = [0] * 19 + [1] * 6 + [0] * 19 + [1] * 3 + [0]


def runs(tokenizer, encoded):
    """The texts that are learned."""
    texts, run = [], []
    for token, learned in [*zip(encoded.tokens, encoded.learned, strict=True), (0, False)]:
        if learned:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run, skip_special=False, continues=True))
            run = []
    return texts


def learned(template, messages, make=tiny_bpe, **options):
    tokenizer = make(chat_template=template)
    return [runs(tokenizer, part) for part in encode_answers(tokenizer, messages, **options)]


@pytest.mark.parametrize("make", [tiny_bpe, tiny_sentencepiece])
@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (GENERATION, "<|im_end|>"), (NO_END, "\n")]
)
def test_all_answers_are_learned_with_their_end_and_nothing_else(make, template, end):
    front = " " if template == NO_END else ""
    assert learned(template, TALK, make) == [[f"{front}sat and{end}", f"{front}on the{end}"]]


def test_an_answer_begins_where_the_prompt_for_it_ends():
    assert learned(INST, TALK) == [[" sat and</s>", " on the</s>"]]


def test_generation_blocks_are_those_that_transformers_finds():
    tokenizer = tiny_bpe(chat_template=GENERATION)
    (part,) = encode_answers(tokenizer, TALK)
    assert (part.tokens, [int(x) for x in part.learned]) == (TOKENS, MASK)


def test_an_end_behind_the_generation_block_is_learned_too():
    template = GENERATION.replace("{{ m.content + '<|im_end|>' }}{% endgen", "{{ m.content }}{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}"
    )
    assert learned(template, TALK) == [["sat and<|im_end|>", "on the<|im_end|>"]]


def test_where_earlier_turns_are_rewritten_each_answer_is_an_example():
    talk = [{**m, "content": f"<think>so</think>{m['content']}"} if m["role"] == "assistant" else m for m in TALK]
    assert learned(THINKING, talk) == [["so</think>sat and<|im_end|>"], ["so</think>on the<|im_end|>"]]
    assert learned(LAST_END, TALK) == [[" sat and</s>"], [" on the</s>"]]


def test_a_prompt_with_more_than_the_answers_header_does_not_hide_the_answer():
    assert learned(THINKING, TALK) == [["sat and<|im_end|>", "on the<|im_end|>"]]
    tagged = [TALK[0], {"role": "assistant", "content": "<b>"}]  # begins like the prompt's tag
    assert learned(THINKING, tagged) == [["<b><|im_end|>"]]


def test_an_assistant_may_speak_first():
    assert learned(CHATML, TALK[1:]) == [["sat and<|im_end|>", "on the<|im_end|>"]]


def test_turns_that_are_not_to_be_learned_are_not():
    assert learned(CHATML, TALK, learn=[False, False, False, True]) == [["on the<|im_end|>"]]
    assert learned(GENERATION, TALK, learn=[False, True, False, False]) == [["sat and<|im_end|>"]]


def test_an_answer_that_ends_with_none_of_the_ends_says_so():
    tokenizer = tiny_bpe(chat_template=NO_END)
    assert not encode_answers(tokenizer, TALK)[0].ended
    assert encode_answers(tiny_bpe(), TALK)[0].ended


def test_calls_of_tools_are_answers():
    calls = "(message.tool_calls | tojson if message.tool_calls else '')"
    template = CHATML.replace("message['content'] +", f"message['content'] + {calls} +")
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]}
    assert learned(template, [TALK[0], call]) == [['[{"name": "weather"}]<|im_end|>']]


def test_what_the_template_refuses_is_an_error():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    with pytest.raises(RequestError, match="no system"):
        learned(refusing, [{"role": "system", "content": "x"}, *TALK])


TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(["<|im_end|>", "\n\n", " the", "</s> <", "<|im_start|>user\n"]))


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=2, max_size=6),
    template=st.sampled_from([CHATML, GENERATION]),
    make=st.sampled_from([tiny_bpe, tiny_sentencepiece]),
)
def test_the_model_learns_just_what_it_has_to_say_after_the_prompt(texts, template, make):
    """The oracle: what generation starts from, and the answer that must follow, whatever is written in it."""
    tokenizer = make(chat_template=template)
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    talk = talk[: len(talk) // 2 * 2]
    (part,) = encode_answers(tokenizer, talk)
    end = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    starts = [i for i in range(1, len(part.tokens)) if part.learned[i] and not part.learned[i - 1]]
    assert len(starts) == len(talk) // 2
    for number, start in enumerate(starts):
        prompt = tokenizer.encode_chat(talk[: 2 * number + 1])
        stop = next(i for i in range(start, len(part.tokens) + 1) if part.learned[i : i + 1] != [True])
        assert part.tokens[stop - 1 : stop] == end
        said = tokenizer.decode(part.tokens[start : stop - 1], skip_special=False, continues=True)
        if part.tokens[:start] == prompt:
            assert said == talk[2 * number + 1]["content"]
        else:  # the vocabulary has a token that reaches from the prompt into the answer
            assert said.endswith(talk[2 * number + 1]["content"])

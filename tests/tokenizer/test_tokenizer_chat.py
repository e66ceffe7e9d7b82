"""Conversations through chat templates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.errors import RequestError, TokenizerError
from mlxgen.testing.tokenizers import tiny_bpe, tiny_sentencepiece
from mlxgen.tokenizer import ByteTokenizer, load_tokenizer
from mlxgen.tokenizer.chat import CHATML, ChatFormat

HI = [{"role": "user", "content": "Hi"}]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "20 <°C>"}
TOOL_TEMPLATE = r"""
{%- if tools %}
    {{- 'tools:' }}
    {%- for tool in tools %}
        {{- '\n' ~ tool | tojson }}
    {%- endfor %}
{% endif %}
{% for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {% for call in m.tool_calls or [] %}
  {{ call.function.name }}{{ call.function.arguments | tojson(indent=1) }}
    {% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
"""
# By transformers 5.24.0.
TOOL_PROMPT = """\
tools:
{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}<|im_start|>user
Hi
<|im_end|>
<|im_start|>assistant

  weather{
 "city": "Zürich"
}
<|im_end|>
<|im_start|>tool
20 <°C>
<|im_end|>
"""


def format_of(template, **options):
    return ChatFormat({"default": template}, tokens={"bos_token": "<s>", "eos_token": "</s>"}, **options)


def test_chatml():
    tokenizer = tiny_bpe()
    text = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, *HI])
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    expected += "<|im_start|>assistant\n"
    assert text == expected
    ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, *HI])
    assert tokenizer.decode(ids, skip_special=False) == expected
    assert [i for i in ids if i < 4] == [2, 3, 2, 3, 2]


# -- one BOS


@pytest.mark.parametrize("tokenizer", [tiny_bpe, tiny_sentencepiece])
def test_exactly_one_bos(tokenizer):
    both = tokenizer(chat_template="{{ bos_token }}" + CHATML, add_bos=True)
    assert both.encode_chat(HI).count(both.bos_id) == 1
    assert both.encode_chat(HI)[0] == both.bos_id
    assert both.encode("Hi").count(both.bos_id) == 1
    assert both.encode("<s>Hi").count(both.bos_id) == 1  # the user's is text
    assert both.encode("Hi", add_special=False).count(both.bos_id) == 0


def test_the_template_decides_about_bos():
    assert 0 not in tiny_bpe(add_bos=True).encode_chat(HI)


# -- messages


@pytest.mark.parametrize("content", [None, ""])
def test_null_content_is_empty_and_keeps_its_turn(content):
    text = format_of(CHATML).render([*HI, CALLED | {"content": content}, RESULT])
    assert text.count("<|im_start|>") == 4
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool" in text


def test_content_may_be_left_out():
    message = {"role": "assistant", "tool_calls": [CALL]}
    assert "assistant\n<|im_end|>" in format_of(CHATML).render([*HI, message])


def test_parts_are_all_there_in_order():
    assert "user\nab<|im_end|>" in format_of(CHATML).render([{"role": "user", "content": PARTS}])


@pytest.mark.parametrize("part", [{"type": "image_url", "url": "x"}, {"type": "text"}, {}, "text", 3])
def test_an_unknown_part_is_an_error(part):
    with pytest.raises(RequestError, match=r"`messages\[0\]\.content\[1\]` must be .*text only"):
        format_of(CHATML).render([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"`messages` must have at least one"),
        (["Hi"], r"`messages\[0\]` must be an object"),
        ([{"content": "Hi"}], r"`messages\[0\]` must be an object"),
        ([*HI, {"role": "user", "content": 3}], r"`messages\[1\]\.content` must be text"),
        ([{"role": "user", "content": "x", "extra": object()}], "plain data"),
    ],
)
def test_messages_of_the_wrong_form(messages, message):
    with pytest.raises(RequestError, match=message):
        format_of(CHATML).render(messages)


def test_messages_are_not_changed():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}]
    format_of(CHATML, fold_system=True).render(messages, continue_final=True)
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}]
    assert PARTS == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_templates_that_read_parts_only_get_parts():
    template = (
        "{% for m in messages %}{{ m.role }}:"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};"
        "{% endfor %}"
    )
    chat = format_of(template)
    assert chat.render(HI) == "user:Hi;"
    assert chat.render([{"role": "user", "content": PARTS}]) == "user:ab;"
    begun = [*HI, {"role": "assistant", "content": "the ca"}]
    assert chat.render(begun, continue_final=True) == "user:Hi;assistant:the ca"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_hidden_reasoning_has_one_name_in_templates(key):
    template = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}{% endfor %}"
    assert format_of(template).render([{"role": "assistant", "content": "a", key: "why"}]) == "why/why"


# -- refusals


def test_a_refusal_is_the_requests_fault_in_the_templates_words():
    chat = format_of(ALTERNATING)
    with pytest.raises(RequestError, match="System role not supported"):
        chat.render([{"role": "system", "content": "s"}, *HI])
    with pytest.raises(RequestError, match="must alternate user/assistant"):
        chat.render([*HI, *HI])


def test_a_system_message_can_be_folded_into_the_first_user_message():
    chat = format_of(ALTERNATING, fold_system=True)
    assert chat.render([{"role": "system", "content": "Be brief."}, *HI]) == "[user]Be brief.\n\nHi"
    system = {"role": "system", "content": "s"}
    later = [*HI, {"role": "assistant", "content": "a"}, system, system, *HI]
    assert chat.render(later) == "[user]Hi[assistant]a[user]s\n\ns\n\nHi"
    assert chat.render([system]) == "[user]s"


# -- arguments


def test_arguments_of_the_request_win_over_the_defaults():
    template = "{{ flag }}{{ other }}{{ messages[0].content }}{{ bos_token }}"
    chat = format_of(template, template_args={"flag": True, "other": 1})
    assert chat.render(HI) == "True1Hi<s>"
    assert chat.render(HI, template_args={"flag": False}) == "False1Hi<s>"
    tokenizer = tiny_bpe(chat_template="{{ flag }}")
    assert tokenizer.render_chat(HI, flag="off") == "off"


def test_add_generation_prompt_is_an_argument_like_others():
    text = format_of(CHATML).render(HI, template_args={"add_generation_prompt": False})
    assert text.endswith("<|im_end|>\n")


def test_tools_reach_the_template():
    assert format_of(TOOL_TEMPLATE).render([*HI, CALLED, RESULT], tools=[TOOL]) == TOOL_PROMPT


def test_the_template_for_tools_is_used_with_tools():
    chat = ChatFormat({"default": "plain", "tool_use": "tools"}, tokens={})
    assert (chat.render(HI), chat.render(HI, tools=[TOOL])) == ("plain", "tools")
    only = ChatFormat({"default": "plain"}, tokens={})
    assert only.render(HI, tools=[TOOL]) == "plain"


# -- an answer that is already begun


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_continued_message_ends_the_prompt_exactly(text):
    for tokenizer in (tiny_bpe(), ByteTokenizer()):
        messages = [*HI, {"role": "assistant", "content": text}]
        rendered = tokenizer.render_chat(messages, continue_final=True)
        assert rendered == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{text}"
        ids = tokenizer.encode_chat(messages, continue_final=True)
        assert tokenizer.decode(ids, skip_special=False) == rendered


def test_a_continued_message_of_a_trimming_template():
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    messages = [*HI, {"role": "assistant", "content": "the ca "}]
    assert format_of(trimming).render(messages, continue_final=True).endswith("assistant\nthe ca ")


def test_without_asking_an_assistant_message_is_complete():
    text = format_of(CHATML).render([*HI, {"role": "assistant", "content": "the ca"}])
    assert text.endswith("the ca<|im_end|>\n<|im_start|>assistant\n")


def test_a_message_that_the_template_hides_cannot_be_continued():
    hiding = format_of("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="cannot be continued"):
        hiding.render([*HI, {"role": "assistant", "content": "x"}], continue_final=True)


# -- which template


def test_no_template_says_what_to_do():
    tokenizer = tiny_bpe(chat_template=None)
    assert not tokenizer.has_chat_template and tiny_bpe().has_chat_template
    for method in (tokenizer.encode_chat, tokenizer.render_chat):
        with pytest.raises(TokenizerError, match=r"no chat template.*plain prompt.*`tokenizer\.chat"):
            method(HI)


def test_templates_of_ones_own(tmp_path):
    folder = tmp_path / "model"
    tiny_bpe(chat_template=None).save(folder)
    assert not load_tokenizer(folder).has_chat_template
    file = tmp_path / "own.jinja"
    file.write_bytes(b"file:\r\n{{ messages[0].content }}")
    # jinja2 reads every kind of line end as \n
    assert load_tokenizer(folder, chat_template=str(file)).render_chat(HI) == "file:\nHi"
    text = "text: {{ messages[0].content }}"
    assert load_tokenizer(folder, chat_template=text).render_chat(HI) == "text: Hi"
    assert load_tokenizer(folder, chat_template="chatml").render_chat(HI) == tiny_bpe().render_chat(HI)


def test_a_template_file_that_is_missing_or_broken_is_named(tmp_path):
    folder = tmp_path / "model"
    tiny_bpe().save(folder)
    with pytest.raises(TokenizerError, match=r"must be a \.jinja file.*nowhere\.jinja.*No such file"):
        load_tokenizer(folder, chat_template=str(tmp_path / "nowhere.jinja"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("a\n{% if %}")
    with pytest.raises(TokenizerError, match=r"broken\.jinja.*line 2"):
        load_tokenizer(folder, chat_template=str(broken))
    with pytest.raises(TokenizerError, match=r"`tokenizer\.chat_template`.*line 1"):
        load_tokenizer(folder, chat_template="{% endfor %}")


def test_a_broken_template_of_a_checkpoint_leaves_plain_prompts_alone():
    tokenizer = tiny_bpe(chat_template="{% if %}")
    assert tokenizer.encode("the")
    with pytest.raises(TokenizerError, match="line 1"):
        tokenizer.encode_chat(HI)


# -- where an answer ends


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, {1}), (CHATML, {1, 3}), ("{{ messages[0].content }}", {1})],
)
def test_the_end_of_a_turn_ends_an_answer_where_the_template_uses_it(template, expected):
    assert tiny_bpe(chat_template=template).eos_ids == expected

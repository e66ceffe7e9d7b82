"""A chat template cannot hang the program, fill its memory, or reach into Python."""

import time
import tracemalloc

import pytest

from mlxgen.errors import RequestError, TokenizerError
from mlxgen.tokenizer import sandbox
from mlxgen.tokenizer.template import SafeTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = "{% for i in range(99999) %}"
END = "{% endfor %}"
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = EXPRESSION %}"
DOUBLE += END + "{{ ns.x }}"


def render(source, **variables):
    return SafeTemplate(source).render({"messages": MESSAGES, **variables})


ENDLESS = {
    "a huge range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops without output": LONG * 3 + END * 3,
    "nested loops with output": LONG * 2 + "{{ i }}" + END * 2,
    "a loop whose filter is never true": LONG + "{% for j in range(99999) if false %}" + END * 2,
    "loops that ask for their length": LONG * 2 + "{{ loop.length }}" + END * 2,
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a loop inside itself": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "filters over long lists": LONG + "{% set x = range(99999) | list | sort %}" + END,
    "a call block": (
        "{% macro f() %}{{ caller() }}{% endmacro %}" + LONG * 2 + "{% call f() %}{% endcall %}" + END * 2
    ),
}

HUGE = {
    "repeated text": "{{ 'a' * 10**12 }}",
    "a repeated list": "{{ ([1] * 10**12) | length }}",
    "a power": "{{ 10 ** 10 ** 10 }}" * 2 + "{{ (10 ** 9999) ** 9999 }}",
    "padding": "{{ 'a' | center(1000000000) }}",
    "padding by a method": "{{ 'a'.ljust(1000000000) }}",
    "a wide number": "{{ '%01000000000d' % 1 }}",
    "a width from an argument": "{{ '%*d' % (1000000000, 1) }}",
    "a wide format": "{{ '{:>1000000000}'.format(1) }}",
    "a format within a format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "a wide filter": "{{ '%1000000000d' | format(1) }}",
    "indentation": "{{ messages | tojson(indent=1000000000) }}",
    "doubling by ~": DOUBLE.replace("EXPRESSION", "ns.x ~ ns.x"),
    "doubling by +": DOUBLE.replace("EXPRESSION", "ns.x + ns.x"),
    "doubling by join": DOUBLE.replace("EXPRESSION", "[ns.x, ns.x] | join"),
    "doubling by replace": DOUBLE.replace("EXPRESSION", "ns.x | replace('a', ns.x)"),
    "doubling by a method": DOUBLE.replace("EXPRESSION", "ns.x.replace('a', ns.x)"),
    "doubling by references": DOUBLE.replace("EXPRESSION", "[ns.x, ns.x]"),
    "doubling by a dictionary": DOUBLE.replace("EXPRESSION", "{'a': ns.x, 'b': ns.x}"),
    "doubling by dict()": DOUBLE.replace("EXPRESSION", "dict(a=ns.x, b=ns.x)"),
    "doubling by a block": DOUBLE.replace(
        "{% set ns.x = EXPRESSION %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "text between loops": LONG + "x" * 5000 + END,
    "mapped replacement": "{{ range(99999) | map('string') | map('replace', '9', 'x' * 9999) | join }}",
    "rounding": "{{ 5 | round(-1000000000) }}",
    "stripping many characters": "{{ ('a' * 9999999).strip('b' * 9999999) }}",
    "lists of text": "{{ ['a' * 999999] * 999999 }}",
}

ESCAPES = {
    "a class": "{{ ''.__class__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ messages.__init__.__globals__ }}",
    "attr": "{{ '' | attr('__class__') }}",
    "an item": "{{ ''['__class__'] }}",
    "a function's code": "{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "the template": "{{ self.__init__ }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "a slow encoding": "{{ ('é' * 999999).encode('punycode') }}",
    "a private name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
}


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_never_ends_is_stopped(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TokenizerError, match=r"`tokenizer\.chat_template` must end within") as caught:
        render(source)
    assert time.monotonic() - start < 15  # and not for ever
    one_line(caught)


def test_steps_are_counted_so_that_a_slow_machine_stops_at_the_same_place():
    with pytest.raises(TokenizerError, match=r"1,000,000 steps"):
        render(LONG * 2 + END * 2)


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_a_template_that_grows_is_stopped(source):
    template = SafeTemplate(source)
    tracemalloc.start()
    try:
        with pytest.raises(TokenizerError, match="needs too much") as caught:
            template.render({"messages": MESSAGES})
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    one_line(caught)


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_stays_in_its_sandbox(source):
    with pytest.raises(TokenizerError, match="must stay inside the sandbox") as caught:
        render(source)
    one_line(caught)


@pytest.mark.parametrize("name", ["include '/etc/passwd'", "import 'os' as os", "extends 'base'"])
def test_a_template_cannot_load_another(name):
    with pytest.raises(RequestError, match="no loader"):
        render("{% " + name + " %}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nofilter }}", "{% for x in y %}", "{{ " + "(" * 5000])
def test_a_template_that_is_none(source):
    with pytest.raises(TokenizerError, match=r"`tokenizer\.chat_template`") as caught:
        SafeTemplate(source)
    one_line(caught)


def test_a_refusal_carries_the_templates_words():
    with pytest.raises(RequestError, match="refuses this conversation: System role not supported"):
        render("{{ raise_exception('System role\n not supported') }}")


@pytest.mark.parametrize("source", ["{{ messages[0].missing.field }}", "{{ 'a' + none }}", "{{ 1 / 0 }}"])
def test_what_a_template_cannot_render_is_the_requests_fault(source):
    with pytest.raises(RequestError, match="cannot render this conversation") as caught:
        render(source)
    one_line(caught)


def test_ordinary_templates_are_not_disturbed():
    source = (
        "{% macro show(x) %}<{{ x }}>{% endmacro %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ show(m.content | trim | upper) }}{% endfor %}"
        "{{ [1, 2] + [3] }}{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ (7 % 4, 2 ** 10) }}{{ '%02d' % 5 }}"
        "{{ {'a': [1]}.items() | list }}{{ 'a,b'.split(',') | join('-') }}{{ '{}-{}'.format(1, 2) }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}"
        "{{ messages[::-1][0].role }}{{ 'ab'[0] }}{{ x is defined }}{{ x.y | default('d') if x else 'e' }}"
        "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}"
        "{% generation %}G{% endgeneration %}{{ 'a\nb' | indent(2) }}{{ namespace(a=1).a }}{{ dict(a=1).a }}"
    )
    assert render(source) == (
        "1/1True<HI>[1, 2, 3]a1Nonexxx(3, 1024)05[('a', [1])]a-b1-2['hi']useraFalsee02Ga\n  b11"
    )


def test_json_is_written_as_models_were_trained_on_it():
    value = {"b": "<é & 'x'>", "a": [1, None, True]}
    assert render("{{ x | tojson }}", x=value) == '{"b": "<é & \'x\'>", "a": [1, null, true]}'
    assert render("{{ x | tojson(sort_keys=true) }}", x={"b": 1, "a": 2}) == '{"a": 2, "b": 1}'
    assert render("{{ x | tojson(indent=2) }}", x={"a": 1}) == '{\n  "a": 1\n}'
    assert render("{{ x | tojson(false, none, (',', ':')) }}", x={"a": 1}) == '{"a":1}'


def test_blocks_leave_no_lines_behind():
    assert render("{% if true %}\n  a\n    {% endif %}\nb\n") == "  a\nb"


def test_today():
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_a_long_conversation_fits_the_budget():
    turns = [{"role": role, "content": "word " * 500} for role in ("user", "assistant")] * 800
    source = "{% for m in messages %}{% for p in range(3) %}{% endfor %}{{ m.role ~ m.content }}{% endfor %}"
    assert len(render(source, messages=turns)) > 4_000_000

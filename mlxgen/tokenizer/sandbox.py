"""Jinja for strangers: a chat template comes with a checkpoint, so it must not be able to do harm.

jinja2's own sandbox keeps templates away from Python's internals and from changing their arguments. It
does not bound time or memory, so here every loop turn, macro and call counts against a budget, and every
operation that can grow a value (`~`, `*`, `+`, `%`, `**`, literals, filters, `str` methods, output) is
weighed first. The counting is compiled into the template: a loop that writes nothing is counted as well.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # loop turns, macros and calls; a conversation of 1000 messages needs about 10,000
MAX_SECONDS = 5.0
MAX_CHARS = 1 << 24  # of one value, and of all output together; a million tokens are about 4 million
MAX_WIDTH = 10_000  # of padding and indentation
MAX_DIGITS = 10_000

# The result, or the time, of these can be the product of the sizes of what they are given.
_GROWING = {"center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "lstrip", "replace"}
_GROWING |= {"rjust", "round", "rstrip", "strip", "tojson", "trim", "truncate", "urlencode", "zfill"}
_WRITING = {"capitalize", "e", "escape", "list", "lower", "safe", "sort", "string", "title", "upper"}
_LAZY = {"first", "map", "reject", "rejectattr", "select", "selectattr"}
# Random, slow, or of no use in plain text.
_UNWANTED = ("forceescape", "pprint", "random", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
_UNWANTED_METHODS = {"encode", "maketrans", "to_bytes", "translate"}
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|:[^{}]*(?:\d{5}|\{)")


class Refusal(TemplateError):
    """The template called `raise_exception`."""


class TooMuch(Exception):
    """The template's budget is used up."""


def _too_much(what: str) -> NoReturn:
    raise TooMuch(what)


def weigh(value: Any, memo: dict[int, int] | None = None) -> int:
    """About how many characters `value` has when written out.

    Containers that are reached twice count twice but are visited once, so that a value whose size is
    exponential in its depth is weighed in linear time.
    """
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return 1
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo[id(value)] = 1
        memo[id(value)] = 2 + sum(weigh(item, memo) for item in value)
        if isinstance(value, Mapping):
            memo[id(value)] += sum(weigh(item, memo) for item in value.values())
    return memo[id(value)]


def _magnitude(value: Any) -> int:
    """By what factor an argument can multiply what it is applied to."""
    return max(1, abs(value)) if isinstance(value, int) else weigh(value)


def _budget(method: str, first: nodes.Expr, *rest: nodes.Expr, line: int) -> nodes.Filter:
    """A call of the environment's. A filter is the cheapest one; the space keeps its name out of a template's reach."""
    call = nodes.Filter(first, f"budget {method}", list(rest), [], None, None)
    call.set_lineno(line)
    return call


class _Instrument(NodeTransformer):
    """Compile the counting into the template's syntax tree."""

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        tick = _budget("tick", nodes.Const(written), line=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_FilterBlock = _counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _budget("join_text", *node.nodes, line=node.lineno)

    def _bounded(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(i, nodes.Const) for i in node.items):
            return node
        return _budget("bounded", node, line=node.lineno)

    visit_List = visit_Tuple = visit_Dict = _bounded


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote: the environment's `blocks` stand before and after it."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        edges = [nodes.Output([_budget(edge, nodes.Const(""), line=line)]) for edge in ("opening", "closing")]
        return nodes.Scope([edges[0], *body, edges[1]]).set_lineno(line)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"attribute {name!r} of a namespace is private")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML and non-ASCII, and no model was trained on that.

    The arguments are in the order that templates of the hub pass them.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(str(message))


class _Lazy(dict[str, Callable[..., Any]]):
    """Filters that are guarded when a template asks for them: it knows fifty and needs three."""

    def __init__(self, guard: Callable[..., Any], filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._guard, self._filters = guard, filters

    def __missing__(self, name: str) -> Callable[..., Any]:
        self[name] = self._guard(name, self._filters[name])
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._filters

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One per rendering: it holds that rendering's budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, blocks: tuple[str, str] = ("", "")) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self.output,
            optimized=False,  # or counting would be folded into constants
            cache_size=0,
        )
        self.steps, self.chars, self.deadline = 0, 0, time.monotonic() + MAX_SECONDS
        self.blocks = blocks
        self.filters["tojson"] = _tojson
        for name in _UNWANTED:
            del self.filters[name]
        self.filters = _Lazy(self._guarded, self.filters)
        for method in (self.tick, self.bounded, self.join_text, self.opening, self.closing):
            self.filters[f"budget {method.__name__}"] = method
        del self.globals["lipsum"]
        self.globals |= {
            "namespace": _Namespace,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "raise_exception": _raise_exception,
            "strftime_now": lambda layout: datetime.now().strftime(layout),
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)

    # -- the budget

    def tick(self, chars: int = 0) -> None:
        self.steps += 1
        self.chars += chars
        if self.steps > MAX_STEPS or time.monotonic() > self.deadline:
            _too_much("time")
        if self.chars > MAX_CHARS:
            _too_much("text")

    def output(self, value: Any) -> Any:
        """Every `{{ value }}` on its way to text."""
        self.tick(weigh(value))
        return value

    def bounded(self, value: Any) -> Any:
        if weigh(value) > MAX_CHARS:
            _too_much("memory")
        return value

    def join_text(self, *parts: Any) -> str:
        self.bounded(parts)
        return "".join(map(str, parts))

    def opening(self, value: str) -> str:
        return self.blocks[0]

    def closing(self, value: str) -> str:
        return self.blocks[1]

    def _collect(self, value: Any) -> Any:
        """An iterator as a list: what it yields can be weighed only once it is there."""
        if not isinstance(value, Iterator):
            return value
        items, size = [], 0
        for item in value:
            self.tick()
            size += weigh(item)
            if size > MAX_CHARS:
                _too_much("memory")
            items.append(item)
        return items

    def _check_growth(self, name: str, value: Any, args: tuple[Any, ...]) -> None:
        size = weigh(value)
        if name == "replace" and len(args) > 1:
            size *= _magnitude(args[1])
        elif name in _GROWING:
            if any(isinstance(arg, int) and abs(arg) > MAX_WIDTH for arg in args):
                _too_much("width")
            for arg in args:
                size *= _magnitude(arg)
        if size > MAX_CHARS:
            _too_much("memory")

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts and is weighed before it runs."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if name not in _LAZY:
                args = tuple(self._collect(arg) for arg in args)
            if name == "format":
                self._check_format(args[first])
            if name in _GROWING or name in _WRITING:
                self._check_growth(name, args[first], (*args[first + 1 :], *kwargs.values()))
            return function(*args, **kwargs)

        return guarded

    # -- what the sandbox asks before it acts

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.tick()
        args = tuple(self._collect(arg) for arg in args)
        own = [value for key, value in kwargs.items() if not key.startswith("_")]  # the rest is jinja2's
        self.bounded([args, own])
        receiver, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(receiver, str) and name in _GROWING:
            self._check_growth(name, receiver, (*args, *own))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "%" and isinstance(left, str):
            self._check_format(left)
            self._check_growth("%", [left, right], ())
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > 4 * MAX_DIGITS and operator in ("*", "**"):
                _too_much("digits")
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and weigh(sequence) * max(times, 1) > MAX_CHARS:
                _too_much("memory")
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            long = len(left) + len(right)
            if long > MAX_CHARS or (long > 4096 and weigh(left) + weigh(right) > MAX_CHARS):
                _too_much("memory")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self._check_format(value.__self__)
        return wrapped

    def _check_format(self, layout: Any) -> None:
        if isinstance(layout, str) and _WIDE_FORMAT.search(layout):
            _too_much("width")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNWANTED_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:  # type: ignore[override]
        """jinja2 lets a template print an unsafe attribute as nothing; say so instead."""
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is private")

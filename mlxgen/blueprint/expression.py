"""The small language of blueprint values: `${name}` and `${function:argument,argument}`, nestable.

    ${config.hidden}                     another value of the blueprint
    ${hf:n_embd|hidden_size,1024}        the checkpoint's config.json, first key present, else the default
    ${idiv:${config.hidden},${config.heads}}

Arguments are evaluated only when used, so a default may itself look things up. Plain arguments are YAML scalars.
There is no arithmetic beyond a few named functions and no way to call code.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from mlxgen.blueprint.rope import yarn_mscale
from mlxgen.errors import ConfigError, did_you_mean
from mlxgen.yaml_text import read_yaml

Thunk = Callable[[], Any]
Function = Callable[..., Any]  # receives thunks

_WHOLE = re.compile(r"\$\{.*\}", re.DOTALL)


def split_arguments(text: str) -> list[str]:
    """Split at commas that stand outside braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


class Evaluator:
    """Evaluates trees of plain data with expressions inside.

    `names(path)` looks up `${a.b}`; `functions` are called with unevaluated arguments (thunks).
    """

    def __init__(
        self,
        names: Callable[[str], Any],
        functions: Mapping[str, Function],
        on_text: Callable[[str], None] = lambda text: None,
    ):
        """`on_text` hears of every expression of a tree that is evaluated, whole."""
        self._names, self._on_text = names, on_text
        self._functions = {**ARITHMETIC, **functions}

    def tree(self, node: Any, path: str) -> Any:
        """The same tree with every expression replaced by its value; `path` is its place, for messages.

        A mapping with the key `use` is optional: where that is false, it is null, and nothing in it is evaluated.
        """
        if isinstance(node, Mapping):
            if not self.tree(node.get("use", True), f"{path}.use"):
                return None
            return {k: self.tree(v, f"{path}.{k}") for k, v in node.items() if k != "use"}
        if isinstance(node, list | tuple):
            return [self.tree(v, f"{path}[{i}]") for i, v in enumerate(node)]
        if isinstance(node, str) and "${" in node:
            self._on_text(node)
            try:
                return self.expression(node)
            except (ValueError, TypeError, ZeroDivisionError, IndexError, KeyError) as error:
                raise ConfigError(f"`{path}` can't be computed from {node!r}: {error}.") from error
        return node

    def expression(self, text: str) -> Any:
        text = text.strip()
        if not _WHOLE.fullmatch(text):
            return read_yaml(text) if text else ""
        name, colon, rest = text[2:-1].partition(":")
        if not colon:
            return self._names(name.strip())
        function = self._functions.get(name)
        if function is None:
            raise ConfigError(f"unknown function `{name}` in {text!r}.{did_you_mean(name, self._functions)}")
        return function(*[self._thunk(part) for part in split_arguments(rest)])

    def _thunk(self, text: str) -> Thunk:
        return lambda: self.expression(text)


def _strict(function: Callable[..., Any]) -> Function:
    return lambda *thunks: function(*[thunk() for thunk in thunks])


def _if(condition: Thunk, then: Thunk, otherwise: Thunk) -> Any:
    return then() if condition() else otherwise()


def _at(sequence: Any, index: int) -> Any:
    """Element `index` of a list; a value that is no list is the same everywhere."""
    return sequence[index] if isinstance(sequence, list | tuple) else sequence


def _bfloat16(x: float) -> float:
    """The nearest bfloat16, ties to even: the upper half of a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


ARITHMETIC: dict[str, Function] = {
    "add": _strict(lambda a, b: a + b),
    "sub": _strict(lambda a, b: a - b),
    "mul": _strict(lambda a, b: a * b),
    "div": _strict(lambda a, b: a / b),
    "idiv": _strict(lambda a, b: int(a) // int(b)),
    "mod": _strict(lambda a, b: a % b),
    "imul": _strict(lambda a, b: int(a * b)),
    "sqrt": _strict(math.sqrt),
    "exp": _strict(math.exp),
    "bfloat16": _strict(_bfloat16),
    "rsqrt": _strict(lambda a: 1.0 / math.sqrt(a)),
    "not": _strict(lambda a: not a),
    "eq": _strict(lambda a, b: a == b),
    "in": _strict(lambda a, b: a in b),
    "lt": _strict(lambda a, b: a < b),
    "yarn_mscale": _strict(yarn_mscale),
    "and": lambda a, b: a() and b(),
    "or": lambda a, b: a() or b(),
    "at": _strict(_at),
    "len": _strict(len),
    "count": _strict(lambda items, item: items.count(item)),
    "if": _if,
}

"""What an answer may be: JSON of a schema, a regular expression, a grammar, or one of a few texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxgen.errors import ConfigError

KINDS = ("json_schema", "regex", "grammar", "choice")
# Between the tokens of JSON: a blank, or a line break with indentation. Small models lose themselves in endless blanks.
_JSON_SPACE = r" |\n[ \t]{0,64}"


@dataclass(frozen=True)
class Constraint:
    """One rule for a whole answer. `kind` is one of KINDS, and its key in the configuration.

    json_schema: a mapping, true, or JSON text. regex: the whole answer matches it (syntax of Rust's regex crate,
    without look-around). grammar: Lark with a rule `start`, in llguidance's dialect, or llama.cpp's GBNF.
    choice: texts.
    """

    kind: str
    value: Any

    def source(self) -> str:
        """The grammar as llguidance reads it. Raises ConfigError for what is no schema, text or list."""
        readers = {"json_schema": self._schema, "regex": self._regex, "grammar": self._lark, "choice": self._choice}
        return readers[self.kind]()

    def check(self) -> None:
        """Raise ConfigError for a rule that can't be read or satisfied, before there is a vocabulary."""
        from llguidance import LLMatcher

        if problem := LLMatcher.validate_grammar(self.source(), limits=limits()):
            raise refused(self.kind, f"is none: {reason(problem)}")

    def _schema(self) -> str:
        schema = self.value
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise refused(self.kind, f"{_shortened(self.value)} is neither JSON nor a file ({error})") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise refused(self.kind, f"is {_shortened(repr(schema))}")
        own = schema.get("x-guidance")
        options = {"whitespace_pattern": _JSON_SPACE, **(own if isinstance(own, Mapping) else {})}
        try:
            return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
        except (TypeError, ValueError, RecursionError) as error:
            raise refused(self.kind, f"holds what JSON can't: {error}") from None

    def _regex(self) -> str:
        from llguidance import regex_to_lark

        text = self._text()
        if (len(text) - len(text.rstrip("\\"))) % 2:
            raise refused(self.kind, "ends with a backslash")
        regex = regex_to_lark(text, use_ascii="d")  # digits are 0 to 9
        return f"start: /{regex}/" if regex else 'start: ""'

    def _lark(self) -> str:
        from llguidance import grammar_from

        text = self._text()
        try:
            return grammar_from("grammar" if "::=" in text else "lark", text)
        except ValueError as error:
            raise refused(self.kind, f"is none: {reason(str(error))}") from None

    def _choice(self) -> str:
        choices = self.value
        if not isinstance(choices, list | tuple) or not choices or not all(isinstance(c, str) for c in choices):
            raise refused(self.kind, f"is {list(choices) if isinstance(choices, tuple) else choices!r}")
        return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))

    def _text(self) -> str:
        if not isinstance(self.value, str):
            raise refused(self.kind, f"is {self.value!r}")
        try:
            self.value.encode()
        except UnicodeEncodeError:
            raise refused(self.kind, "has half of a surrogate pair") from None
        return self.value


_RULES = {
    "json_schema": "a JSON schema that something satisfies",
    "regex": "a regular expression",
    "grammar": "a Lark grammar with a rule `start`, or a file with one",
    "choice": "a list of texts, at least one",
}


def refused(kind: str, why: str) -> ConfigError:
    return ConfigError(f"`{kind}` must be {_RULES[kind]}, but {why}.")


def constraint_of(values: Mapping[str, Any]) -> Constraint | None:
    """The rule among a request's values, of which there is at most one."""
    given = [kind for kind in KINDS if values.get(kind) is not None]
    assert len(given) <= 1
    return Constraint(given[0], values[given[0]]) if given else None


def limits() -> Any:
    """What a grammar may cost: one that explodes ends its own answer, with an error."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=1000, max_lexer_states=50_000, verbose_errors=False)


def reason(problem: str) -> str:
    """What a message of llguidance says, in one line."""
    if problem.startswith("panic"):
        return "it is too large"
    _, found, cause = problem.partition("\nerror: ")  # the regex crate draws a picture in front of its reason
    return (cause if found else problem).partition("\n")[0].rstrip(".")


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."

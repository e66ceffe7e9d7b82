"""A chat template that is compiled once and rendered within limits; what goes wrong becomes one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from mlxgen.errors import RequestError, TokenizerError
from mlxgen.tokenizer.sandbox import MAX_CHARS, MAX_SECONDS, MAX_STEPS, Refusal, TemplateEnvironment, TooMuch


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class SafeTemplate:
    """A compiled template. Rendering shares nothing, so threads may render at the same time."""

    def __init__(self, source: str, where: str = "tokenizer.chat_template") -> None:
        """`where` names the template in messages. TokenizerError if it is not valid."""
        self.source, self.where = source, where
        try:
            self._code = TemplateEnvironment().compile(source, filename="<chat_template>")
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"`{where}` must be a valid Jinja template, but line {error.lineno}: {_one_line(error)}"
            ) from None
        except (TooMuch, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise TokenizerError(
                f"`{where}` must be a Jinja template that can be compiled, but: {_one_line(error)}"
            ) from None

    def render(self, variables: Mapping[str, Any], blocks: tuple[str, str] = ("", "")) -> str:
        """`blocks`: what to write before and after each `{% generation %}` block.

        Errors: RequestError with the template's own words, or if the conversation does not suit it;
        TokenizerError if it leaves the sandbox or the budget."""
        environment = TemplateEnvironment(blocks)
        template = Template.from_code(environment, self._code, environment.make_globals(None))
        try:
            return template.render(variables)
        except Refusal as error:
            raise RequestError(f"The chat template refuses this conversation: {_one_line(error)}") from None
        except SecurityError as error:
            raise TokenizerError(
                f"`{self.where}` must stay inside the sandbox, but: {_one_line(error)}"
            ) from None
        except (TooMuch, RecursionError, MemoryError, OverflowError) as error:
            raise TokenizerError(
                f"`{self.where}` must end within {MAX_STEPS:,} steps, {MAX_SECONDS:g} s and {MAX_CHARS:,} "
                f"characters, but needs too much ({_one_line(error)})."
            ) from None
        except Exception as error:
            cause = f"{type(error).__name__}: {_one_line(error)}"
            raise RequestError(f"The chat template cannot render this conversation: {cause}") from None

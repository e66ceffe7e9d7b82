"""Conversations to learn from: token ids, and which of them the assistant says.

What the assistant says in a turn is what the rendered conversation has beyond the prompt for that turn. Where a
template names it with `{% generation %}`, that counts. Where it writes a turn differently once others follow it, as
templates do that leave out earlier thoughts, every answer becomes an example of its own, as the model will see it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.errors import RequestError
from mlxgen.protocols import Message
from mlxgen.tokenizer.fast import FastTokenizer
from mlxgen.tokenizer.guard import random_digits

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """learned[i]: whether the assistant says token i. ended: whether its last answer has an end of turn."""

    tokens: list[int]
    learned: list[bool]
    ended: bool


def encode_answers(
    tokenizer: FastTokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    learn: Sequence[bool] | None = None,
    eos_ids: frozenset[int] | None = None,
    **template_args: Any,
) -> list[Encoded]:
    """One example, or one for each answer where the template rewrites earlier turns.

    learn: for each message, whether it is to be learned; None: the assistant's. eos_ids: tokens that end an answer.
    The end of an answer is learned with it, what the template writes behind it is not.
    Raises RequestError for messages that the template refuses, and where answers cannot be told from the rest.
    """
    says = [message.get("role") == "assistant" for message in messages] if learn is None else list(learn)
    page = _Page(tokenizer, messages, tools, template_args, tokenizer.eos_ids if eos_ids is None else eos_ids)
    answers = [i for i, wanted in enumerate(says) if wanted]
    every = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if tokenizer.chat is not None and tokenizer.chat.names_generation:
        text, blocks = page.generated()
        if len(blocks) == len(every):
            return [page.encode(text, [blocks[every.index(i)] for i in answers])]
    whole = page.render(len(messages))
    spans = [page.span(i, whole) for i in answers]
    if all(spans):
        return [page.encode(whole, [span for span in spans if span])]
    return [page.alone(i) for i in answers]


class _Page:
    """A conversation and its renderings."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
        eos_ids: frozenset[int],
    ) -> None:
        self._tokenizer, self._messages, self._tools = tokenizer, messages, tools
        self._template_args, self._eos_ids = template_args, eos_ids

    def render(self, count: int, *, opened: bool = False) -> str:
        """The first `count` messages."""
        return self._render(self._messages[:count], opened=opened)

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        return self._tokenizer.render_marked(messages, tools=self._tools, **options, **self._template_args)

    def generated(self) -> tuple[str, list[Span]]:
        """The conversation, and where the template's generation blocks are in it."""
        edges = random_digits(), random_digits()
        text, spans = "", []
        before, *parts = self._render(self._messages, opened=False, blocks=edges).split(edges[0])
        text += before
        for part in parts:
            said, _, after = part.partition(edges[1])
            spans.append((len(text), len(text) + len(said)))
            text += said + after
        return text, spans

    def alone(self, i: int) -> Encoded:
        """The conversation up to answer i, which alone is learned."""
        text = self.render(i + 1)
        span = self.span(i, text)
        if span is None:
            raise RequestError(f"The chat template does not show where the answer of message {i} begins.")
        return self.encode(text, [span])

    def span(self, i: int, whole: str) -> Span | None:
        """Where message i stands in `whole`; None if the template writes it differently once others follow."""
        start = self._start(i, whole)
        if start is None:
            return None
        if i == len(self._messages) - 1:
            return start, len(whole)
        closed = self.render(i + 1)
        return (start, len(closed)) if whole.startswith(closed) else None

    def _start(self, i: int, whole: str) -> int | None:
        """Where what the prompt for message i does not have begins."""
        prompt = self._prompt(i, opened=True)
        if prompt is None:
            return self._start_of_content(i, whole)
        if whole.startswith(prompt):
            return len(prompt)
        before = self._prompt(i, opened=False)
        if before is None or not whole.startswith(before):
            return None
        start = _common(prompt, whole)  # the header of the turn, without what only a prompt has behind it
        content = self._content(i)
        at = whole.find(content, len(before)) if content else -1
        return min(start, at) if at >= 0 else start

    def _prompt(self, i: int, *, opened: bool) -> str | None:
        """The messages before i; None if they make no prompt: there are none, or the template refuses them."""
        try:
            return self.render(i, opened=opened) if i else None
        except RequestError:
            return None

    def _content(self, i: int) -> str:
        content = self._messages[i].get("content")
        return self._tokenizer.mark(content.strip()) if isinstance(content, str) else ""

    def _start_of_content(self, i: int, whole: str) -> int | None:
        """By a mark in front of the message's text."""
        mark, message = random_digits(), dict(self._messages[i])
        if not isinstance(message.get("content"), str):
            return None
        message["content"] = mark + message["content"]
        text = self._render([*self._messages[:i], message, *self._messages[i + 1 :]], opened=False)
        at = text.find(mark)
        return at if at >= 0 and whole.startswith(text[:at]) else None

    def encode(self, text: str, spans: Sequence[Span]) -> Encoded:
        ids, ends_at = self._tokenizer.encode_aligned(text)
        learned = [False] * len(ids)
        ended = True
        for start, stop in spans:
            first, last = (self._index(text, at, ids, ends_at) for at in (start, stop))
            ends = [at for at in range(first, last) if ids[at] in self._eos_ids]
            if not ends and last < len(ids) and ids[last] in self._eos_ids:
                ends = [last]  # a generation block that leaves the end of the turn out
            last, ended = (ends[-1] + 1, True) if ends else (last, False)
            learned[first:last] = [True] * (last - first)
        return Encoded(tokens=ids, learned=learned, ended=ended)

    def _index(self, text: str, at: int, ids: Sequence[int], ends_at: Sequence[int] | None) -> int:
        """How many tokens stand before a character. A token that reaches over it counts to what follows."""
        if at >= len(text):
            return len(ids)
        if ends_at is not None:
            return bisect_right(ends_at, at)
        before = self._tokenizer.encode_marked(text[:at])
        return len(before) if ids[: len(before)] == before else _common(before, ids)


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

"""Rows to examples: tokens, and which of them are learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxgen.errors import DataError, RequestError, TokenizerError
from mlxgen.tokenizer.answers import encode_answers
from mlxgen.tokenizer.fast import FastTokenizer
from mlxgen.training.batch import Example
from mlxgen.training.data.shapes import Continuation, Dialog, Form, Text

NO_ANSWER = "no answer"
TOO_LONG = "longer than data.max_length"
ANSWER_TOO_LONG = "the answer alone is longer than data.max_length"
CUT = "cut from the left to data.max_length"
PIECES = "cut into pieces of data.max_length"
NO_END = "the template ends no turn: the end of a text is learned after the last answer"
SEPARATE = "each answer is an example of its own, as the template writes earlier turns differently"
TRAILING = "messages after the last answer are left out"


class Dropped(Exception):
    """A row that gives no example; the reason is its text."""


@dataclass(kw_only=True)
class Encoder:
    """What is the same for all rows. `notes` gets what was done to a row besides reading it."""

    tokenizer: FastTokenizer
    max_length: int
    too_long: str = "drop"
    learn_all: bool = False
    raw: bool = False
    eos_ids: frozenset[int] = frozenset()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __call__(self, form: Form, place: str) -> list[Example]:
        """The examples of a row, each with something to learn. Raises Dropped with the reason, or DataError."""
        self.notes.clear()
        try:
            parts = list(self._parts(form))
        except RequestError as error:
            raise DataError(f"{place}: {error}") from None
        text = isinstance(form, Text)
        examples = [example for part in parts for example in self._fitted(*part, place, text)]
        if not examples:
            raise Dropped(NO_ANSWER)
        return examples

    def _parts(self, form: Form) -> Iterator[tuple[list[int], list[bool]]]:
        tokenizer = self.tokenizer
        if isinstance(form, Text):
            if not form.text.strip():
                raise Dropped(NO_ANSWER)
            yield self._with_end(tokenizer.encode(form.text), [])
        elif isinstance(form, Continuation) and (self.raw or not tokenizer.has_chat_template):
            if not form.completion.strip():
                raise Dropped(NO_ANSWER)
            yield self._continued(form)
        else:
            yield from self._turns(_dialog(form))

    def _continued(self, form: Continuation) -> tuple[list[int], list[bool]]:
        """The whole is encoded at once; what the prompt alone gives differently is part of the answer."""
        whole, prompt = (self.tokenizer.encode(text) for text in (form.prompt + form.completion, form.prompt))
        same = next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
        return self._with_end(whole, [False] * min(same, len(whole) - 1))

    def _with_end(self, tokens: list[int], learned: list[bool]) -> tuple[list[int], list[bool]]:
        """Tokens and the end of a text; all that `learned` says nothing of is learned."""
        end = self._end_of_text()
        if end is not None and tokens[-1:] != [end]:
            tokens = [*tokens, end]
        return tokens, learned + [True] * (len(tokens) - len(learned))

    def _turns(self, dialog: Dialog) -> Iterator[tuple[list[int], list[bool]]]:
        learn = [_is_answer(message) for message in dialog.messages]
        if not any(learn):
            raise Dropped(NO_ANSWER)
        last = len(learn) - learn[::-1].index(True)
        if last < len(learn):
            self.notes.append(TRAILING)
        messages = [{k: v for k, v in m.items() if k != "weight"} for m in dialog.messages[:last]]
        encoded = encode_answers(
            self.tokenizer,
            messages,
            tools=dialog.tools,
            learn=learn[:last],
            eos_ids=self.eos_ids,
            **self.template_args,
        )
        if len(encoded) > 1:
            self.notes.append(SEPARATE)
        for part in encoded:
            tokens, learned = part.tokens, part.learned
            if not part.ended and (end := self._end_of_text()) is not None:
                self.notes.append(NO_END)
                tokens, learned = [*tokens, end], [*learned, True]
            yield tokens, [True] * len(tokens) if self.learn_all else learned

    def _end_of_text(self) -> int | None:
        tokenizer = self.tokenizer
        return tokenizer.end_of_text if tokenizer.end_of_text is not None else min(self.eos_ids, default=None)

    def _fitted(self, tokens: list[int], learned: list[bool], place: str, text: bool) -> Iterator[Example]:
        """Without what stands behind the last learned token, and not longer than it may be."""
        learned = [False, *learned[1:]]  # nothing stands before the first one that it could follow from
        if True not in learned:
            return
        size = len(learned) - learned[::-1].index(True)
        tokens, learned = tokens[:size], learned[:size]
        if size > self.max_length:
            yield from self._shortened(tokens, learned, place, text)
        else:
            yield Example(tokens=tuple(tokens), learned=tuple(learned), name=place)

    def _shortened(self, tokens: list[int], learned: list[bool], place: str, text: bool) -> Iterator[Example]:
        limit = self.max_length
        if text:  # nothing of a text is lost: each piece begins with the last token of the one before
            self.notes.append(PIECES)
            for start in range(0, len(tokens) - 1, limit - 1):
                piece = tokens[start : start + limit]
                yield Example(tokens=tuple(piece), learned=(False, *[True] * (len(piece) - 1)), name=place)
            return
        if self.too_long == "error":
            raise DataError(
                f"{place} must be at most `data.max_length` ({limit}) tokens, but has {len(tokens)}; "
                "data.too_long=drop or cut goes on."
            )
        if self.too_long == "drop":
            raise Dropped(TOO_LONG)
        prefix = self.tokenizer.prefix_ids
        kept = len(prefix) if tuple(tokens[: len(prefix)]) == tuple(prefix) else 0
        start = len(tokens) - (limit - kept)
        answer = len(learned) - 1 - ([*reversed(learned), False].index(False) - 1)
        if start >= answer:
            raise Dropped(ANSWER_TOO_LONG)
        self.notes.append(CUT)
        tokens, learned = tokens[:kept] + tokens[start:], learned[:kept] + learned[start:]
        yield Example(tokens=tuple(tokens), learned=(False, *learned[1:]), name=place)


def _dialog(form: Form) -> Dialog:
    if isinstance(form, Dialog):
        return form
    assert isinstance(form, Continuation)
    return Dialog(
        messages=[{"role": "user", "content": form.prompt}, {"role": "assistant", "content": form.completion}]
    )


def _is_answer(message: Mapping[str, Any]) -> bool:
    """Whether an assistant says something in it that is to be learned."""
    says = message.get("role") == "assistant" and message.get("weight", 1) != 0
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else content
    return says and bool(text or message.get("tool_calls") or message.get("reasoning_content"))


def check_tokenizer(tokenizer: Any) -> FastTokenizer:
    if not isinstance(tokenizer, FastTokenizer):
        raise TokenizerError("training needs a tokenizer that reads text, but this model has none.")
    return tokenizer


def learned_count(examples: Sequence[Example]) -> int:
    return sum(sum(example.learned) for example in examples)

"""Control tokens that a user typed stay text; those that the template wrote do not.

A chat template turns the conversation into one string, in which `<|im_end|>` from the template and
`<|im_end|>` from a message look the same. So the strings of the conversation are marked before the template
sees them: wherever a control token is spelled out, or could be completed by what comes next to the string,
a random number is put between its characters. In the rendered text only the template's own control tokens
are whole. The number is taken out again before the text is encoded, by a twin of the tokenizer that knows
no control tokens and to which the template's own appear as one placeholder.

Text without control tokens is not changed, and goes through the tokenizer itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mlxgen.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


def random_digits() -> str:
    """A string that nobody can guess and that case changes, JSON and trimming leave alone."""
    return f"{int.from_bytes(os.urandom(10)):025d}"


class ControlGuard:
    def __init__(self, backend: Backend, control: Mapping[int, str], unknown: str | None = None) -> None:
        """`control`: id -> text of every control token. `unknown`: the one that also stands for text."""
        self._backend = backend
        self._unknown = unknown
        self._ids = frozenset(number for number, text in control.items() if text != unknown)
        self._texts = frozenset(text for text in control.values() if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._first = _any_of({text[0] for text in self._texts})
        self._last = frozenset(text[-1] for text in self._texts)
        self._break = random_digits()

    # -- marking

    def mark(self, text: str) -> str:
        """`text` with a break inside everything in it that is, or could become, a control token."""
        cuts = {start + 1 for start in self._starts(text)}
        cuts |= {length - 1 for length in self._ends_before(text)}
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return self._break.join(text[a:b] for a, b in pairwise(edges))

    def unmark(self, text: str) -> str:
        return text.replace(self._break, "")

    def _starts(self, text: str) -> Iterable[int]:
        """Where a control token begins, or the end of the text begins one."""
        longest = self._lengths[0] if self._lengths else 0
        for match in self._first.finditer(text):
            start = match.start()
            if any(text[start : start + length] in self._texts for length in self._lengths):
                yield start
            elif len(text) - start < longest:
                rest = text[start:]
                if any(control.startswith(rest) for control in self._texts):
                    yield start

    def _ends_before(self, text: str) -> Iterable[int]:
        """Lengths of the beginnings of the text that end a control token begun before it."""
        longest = self._lengths[0] if self._lengths else 0
        for length in range(1, min(longest, len(text) + 1)):
            if text[length - 1] in self._last:
                head = text[:length]
                if any(control.endswith(head) for control in self._texts):
                    yield length

    # -- encoding

    def encode_text(self, text: str) -> list[int]:
        """All of `text` as ordinary text."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        spelled = self._unknown is not None and self._unknown in text
        if self._ids.isdisjoint(ids) and not spelled:
            return ids
        return self._encode_with_twin(text, [])

    def encode_marked(self, marked: str) -> list[int]:
        """Rendered text: whole control tokens as such, broken ones as text."""
        return self.encode_aligned(marked)[0]

    def encode_aligned(self, marked: str) -> tuple[list[int], list[int] | None]:
        """The same, and behind which character each token ends; None where broken control tokens hide that."""
        encoding = self._backend.encode(marked, add_special_tokens=False)
        if self._break not in marked:
            return encoding.ids, [end for _, end in encoding.offsets]
        own: list[int] = []
        parts: list[str] = []
        position = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._ids:
                parts += [marked[position:start], self._placeholder]
                own.append(token)
                position = end
        parts.append(marked[position:])
        return self._encode_with_twin(self.unmark("".join(parts)), own), None

    def _encode_with_twin(self, text: str, own: Sequence[int]) -> list[int]:
        encoding = self._twin.encode(text, add_special_tokens=False)
        rest = iter(own)
        ids = [
            next(rest) if piece == self._placeholder else self._twin_ids.get(piece, token)
            for token, piece in zip(encoding.ids, encoding.tokens, strict=True)
        ]
        if sum(token in self._ids for token in ids) != len(own):
            raise RequestError("The text spells a control token that this vocabulary cannot write as text.")
        return ids

    @cached_property
    def _placeholder(self) -> str:
        return random_digits()

    @cached_property
    def _twin_ids(self) -> dict[str, int]:
        """Ids of added tokens that the twin numbers differently."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if not token.special}

    @cached_property
    def _twin(self) -> Backend:
        """The same model, without its control tokens. Shares the vocabulary, so it costs nothing."""
        from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

        twin = Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            twin.normalizer = self._backend.normalizer
        steps = [] if self._backend.pre_tokenizer is None else [self._backend.pre_tokenizer]
        # Unigram models, and BPE models that look whole words up, find a control token in their vocabulary.
        model = self._backend.model
        if type(model).__name__ == "Unigram" or getattr(model, "ignore_merges", False):
            known = sorted(t for t in self._texts if model.token_to_id(t) is not None)
            apart = "|".join(f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in known)
            if apart:
                steps.append(pre_tokenizers.Split(Regex(apart), "isolated"))
        if steps:
            twin.pre_tokenizer = pre_tokenizers.Sequence(steps)
        added = [t for t in self._backend.get_added_tokens_decoder().values() if not t.special]
        twin.add_tokens(added)
        twin.add_tokens([AddedToken(self._placeholder, normalized=False, special=True)])
        return twin


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    escaped = "".join(map(re.escape, sorted(characters)))
    return re.compile(f"[{escaped}]" if escaped else "(?!)")


def plain(value: Any, on_text: Any = str) -> Any:
    """A copy of JSON-like data in built-in types, every string (keys too) through `on_text`.

    Templates see nothing else: objects could carry methods that the sandbox does not know.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return on_text(str(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key, on_text): plain(item, on_text) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, on_text) for item in value]
    kind = type(value).__name__
    raise RequestError(f"Messages, tools and template arguments must be plain data, but one is a {kind}.")

"""Conversations to prompts: messages in the hub's form, through the checkpoint's Jinja template.

The template decides everything about the prompt, BOS included: what it renders is what is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mlxgen.errors import RequestError, TokenizerError
from mlxgen.protocols import Message
from mlxgen.tokenizer.guard import plain, random_digits
from mlxgen.tokenizer.template import SafeTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Tokens that end a turn, for checkpoints that name only the end of a document. `<|end|>` ends a message
# inside the turn where a vocabulary also has `<|return|>`.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>", "<|end|>")

# What APIs call the hidden part of an answer. Templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatFormat:
    """A checkpoint's templates, compiled when first used."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        tokens: Mapping[str, str],
        template_args: Mapping[str, Any] | None = None,
        fold_system: bool = False,
        where: str = "tokenizer.chat_template",
    ) -> None:
        """`sources`: name -> Jinja text, `default` and perhaps `tool_use`. `tokens`: what templates know as
        `bos_token`, `eos_token`, ... `template_args`: defaults that a request overrides. `fold_system`: a
        system message goes in front of the next user message. `where` names the template in messages."""
        self.sources = dict(sources)
        self.fold_system = fold_system
        self._defaults = {**tokens, "tools": None, "documents": None, **(template_args or {})}
        self._where = where
        self._compiled: dict[str, SafeTemplate] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        opened: bool = True,
        template_args: Mapping[str, Any] | None = None,
        mark: Callable[[str], str] = str,
        blocks: tuple[str, str] = ("", ""),
    ) -> str:
        """The prompt as text. `mark` is applied to every string that is not the template's own.

        opened: whether an assistant's turn is opened at the end. blocks: what to write before and after each part that
        the template says the assistant generates.
        Raises RequestError for messages the template refuses, TokenizerError for a broken template.
        """
        turns = _turns(messages, self.fold_system, mark)
        if self._wants_parts:
            turns = [_as_parts(turn) for turn in turns]
        end = random_digits()
        if continue_final:
            _append(turns, end)
        variables = {
            **self._defaults,
            "add_generation_prompt": opened and not continue_final,
            **plain(template_args or {}, mark),
            "messages": turns,
        }
        if tools:
            variables["tools"] = plain(tools, mark)
        text = self._template("tool_use" if tools else "default").render(variables, blocks)
        return _until(text, end) if continue_final else text

    @property
    def names_generation(self) -> bool:
        """Whether the template says itself what the assistant generates."""
        return any("generation %}" in text or "generation -%}" in text for text in self.sources.values())

    def check(self) -> None:
        """Compile all templates; TokenizerError for one that is not valid."""
        for name in self.sources:
            self._template(name)

    def _template(self, name: str) -> SafeTemplate:
        name = name if name in self.sources else next(iter(self.sources), "default")
        if name not in self._compiled:
            self._compiled[name] = SafeTemplate(self.sources[name], self._where)
        return self._compiled[name]

    @cached_property
    def _wants_parts(self) -> bool:
        """Templates of multimodal models may read lists of parts only; try, once, what this one does."""
        probe = random_digits()
        shown = []
        for content in (probe, [{"type": "text", "text": probe}]):
            turn = {"role": "user", "content": content}
            variables = {**self._defaults, "messages": [turn], "add_generation_prompt": False}
            try:
                shown.append(probe in self._template("default").render(variables))
            except (RequestError, TokenizerError):
                shown.append(False)
        return shown == [False, True]


def _turns(
    messages: Sequence[Message], fold_system: bool, mark: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Messages as plain dicts whose content is a string; keys stay as they are."""
    turns = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"`messages[{number}]` must be an object with a role, but is {message!r:.80}.")
        role = message["role"] if message["role"].isalpha() else mark(message["role"])
        others = {str(key): value for key, value in message.items() if key not in ("role", "content")}
        turn = {"role": role} | {key: plain(value, mark) for key, value in others.items()}
        if reasoning := next((turn[name] for name in _REASONING if turn.get(name)), None):
            turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
        turns.append(turn | {"content": mark(_text(message.get("content"), number))})
    if not turns:
        raise RequestError("`messages` must have at least one message, but is empty.")
    return _folded(turns) if fold_system else turns


def _text(content: Any, number: int) -> str:
    """Content as one string: null is empty, the texts of a list follow each other."""
    where = f"messages[{number}].content"
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"`{where}` must be text or a list of parts, but is {content!r:.80}.")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'`{where}[{index}]` must be {{"type": "text", "text": ...}}, but is of type {kind!r}. '
                "This model reads text only."
            )
        texts.append(part["text"])
    return "".join(texts)


def _folded(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System text in front of the next user message, a blank line between."""
    folded: list[dict[str, Any]] = []
    waiting: list[str] = []
    for turn in turns:
        if turn["role"] == "system":
            waiting.append(turn["content"])
        elif turn["role"] == "user" and waiting:
            folded.append(turn | {"content": "\n\n".join([*waiting, turn["content"]])})
            waiting = []
        else:
            folded.append(turn)
    if waiting:
        folded.append({"role": "user", "content": "\n\n".join(waiting)})
    return folded


def _as_parts(turn: dict[str, Any]) -> dict[str, Any]:
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


def _append(turns: list[dict[str, Any]], end: str) -> None:
    """Mark where the last message ends."""
    content = turns[-1]["content"]
    if isinstance(content, str):
        turns[-1]["content"] = content + end
    else:
        content[-1]["text"] += end


def _until(text: str, end: str) -> str:
    before, found, _ = text.rpartition(end)
    if not found:
        raise RequestError(
            "The last message cannot be continued: the chat template leaves its text out or changes it."
        )
    return before.replace(end, "")

"""From what a person gives, a text, a conversation or token ids, to the token ids that the model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxgen.config import Config
from mlxgen.errors import RequestError
from mlxgen.protocols import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt | None,
    config: Config,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Through the chat template, unless the prompt is raw or there is none; ids are taken as they are.

    Raises RequestError for a prompt that is empty, and for what only a template can bring in without one.
    """
    if prompt is None or len(prompt) == 0:
        raise RequestError("`prompt` must not be empty; give prompt='...' or pipe a text in.")
    if is_ids(prompt):
        return list(prompt)  # type: ignore[arg-type]
    if isinstance(prompt, str) and is_raw(tokenizer, prompt, config):
        for name, value in (("system", config.system), ("tools", tools)):
            if value:
                reason = "the prompt is raw" if config.raw else "this model has none"
                raise RequestError(f"`{name}` needs a chat template, but {reason}; put it into the prompt.")
        return tokenizer.encode(prompt + (config.prefill or ""))
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)  # type: ignore[arg-type]
    if config.system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    if config.prefill is not None:
        messages.append({"role": "assistant", "content": config.prefill})
    return tokenizer.encode_chat(
        messages, tools=tools, continue_final=config.prefill is not None, **(template_args or {})
    )


def goes_on(tokenizer: Tokenizer, prompt: Prompt, config: Config) -> bool:
    """Whether the answer goes on in the middle of a text, and not at the start of a turn."""
    return config.prefill is not None or is_ids(prompt) or is_raw(tokenizer, prompt, config)


def is_raw(tokenizer: Tokenizer, prompt: Prompt, config: Config) -> bool:
    return isinstance(prompt, str) and (config.raw or not tokenizer.has_chat_template)


def is_ids(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], int)

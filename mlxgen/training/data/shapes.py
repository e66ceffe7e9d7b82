"""What a row is: found by its keys, and brought into one of three forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.errors import DataError

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "function_call": "assistant", "system": "system",
    "tool": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dialog:
    """messages: as chat templates take them; an assistant's with `weight` 0 is not learned."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A text and how it goes on."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Text:
    text: str


Form = Dialog | Continuation | Text


def detect(row: Any) -> str | None:
    """The shape of a row, None if it has none of those known."""
    if not isinstance(row, Mapping):
        return None
    if isinstance(row.get("messages"), list):
        return "chat"
    if isinstance(turns := row.get("conversations", row.get("conversation")), list):
        first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
        return "chat" if "role" in first else "sharegpt"
    if "prompt" in row and "completion" in row:
        return "completion"
    if "instruction" in row and ("output" in row or "response" in row):
        return "alpaca"
    return "text" if isinstance(row.get("text"), str) else None


def unknown(row: Any) -> str:
    """What a row of no known shape is instead, for a message."""
    if not isinstance(row, Mapping):
        return f"but is {row!r:.60}"
    if {"chosen", "rejected"} <= set(row):
        return "but has chosen and rejected, which is data for preferences"
    return f"but has the keys {', '.join(map(str, row)) or '(none)'}"


def read(row: Mapping[str, Any], shape: str) -> Form:
    """Raises DataError, without the place, for a row that is not of that shape."""
    return _READERS[shape](row)


def _chat(row: Mapping[str, Any]) -> Form:
    messages = row.get("messages", row.get("conversations", row.get("conversation")))
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise DataError("`messages` must be a list of messages")
    return Dialog(messages=[_message(m) for m in messages], tools=_tools(row))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that are null, as Parquet fills them in, and with the arguments of calls as objects."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [_call(call) for call in calls]
    return kept


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _object(function["arguments"])}}


def _object(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _sharegpt(row: Mapping[str, Any]) -> Form:
    turns = row.get("conversations", row.get("conversation"))
    if not isinstance(turns, list):
        raise DataError("`conversations` must be a list")
    messages: list[dict[str, Any]] = []
    if isinstance(row.get("system"), str) and row["system"]:
        messages.append({"role": "system", "content": row["system"]})
    for turn in turns:
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if speaker not in _ROLES or not isinstance(turn.get("value"), str):
            raise DataError(f"`conversations` must be of from ({', '.join(_ROLES)}) and value, but one is {turn!r:.60}")
        weight = {"weight": turn["weight"]} if "weight" in turn else {}
        messages.append({"role": _ROLES[speaker], "content": turn["value"], **weight})
    return Dialog(messages=messages, tools=_tools(row))


def _completion(row: Mapping[str, Any]) -> Form:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat({**row, "messages": [*prompt, *completion]})
    if isinstance(prompt, list) and isinstance(completion, str):
        return _chat({**row, "messages": [*prompt, {"role": "assistant", "content": completion}]})
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise DataError("`prompt` and `completion` must be texts, or lists of messages")
    return Continuation(prompt=prompt, completion=completion)


def _alpaca(row: Mapping[str, Any]) -> Form:
    answer = row.get("output", row.get("response"))
    parts = [row.get("instruction"), row.get("input") or ""]
    if not isinstance(answer, str) or not all(isinstance(part, str) for part in parts):
        raise DataError("`instruction`, `input` and `output` must be texts")
    messages = [
        {"role": "user", "content": "\n\n".join(filter(None, parts))},
        {"role": "assistant", "content": answer},
    ]
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Dialog(messages=messages)


def _text(row: Mapping[str, Any]) -> Form:
    if not isinstance(row.get("text"), str):
        raise DataError("`text` must be a text")
    return Text(text=row["text"])


def _tools(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # as Parquet files hold them
        try:
            tools = json.loads(tools)
        except ValueError:
            raise DataError("`tools` must be a list of tools, but is a text that is no JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise DataError("`tools` must be a list of tools")
    return tools or None


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Form]] = {
    "chat": _chat,
    "sharegpt": _sharegpt,
    "completion": _completion,
    "alpaca": _alpaca,
    "text": _text,
}

"""Text to token ids and back: vocabularies, chat templates, streaming text.

    tokenizer = load_tokenizer(Path("checkpoint"))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    stream = tokenizer.stream()
    for token in model(ids):
        print(stream.push(token), end="")

Importing this imports nothing heavy; the vocabularies need the `tokenizers` library, chat needs jinja2.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.errors import TokenizerError

if TYPE_CHECKING:
    from mlxgen.protocols import Tokenizer
    from mlxgen.tokenizer.fast import FastTokenizer
    from mlxgen.tokenizer.simple import ByteTokenizer, NoTokenizer
    from mlxgen.tokenizer.stream import ByteStream

__all__ = [
    "ByteStream", "ByteTokenizer", "FastTokenizer", "NoTokenizer",
    "from_gguf", "load_tokenizer", "open_tokenizer",
]  # fmt: skip

_HOMES = {"ByteStream": "stream", "ByteTokenizer": "simple", "FastTokenizer": "fast", "NoTokenizer": "simple"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_tokenizer(
    folder: Path | str,
    *,
    chat_template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    fold_system: bool = False,
) -> FastTokenizer:
    """The tokenizer of a checkpoint folder: tokenizer.json, tokenizer.model, or vocab.json with merges.txt.

    chat_template: a .jinja file, a template, or `chatml`, instead of the checkpoint's.
    template_args: defaults for the template's arguments; a request's own win.
    fold_system: put system messages in front of the next user message, for templates that refuse them.
    Raises TokenizerError for files that are missing or broken.
    """
    from mlxgen.tokenizer.fast import FastTokenizer
    from mlxgen.tokenizer.folder import read_folder

    backend, special, templates, config = read_folder(Path(folder))
    chat = _chat(templates, chat_template, special.names, template_args, fold_system)
    return FastTokenizer(backend, special, chat=chat, config=config)


def from_gguf(
    metadata: Mapping[str, Any],
    *,
    chat_template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    fold_system: bool = False,
) -> FastTokenizer | NoTokenizer:
    """The tokenizer in a GGUF file's metadata, given as plain values. Otherwise like `load_tokenizer`.

    A file made without one gives a NoTokenizer.
    """
    from mlxgen.tokenizer.fast import FastTokenizer
    from mlxgen.tokenizer.gguf import read_gguf
    from mlxgen.tokenizer.simple import NoTokenizer

    if metadata.get("tokenizer.ggml.model") in ("none", "no_vocab"):
        size = metadata.get(f"{metadata.get('general.architecture')}.vocab_size", 0)
        return NoTokenizer(int(size))
    backend, special, templates = read_gguf(metadata)
    chat = _chat(templates, chat_template, special.names, template_args, fold_system)
    size = len(metadata["tokenizer.ggml.tokens"])
    return FastTokenizer(backend, special, chat=chat, vocab_size=size)


def open_tokenizer(checkpoint: Any, config: Any) -> Tokenizer:
    """The tokenizer that a run's configuration asks for.

    checkpoint: has `path`, `tokenizer_folder` and `gguf_metadata`. config: has `kind` (auto, bytes or none),
    `chat_template`, `template_args` and `fold_system`.
    """
    from mlxgen.tokenizer.simple import ByteTokenizer, NoTokenizer

    options: dict[str, Any] = {"template_args": config.template_args, "fold_system": config.fold_system}
    if config.kind == "none":
        return NoTokenizer()
    if config.kind == "bytes":
        if config.chat_template is not None:
            options["chat_template"] = _template(config.chat_template)[0]
        return ByteTokenizer(**options)
    options["chat_template"] = config.chat_template
    if checkpoint.tokenizer_folder is not None:
        return load_tokenizer(checkpoint.tokenizer_folder, **options)
    if checkpoint.gguf_metadata is not None:
        return from_gguf(checkpoint.gguf_metadata, **options)
    return load_tokenizer(checkpoint.path, **options)  # says what it looked for


def _chat(
    templates: Mapping[str, str],
    chosen: str | None,
    names: Mapping[str, str],
    template_args: Mapping[str, Any] | None,
    fold_system: bool,
) -> Any:
    """The ChatFormat, None if neither the checkpoint nor the user has a template."""
    where = "tokenizer.chat_template"
    if chosen is not None:
        text, where = _template(chosen)
        templates = {"default": text}
    if not templates:
        return None
    from mlxgen.tokenizer.chat import ChatFormat

    chat = ChatFormat(
        templates, tokens=names, template_args=template_args, fold_system=fold_system, where=where
    )
    if chosen is not None:
        chat.check()  # what the user wrote is checked now; what came along only when it is used
    return chat


def _template(chosen: str) -> tuple[str, str]:
    """(template text, how to call it in messages)."""
    from mlxgen.tokenizer.chat import CHATML

    if chosen == "chatml":
        return CHATML, "chatml"
    if "{{" in chosen or "{%" in chosen:
        return chosen, "tokenizer.chat_template"
    path = Path(chosen).expanduser()
    try:
        return path.read_bytes().decode(), str(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise TokenizerError(
            f"`tokenizer.chat_template` must be a .jinja file, a template or `chatml`, but {chosen!r} "
            f"cannot be read: {reason}."
        ) from None

"""The tokenizer files of a checkpoint folder: read, and written so that transformers reads them too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.errors import TokenizerError
from mlxgen.tokenizer.fast import SpecialTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from mlxgen.tokenizer.chat import ChatFormat

_WANTED = "tokenizer.json, tokenizer.model, vocab.json with merges.txt"
_CONTROL_NAMES = ("bos_token", "eos_token", "eot_token", "eom_token")
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def read_folder(folder: Path) -> tuple[Backend, SpecialTokens, dict[str, str], dict[str, Any]]:
    """(tokenizer, the tokens the files name, chat templates by name, tokenizer_config.json).

    Raises TokenizerError, naming the file, for what is missing or broken.
    """
    config = _read_json(folder / "tokenizer_config.json")
    named = _read_json(folder / "special_tokens_map.json") | config
    special = SpecialTokens(
        names=_token_names(named), add_bos=config.get("add_bos_token"), add_eos=config.get("add_eos_token")
    )
    if (path := folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(path)
    elif (path := folder / "tokenizer.model").is_file():
        backend, special = _read_sentencepiece(path, special, once=config.get("legacy") is False)
    elif (path := folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _read_vocab_and_merges(folder, config)
    else:
        raise TokenizerError(
            f"`{folder}` must hold a tokenizer, but has none of {_WANTED}. Incomplete download?"
        )
    if path.name != "tokenizer.json":  # other classes would rebuild it from files that will not be there
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _add_missing_tokens(backend, _added_tokens(folder, config))
    _register_named(backend, special, named.get("additional_special_tokens") or ())
    return backend, special, _templates(folder, config), config


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TokenizerError(f"`{path}` must be JSON, but is not: {error}. Incomplete download?") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"`{path}` must be a JSON object, but is a {type(content).__name__}.")
    return content


def _token_text(value: Any) -> str | None:
    """A token is written as text, or as an object with its text in `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _token_names(config: Mapping[str, Any]) -> dict[str, str]:
    pairs = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
    return {key: text for key, text in pairs.items() if text is not None}


def _read_tokenizer_json(path: Path) -> Backend:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"`{path}` must be a file of the tokenizers library, but is not: {reason}. Incomplete download?"
        ) from None


def _read_sentencepiece(path: Path, special: SpecialTokens, *, once: bool) -> tuple[Backend, SpecialTokens]:
    from dataclasses import replace

    from mlxgen.tokenizer.gguf import surround
    from mlxgen.tokenizer.sentencepiece import build, read_model

    model = read_model(path)
    backend = build(replace(model, prefix_once=once))
    ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
    own = {name: model.pieces[i] for name, i in ids.items() if 0 <= i < len(model.pieces)}
    special = replace(special, names=own | dict(special.names))
    bos = special.names.get("bos_token")
    # Models of this kind begin with BOS unless the configuration says otherwise.
    adds_bos = bos is not None and special.add_bos is not False
    surround(backend, backend.token_to_id(bos) if adds_bos and bos else None, None)
    return backend, special


def _read_vocab_and_merges(folder: Path, config: Mapping[str, Any]) -> Backend:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from mlxgen.tokenizer.pretokenizers import byte_level

    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"`{folder}`: vocab.json must fit merges.txt, but: {error}") from None
    backend = Tokenizer(model)
    if str(config.get("tokenizer_class", "")).startswith("Qwen2"):
        backend.pre_tokenizer = byte_level("qwen2")
    else:
        space = bool(config.get("add_prefix_space", False))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, Any]:
    """id -> AddedToken, from tokenizer_config.json or the older added_tokens.json."""
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    added = {int(i): text for text, i in _read_json(folder / "added_tokens.json").items()}
    tokens = {i: AddedToken(text, normalized=False) for i, text in added.items()}
    for number, entry in (config.get("added_tokens_decoder") or {}).items():
        if (text := _token_text(entry)) is not None:
            given = entry if isinstance(entry, dict) else {}
            options = {flag: bool(given[flag]) for flag in flags if flag in given}
            tokens[int(number)] = AddedToken(text, **options)
    return tokens


def _add_missing_tokens(backend: Backend, tokens: Mapping[int, Any]) -> None:
    known = backend.get_added_tokens_decoder()
    for number, token in sorted(tokens.items()):
        if number not in known and backend.id_to_token(number) in (None, token.content):
            backend.add_tokens([token])
            if (given := backend.token_to_id(token.content)) != number:
                raise TokenizerError(
                    f"`added_tokens_decoder.{number}` must follow the vocabulary, but {token.content!r} "
                    f"would become id {given}. A tokenizer.json has no such limit."
                )


def _register_named(backend: Backend, special: SpecialTokens, more: Any) -> None:
    """Beginnings and ends are control tokens even where the vocabulary holds them as ordinary pieces.

    Not so padding, for which some checkpoints name a letter.
    """
    from tokenizers import AddedToken

    texts = [text for name, text in special.names.items() if name in _CONTROL_NAMES]
    texts += filter(None, map(_token_text, more))
    for text in texts:
        if backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template. A file of its own wins over tokenizer_config.json, that over the processor's file."""
    given = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, Mapping):
        templates |= given
    elif isinstance(given, list):
        templates |= {entry["name"]: entry["template"] for entry in given}
    if (path := folder / _TEMPLATE).is_file():
        templates["default"] = _read_template(path)
    for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    return templates


def _read_template(path: Path) -> str:
    """As bytes, so that line ends stay as they are until the template is read as one."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"`{path}` must be UTF-8 text, but is not: {error}.") from None


def save_tokenizer(
    folder: Path,
    backend: Backend,
    special: SpecialTokens,
    chat: ChatFormat | None,
    config: Mapping[str, Any],
) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates, in place of older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    flags = {"add_bos_token": special.add_bos, "add_eos_token": special.add_eos}
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: value for key, value in config.items() if key != "chat_template"},
        **special.names,
        **{key: flag for key, flag in flags.items() if flag is not None},
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    for old in (_TEMPLATE, "chat_template.json"):
        (folder / old).unlink(missing_ok=True)
    for name, source in (chat.sources if chat else {}).items():
        path = folder / (_TEMPLATE if name == "default" else f"{_MORE_TEMPLATES}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(source.encode())

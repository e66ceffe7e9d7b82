"""task=tokenize: how a text is cut into tokens."""

from __future__ import annotations

import dataclasses
import json

from mlxgen.config import Config
from mlxgen.errors import ConfigError
from mlxgen.loading import open_source, open_tokenizer
from mlxgen.tasks.prompt import read_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize:
    """`chat`: the prompt as the model sees it, in the chat template; otherwise the text alone."""

    chat: bool = False

    def __call__(self, config: Config) -> int:
        text = read_prompt(config.prompt)
        tokenizer = open_tokenizer(open_source(config.model), config.tokenizer)
        if self.chat:
            system = [{"role": "system", "content": config.system}] if config.system is not None else []
            ids = tokenizer.encode_chat([*system, {"role": "user", "content": text}])
        else:
            ids = tokenizer.encode(text, add_special=not config.raw)
        if not ids and config.tokenizer.kind == "none":
            raise ConfigError("`tokenizer` must be able to read text for task=tokenize, but is none.")
        pieces = [tokenizer.piece(i) for i in ids]
        if config.output == "json":
            print(json.dumps({"tokens": ids, "pieces": pieces}, ensure_ascii=False))
        elif config.output == "jsonl":
            for i, piece in zip(ids, pieces, strict=True):
                print(json.dumps({"token": i, "piece": piece}, ensure_ascii=False))
        else:
            width = max((len(str(i)) for i in ids), default=1)
            for i, piece in zip(ids, pieces, strict=True):
                print(f"{i:>{width}}  {piece}")
        return 0

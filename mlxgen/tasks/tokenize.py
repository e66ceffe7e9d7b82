"""task=tokenize: how a text is cut into tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mlxgen.config import Config
from mlxgen.errors import ConfigError
from mlxgen.loading import open_source
from mlxgen.prompting import encode_prompt
from mlxgen.tasks.output import print_json
from mlxgen.tokenizer import open_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize:
    """`chat`: the prompt as task=generate shows it to the model; otherwise the text alone."""

    chat: bool = False
    reads_prompt: ClassVar[bool] = True

    def __call__(self, config: Config) -> int:
        if config.tokenizer.kind == "none":
            raise ConfigError("`tokenizer` must be able to read text for task=tokenize, but is none.")
        assert config.prompt is not None
        tokenizer = open_tokenizer(open_source(config.model), config.tokenizer)
        if self.chat:
            ids = encode_prompt(tokenizer, config.prompt, config)
        else:
            ids = tokenizer.encode(config.prompt, add_special=not config.raw)
        pieces = [tokenizer.piece(i) for i in ids]
        if config.output == "json":
            print_json({"tokens": ids, "pieces": pieces}, config)
        elif config.output == "jsonl":
            for i, piece in zip(ids, pieces, strict=True):
                print_json({"token": i, "piece": piece}, config)
        else:
            width = max((len(str(i)) for i in ids), default=1)
            for i, piece in zip(ids, pieces, strict=True):
                print(f"{i:>{width}}  {piece}")
        return 0

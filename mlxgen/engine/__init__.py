"""The engine: prefill, then decode. It sees token ids and protocols only."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.engine.generate import Request, Token, generate
from mlxgen.engine.sequence import TokenSequence
from mlxgen.engine.text import TextAssembler

__all__ = ["Request", "TextAssembler", "Token", "TokenSequence", "generate"]

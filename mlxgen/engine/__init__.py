"""The engine: prefill, then decode, for one request or many. It sees token ids and protocols only."""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.engine.drafting import DraftModel
from mlxgen.engine.engine import Engine, Parts
from mlxgen.engine.lookup import Lookup
from mlxgen.engine.prefill import prefill
from mlxgen.engine.prefix import PrefixStore
from mlxgen.engine.request import Generation, Request, Token
from mlxgen.engine.scheduler import Scheduler
from mlxgen.engine.sequence import TokenSequence
from mlxgen.engine.text import TextAssembler

__all__ = [
    "DraftModel",
    "Engine",
    "Generation",
    "Lookup",
    "Parts",
    "PrefixStore",
    "Request",
    "Scheduler",
    "TextAssembler",
    "Token",
    "TokenSequence",
    "prefill",
]

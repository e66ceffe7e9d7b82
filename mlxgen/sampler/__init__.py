"""Samplers: pure stages that map logits to logits, an order that the user sets, and the pick.

sampler = Sampler.from_config({"temperature": 0.7, "top_p": 0.9})
state = sampler.start(prompt_tokens, seed=7)
tokens, [state] = sample(logits, [sampler], [state])
"""

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.sampler.config import BUILT_IN, Effective, effective, known_stages
from mlxgen.sampler.logprobs import Candidates, LogProbs, candidates, logprobs
from mlxgen.sampler.sampler import Sampler, State, process, sample, sample_ahead
from mlxgen.sampler.stage import Context, Stage

__all__ = [
    "BUILT_IN",
    "Candidates",
    "Context",
    "Effective",
    "LogProbs",
    "Sampler",
    "Stage",
    "State",
    "candidates",
    "effective",
    "known_stages",
    "logprobs",
    "process",
    "sample",
    "sample_ahead",
]

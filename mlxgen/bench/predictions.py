"""Whether memory is predicted well: what `mlxgen plan` says of a run, against the most that MLX held in it."""

from __future__ import annotations

import itertools
from pathlib import Path

import mlxgen.device

# isort: split
import mlx.core as mx

import mlxgen
from mlxgen.bench.compare import Row, row
from mlxgen.bench.serving import some_tokens
from mlxgen.build import build
from mlxgen.config import load_config
from mlxgen.fit import Estimator
from mlxgen.loading import describe
from mlxgen.sampler import Sampler
from mlxgen.testing.checkpoints import write_tiny

MODELS = {
    "dense": ("llama", dict(hidden_size=256, intermediate_size=704, head_dim=64, num_hidden_layers=8)),
    "MoE": (
        "qwen3_moe",
        dict(
            hidden_size=192,
            head_dim=64,
            num_hidden_layers=6,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=160,
        ),
    ),
}
POLICIES = {
    "full": [],
    "window": ["cache=window", "cache.size=300"],
    "quantized": ["cache=quantized", "cache.k_bits=8", "cache.v_bits=4"],
}
_VOCABULARY = 24_000


def predictions(scratch: Path, *, batch: int = 4, context: int = 400) -> list[Row]:
    """For `batch` requests of `context` tokens, on models of some 10 million parameters with random weights."""
    rows = []
    for (model, (family, shape)), (policy, words) in itertools.product(MODELS.items(), POLICIES.items()):
        folder = scratch / model
        if not folder.exists():
            sizes = dict(vocab_size=_VOCABULARY, max_position_embeddings=4096, **shape)
            write_tiny(folder, family, tokenizer=False, **sizes)
        asked = [f"model={folder}", "tokenizer=none", "sampler=greedy", "prefill_chunk=128", *words]
        megabytes = [[size / 1e6] for size in (_predicted(asked, batch, context), _peak(asked, batch, context))]
        rows.append(row(f"peak memory predicted: {model}, cache={policy}", "MB", *megabytes, "1 to 1.15", "measured"))
    return rows


def _predicted(words: list[str], batch: int, context: int) -> int:
    config = load_config(words)
    policy = build(config.cache, "cache")
    described = describe(config.model, config.architecture, config.config_dirs)
    return (
        Estimator(described, config, policy, Sampler.from_config(config.sampler)).estimate(batch, context).total_bytes
    )


def _peak(words: list[str], batch: int, context: int, new_tokens: int = 24) -> int:
    """Of loading the model and answering all requests."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pipeline = mlxgen.load(*words)
    prompts = [some_tokens(context - new_tokens, i) for i in range(batch)]
    list(pipeline.generate_batch(prompts, max_tokens=new_tokens))
    mx.synchronize()
    return mx.get_peak_memory() - before

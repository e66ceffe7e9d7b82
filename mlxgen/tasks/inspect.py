"""task=inspect: what a model is, without loading its weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxgen.build import build
from mlxgen.config import Config
from mlxgen.decoder import Decoder
from mlxgen.loading import describe

_PARTS = {"experts": ".experts.", "router": ".router.", "feed-forward": ".mlp."}
_CHUNK_TOKENS, _HALF_CHUNKS = 1024, 16  # beyond any window of a model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """The resolved spec, parameters by part, and what the KV policy keeps per token. `spec`: print all of the spec."""

    spec: bool = False

    def __call__(self, config: Config) -> int:
        model = describe(config.model, config.architecture, config.config_dirs)
        decoder = Decoder(model.spec)
        report = {
            "blueprint": model.blueprint.name,
            "layers": len(model.spec.layers),
            "hidden_size": model.spec.hidden_size,
            "vocab_size": model.spec.vocab_size,
            "context_tokens": model.spec.context,
            "parameters": parameters(decoder),
            "checkpoint_bytes": model.checkpoint.total_bytes if model.checkpoint else None,
            "cache": cache_bytes(decoder, build(config.cache, "cache", config.trust), model.cache_dtype),
        }
        if self.spec or config.output == "json":
            report["spec"] = dataclasses.asdict(model.spec)
        print(json.dumps(report, indent=1, default=str) if config.output == "json" or self.spec else as_text(report))
        return 0


def parameters(decoder: Decoder) -> dict[str, int]:
    """How many numbers each part of the decoder has. Its arrays are never evaluated, so they take no memory."""
    parts: dict[str, int] = {}
    for name, array in tree_flatten(decoder.parameters()):
        parts[_part(name)] = parts.get(_part(name), 0) + math.prod(array.shape)
    return {**parts, "total": sum(parts.values())}


def _part(name: str) -> str:
    if name.startswith(("embed", "lm_head")):
        return "embedding" if name.startswith("embed") else "head"
    return next((part for part, mark in _PARTS.items() if mark in name), "norms" if "norm" in name else "mixer")


def cache_bytes(decoder: Decoder, policy: Any, dtype: mx.Dtype) -> dict[str, float]:
    """What the policy keeps: for each further token, and whatever the length. Counted on graphs that never run."""
    decoder.update(tree_map(lambda p: p.astype(dtype), decoder.parameters()))
    caches, sizes = policy(decoder.spec), []
    for chunk in range(2 * _HALF_CHUNKS):
        decoder.hidden(mx.zeros((1, _CHUNK_TOKENS), mx.int32), caches)
        if chunk % _HALF_CHUNKS == _HALF_CHUNKS - 1:
            sizes.append(sum(cache.nbytes for cache in caches))
    per_token = (sizes[1] - sizes[0]) / (_HALF_CHUNKS * _CHUNK_TOKENS)
    fixed = sizes[1] - per_token * 2 * _HALF_CHUNKS * _CHUNK_TOKENS
    return {"bytes_per_token": per_token, "fixed_bytes": fixed, "dtype": str(dtype).removeprefix("mlx.core.")}


def as_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    total = report["parameters"]["total"]
    lines = [
        f"blueprint    {report['blueprint']}",
        f"shape        {report['layers']} layers, hidden {report['hidden_size']}, vocabulary {report['vocab_size']}, "
        f"context {report['context_tokens']} tokens",
        f"parameters   {total:,}",
    ]
    for part, count in sorted(report["parameters"].items(), key=lambda item: -item[1]):
        if part != "total":
            lines.append(f"  {part:<12} {count:>15,}  {100 * count / total:5.1f} %")
    if report["checkpoint_bytes"]:
        lines.append(f"weights      {report['checkpoint_bytes']:,} bytes in the checkpoint")
    cache = report["cache"]
    lines.append(
        f"cache        {cache['bytes_per_token']:,.0f} bytes a token in {cache['dtype']}"
        + (f", and {cache['fixed_bytes']:,.0f} whatever the length" if cache["fixed_bytes"] > 0 else "")
    )
    return "\n".join(lines)

"""task=plan: what a run would hold in memory, without loading a weight."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlxgen.build import build
from mlxgen.config import Config
from mlxgen.errors import EXIT_MEMORY, EXIT_OK
from mlxgen.fit import Estimate, Estimator, memory_limit_bytes
from mlxgen.fit.budget import gb, largest
from mlxgen.loading import describe
from mlxgen.sampler import Sampler
from mlxgen.tasks.output import print_json

_USUAL_CONTEXT, _MOST_ROWS = 4096, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """`batch` requests of `context` tokens each; by default one of 4096 tokens, if the model was made for so many."""

    def __call__(self, config: Config) -> int:
        described = describe(config.model, config.architecture, config.config_dirs)
        sampler = _sampler(config)
        policy = build(config.cache, "cache", config.trust)
        limit, most = memory_limit_bytes(config.memory_limit), described.spec.context or 1 << 20
        batch, context = config.batch or 1, min(config.context or _USUAL_CONTEXT, most)
        estimator = Estimator(described, config, policy, sampler)
        estimate = estimator.estimate(batch, context)
        fits = estimate.total_bytes <= limit
        report = {
            **{field.name: getattr(estimate, field.name) for field in dataclasses.fields(Estimate)},
            "total_bytes": estimate.total_bytes,
            "limit_bytes": limit,
            "fits": fits,
            "largest_batch": _most(lambda n: estimator.estimate(n, context), _MOST_ROWS, limit),
            "largest_context": _most(lambda n: estimator.estimate(batch, n), most, limit),
        }
        if config.output == "text":
            print(as_text(report))
        else:
            print_json(report, config)
        return EXIT_OK if fits else EXIT_MEMORY


def _sampler(config: Config) -> Sampler:
    values = {**config.model.sampling, **{k: v for k, v in config.sampler.items() if v is not None}}
    return Sampler.from_config(values, build=lambda node, path: build(node, path, config.trust)).seeded()


def _most(estimate: Any, most: int, limit: int) -> int:
    """The largest number up to `most` that fits, 0 for none."""
    return most if estimate(most).total_bytes <= limit else largest(estimate, most, limit)


def as_text(report: dict[str, Any]) -> str:
    """The table for people."""
    rows = [(name, report[f"{name}_bytes"]) for name in ("weights", "cache", "activations", "total", "limit")]
    table = [f"  {name:<12} {gb(size):>12}" for name, size in rows]
    lines = [f"{report['batch']} x {report['context']} tokens", *table]
    verdict = "it fits" if report["fits"] else "it does not fit"
    batch, context = report["largest_batch"], report["largest_context"]
    return "\n".join([*lines, f"{verdict}; at most batch={batch}, or context={context}"])

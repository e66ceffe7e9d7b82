"""task=evaluate: how well a model predicts a text or answers, before and after its adapter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.config import Config
from mlxgen.errors import EXIT_OK, ConfigError, require
from mlxgen.loading import LoadedModel, load
from mlxgen.tasks.output import print_json, status
from mlxgen.tasks.training_data import open_evaluation_data
from mlxgen.training.loss import total_weight
from mlxgen.training.trainer import Batches, evaluate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """split: which part of data.path. benchmarks: tasks of lm-evaluation-harness, instead of data.path."""

    split: Literal["auto", "train", "valid", "test"] = "auto"
    benchmarks: tuple[str, ...] = ()
    shots: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        require(self.shots is None or self.shots >= 0, "shots", "at least 0", self.shots)
        require(self.limit is None or self.limit >= 1, "limit", "at least 1", self.limit)

    def check(self, config: Config) -> None:
        if not self.benchmarks and not config.data.sources:
            raise ConfigError("`data.path` must be given, or `task.benchmarks`: what to evaluate on.")

    def __call__(self, config: Config) -> int:
        if self.benchmarks:
            from mlxgen.tasks.harness import run_benchmarks

            scores = run_benchmarks(config, self.benchmarks, shots=self.shots, limit=self.limit)
            print_json(scores, config)
            return EXIT_OK
        with status("loading the model"):
            loaded = load(config.model, config.architecture, config.config_dirs)
        with status("reading the data"):
            batches = open_evaluation_data(config, loaded, self.split)
        result: dict[str, Any] = {"learned_tokens": sum(int(total_weight(batches.at(i))) for i in range(len(batches)))}
        result["model"] = _scores(loaded, batches)
        if config.adapter.folders:
            del loaded
            with status("loading the adapter"):
                loaded = load(config.model, config.architecture, config.config_dirs, config.adapter)
            result["with adapter"] = _scores(loaded, batches)
        if config.output == "text":
            print(as_table(result))
        else:
            print_json(result, config)
        return EXIT_OK


def _scores(loaded: LoadedModel, batches: Batches) -> dict[str, float]:
    with status("evaluating"):
        loss = evaluate(loaded.decoder, batches)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def as_table(result: Mapping[str, Any]) -> str:
    lines = [f"{'':<14}{'loss':>10}{'perplexity':>14}"]
    lines += [
        f"{name:<14}{scores['loss']:>10.4f}{scores['perplexity']:>14.3f}"
        for name, scores in result.items()
        if isinstance(scores, Mapping)
    ]
    return "\n".join([*lines, f"over {result['learned_tokens']:,} tokens"])

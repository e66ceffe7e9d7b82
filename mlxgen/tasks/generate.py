"""task=generate: complete a prompt and stream the answer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mlxgen.config import Config
from mlxgen.errors import EXIT_INTERRUPTED, EXIT_OK
from mlxgen.pipeline import Pipeline
from mlxgen.tasks.output import play, show_stats, status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Answers the configuration's prompt once."""

    reads_prompt: ClassVar[bool] = True

    def __call__(self, config: Config) -> int:
        with status("loading the model"):
            pipeline = Pipeline(config)
        completion = play(pipeline.stream(), config)
        show_stats(completion, pipeline, config)
        return EXIT_INTERRUPTED if completion.finish_reason == "interrupted" else EXIT_OK

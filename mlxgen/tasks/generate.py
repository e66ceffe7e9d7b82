"""task=generate: complete a prompt and stream the answer."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from mlxgen.completion import Chunk, Completion
from mlxgen.config import Config
from mlxgen.errors import EXIT_INTERRUPTED, EXIT_OK
from mlxgen.pipeline import Pipeline
from mlxgen.tasks.prompt import read_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    def __call__(self, config: Config) -> int:
        config = dataclasses.replace(config, prompt=read_prompt(config.prompt))
        pipeline = Pipeline(config)
        completion: Completion | None = None
        for chunk in pipeline.stream():
            show(chunk, config.output)
            completion = chunk.completion
        assert completion is not None
        show_stats(completion, pipeline, config)
        return EXIT_INTERRUPTED if completion.finish_reason == "interrupted" else EXIT_OK


def show(chunk: Chunk, output: str) -> None:
    """A chunk on standard output, in the form that was asked for."""
    if output == "text":
        sys.stdout.write(chunk.text)
        if chunk.completion is not None and not chunk.completion.text.endswith("\n"):
            sys.stdout.write("\n")
    elif output == "jsonl":
        print(_json(_event(chunk)))
    elif chunk.completion is not None:
        print(_json(chunk.completion.as_dict()))
    sys.stdout.flush()


def _event(chunk: Chunk) -> dict[str, Any]:
    if chunk.completion is not None:
        return {"text": chunk.text, "finish_reason": chunk.finish_reason, "completion": chunk.completion.as_dict()}
    event: dict[str, Any] = {"text": chunk.text, "tokens": list(chunk.tokens)}
    if chunk.logprobs:
        event["logprobs"] = [dataclasses.asdict(entry) for entry in chunk.logprobs]
    return event


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False)


def show_stats(completion: Completion, pipeline: Pipeline, config: Config) -> None:
    """Speed, memory and the sampling that was in force, on standard error."""
    if config.stats is False or (config.stats == "auto" and not sys.stderr.isatty()):
        return
    s = completion.stats
    sampling = pipeline.effective_sampling(pipeline.settings())
    values = ", ".join(f"{k} {v} ({sampling.sources.get(k, 'mixed')})" for k, v in sampling.values.items())
    print(
        f"\n{s.prompt_tokens} prompt tokens, first token after {s.ttft_s:.2f} s ({s.prefill_tokens_per_s:.0f} tok/s) · "
        f"{s.completion_tokens} tokens at {s.decode_tokens_per_s:.1f} tok/s · peak {s.peak_memory_bytes / 1e6:.0f} MB · "
        f"{completion.finish_reason}\nsampling: {values} · seed {completion.seed}",
        file=sys.stderr,
    )

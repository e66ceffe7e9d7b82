"""Benchmarks of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness), which is not part of mlxgen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
import numpy as np

from mlxgen.config import Config
from mlxgen.errors import ConfigError
from mlxgen.pipeline import Pipeline

_BATCH = 8
_CONTEXT = 2048  # where the model does not say how much it takes


def run_benchmarks(config: Config, names: Sequence[str], *, shots: int | None, limit: int | None) -> dict[str, Any]:
    """The scores of each benchmark. Raises ConfigError where the harness is not installed, or does not know a name."""
    try:
        import lm_eval  # type: ignore[import-not-found]
        from lm_eval.api.model import LM  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError("`task.benchmarks` must have lm-evaluation-harness: pip install lm-eval.") from None
    scorer = Scorer(Pipeline(config))

    class Model(LM):
        """What the harness calls; a request's arguments are in `args`."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return scorer.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [scorer.rolling(*request.args) for request in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [scorer.generate(*request.args) for request in requests]

    try:
        found = lm_eval.simple_evaluate(model=Model(), tasks=list(names), num_fewshot=shots, limit=limit)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"`task.benchmarks` must be names that lm-eval knows: {error}") from error
    return {
        name: {key: value for key, value in scores.items() if isinstance(value, int | float)}
        for name, scores in found["results"].items()
    }


class Scorer:
    """Log-probabilities and answers of a pipeline for texts."""

    def __init__(self, pipeline: Pipeline):
        self._pipeline, self._decoder = pipeline, pipeline.decoder
        self._context = pipeline.spec.context or _CONTEXT

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(context, continuation) -> its log-probability, and whether it is what greedy decoding would say."""
        return self._scores([self._encoded(*pair) for pair in pairs])

    def rolling(self, text: str) -> float:
        """The log-probability of a whole text, in windows that do not overlap."""
        start, tokens = self._start(), self._encode(text)
        windows = [tokens[i : i + self._context - 1] for i in range(0, len(tokens), self._context - 1)]
        firsts = [start, *([window[-1]] for window in windows[:-1])]
        return sum(score for score, _ in self._scores(list(zip(firsts, windows, strict=True))))

    def generate(self, context: str, options: dict[str, Any]) -> str:
        """The answer, up to one of the texts in `until`."""
        until = options.get("until") or []
        return self._pipeline.generate(
            context,
            raw=True,
            stop=[until] if isinstance(until, str) else [text for text in until if text],
            max_tokens=options.get("max_gen_toks", 256),
            temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0.0,
        ).text

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both; blanks between them belong to the continuation, as tokens begin with theirs."""
        kept = context.rstrip()
        first = self._encode(kept) or self._start()
        whole = self._encode(context + continuation) if kept else [*first, *self._encode(continuation)]
        return first, whole[len(first) :]

    def _encode(self, text: str) -> list[int]:
        return list(self._pipeline.tokenizer.encode(text, add_special=True)) if text else []

    def _start(self) -> list[int]:
        """What stands before a text that has nothing before it."""
        return [min(self._pipeline._eos_ids, default=0)]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        results: dict[int, tuple[float, bool]] = {}
        for numbers, tokens in self._batches(pairs):
            hidden = self._decoder.hidden(mx.array(tokens))
            for row, number in enumerate(numbers):
                first, rest = pairs[number]
                end = min(len(first) + len(rest), self._context + 1) - 1
                span = slice(end - len(rest), end)
                logits = self._decoder.logits(hidden[row : row + 1, span])[0].astype(mx.float32)
                targets = mx.array(rest)
                scores = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
                greedy = (logits.argmax(axis=-1) == targets).all()
                results[number] = float(scores.sum()), bool(greedy)
        return [results[number] for number in range(len(pairs))]

    def _batches(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Rows of similar length, padded at the end; too long ones lose their beginning."""
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        for start in range(0, len(order), _BATCH):
            numbers = order[start : start + _BATCH]
            rows = [[*pairs[i][0], *pairs[i][1]][-self._context - 1 : -1] for i in numbers]
            tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
            for row, values in enumerate(rows):
                tokens[row, : len(values)] = values
            yield numbers, tokens

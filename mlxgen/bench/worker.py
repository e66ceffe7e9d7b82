"""A process that holds one engine with one checkpoint and times what it is told to, so that two can take turns.

    python -m mlxgen.bench.worker ENGINE FOLDER BLAS        ENGINE mlxgen | mlx_lm, BLAS on | off

It answers each line `PROMPT_TOKENS NEW_TOKENS` on standard input with one line of JSON: seconds to the first token, and
seconds for the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator

Generate = Callable[[list[int], int], Iterator[int]]


def mlxgen_engine(folder: str) -> Generate:
    import mlxgen

    pipeline = mlxgen.load(f"model={folder}", "tokenizer=none", "sampler=greedy")
    pipeline._eos_ids = frozenset()  # a fixed number of tokens

    def generate(prompt: list[int], count: int) -> Iterator[int]:
        for chunk in pipeline.stream(prompt, max_tokens=count):
            yield from chunk.tokens

    return generate


def mlx_lm_engine(folder: str) -> Generate:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(__import__("pathlib").Path(folder))

    def generate(prompt: list[int], count: int) -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
            yield int(token)

    return generate


def timed(generate: Generate, prompt_tokens: int, count: int) -> dict[str, float]:
    """Seconds until the first token, and for the rest. The prompt is the same arbitrary text for everybody."""
    prompt = [100 + (i * 7919) % 20000 for i in range(prompt_tokens)]
    start = time.perf_counter()
    stream = generate(prompt, count)
    next(stream)
    first = time.perf_counter()
    rest = sum(1 for _ in stream)
    end = time.perf_counter()
    return {"prefill_s": first - start, "decode_s": end - first, "decoded_tokens": float(rest)}


def main(engine: str, folder: str, blas: str) -> None:
    os.environ["MLXGEN_BLAS"] = "off" if blas == "off" else "auto"
    if blas == "on":
        import mlxgen.device  # noqa: F401  for mlx-lm too: the same BLAS in both
    generate = {"mlxgen": mlxgen_engine, "mlx_lm": mlx_lm_engine}[engine](folder)
    answers, sys.stdout = sys.stdout, sys.stderr
    timed(generate, 32, 4)  # the first run pays for what is loaded or built on demand
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        prompt_tokens, count = map(int, line.split())
        print(json.dumps(timed(generate, prompt_tokens, count)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

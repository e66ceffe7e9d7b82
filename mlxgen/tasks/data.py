"""task=data: what a model would learn from, without loading its weights."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.config import Config
from mlxgen.errors import EXIT_OK, require
from mlxgen.loading import describe, eos_ids_of, open_source
from mlxgen.tasks.output import print_json, status
from mlxgen.tokenizer import open_tokenizer
from mlxgen.training.batch import Example
from mlxgen.training.batches import Batches
from mlxgen.training.data import Data, open_data

_BARS, _BINS = 40, 12
OPEN, CLOSE = "⟦", "⟧"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowData:
    """conf/task/data.yaml says what the fields are for."""

    split: Literal["train", "valid", "test"] = "train"
    examples: int = 3
    tokens: int = 400

    def __post_init__(self) -> None:
        require(self.examples >= 0, "examples", "at least 0", self.examples)
        require(self.tokens >= 1, "tokens", "at least 1", self.tokens)

    def __call__(self, config: Config) -> int:
        with status("reading the data"):
            checkpoint = open_source(config.model)
            tokenizer = open_tokenizer(checkpoint, config.tokenizer)
            data = open_data(
                config.data,
                tokenizer,
                context=describe(config.model, config.architecture, config.config_dirs).spec.context,
                eos_ids=eos_ids_of(checkpoint),
                seed=config.seed or 0,
                raw=config.raw,
                needs=(self.split,),
            )
        examples: Sequence[Example] = getattr(data, self.split)
        if config.output == "text":
            _print_report(data, examples, config)
            for example in examples[: self.examples]:
                _print_example(example, tokenizer, self.tokens)
        else:
            shown = [_as_dict(example, tokenizer) for example in examples[: self.examples]]
            print_json({**data.report.as_dict(), "lengths": lengths_of(examples), "examples": shown}, config)
        return EXIT_OK


def lengths_of(examples: Sequence[Example]) -> list[dict[str, int]]:
    """A histogram: examples of `least` to `most` tokens."""
    lengths = sorted(len(example.tokens) for example in examples)
    width = max(-(-(lengths[-1] - lengths[0] + 1) // _BINS), 1)
    bins = []
    for start in range(lengths[0], lengths[-1] + 1, width):
        count = sum(start <= length < start + width for length in lengths)
        bins.append({"least": start, "most": start + width - 1, "examples": count})
    return bins


def runs_of(example: Example, limit: int | None = None) -> Iterator[tuple[bool, list[int]]]:
    """(whether they are learned, tokens) of neighbours that are treated alike; of a long example the end."""
    pairs = list(zip(example.learned, example.tokens, strict=True))[-(limit or len(example.tokens)) :]
    for learned, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield learned, [token for _, token in run]


def _as_dict(example: Example, tokenizer: Any) -> dict[str, Any]:
    return {
        "place": example.name,
        "tokens": list(example.tokens),
        "pieces": [tokenizer.piece(token) for token in example.tokens],
        "learned": list(example.learned),
    }


def _print_report(data: Data, examples: Sequence[Example], config: Config) -> None:
    print("\n".join(data.report.lines()))
    print("\nlength (tokens)")
    bins = lengths_of(examples)
    most = max(b["examples"] for b in bins)
    span = max(len(f"{b['least']}-{b['most']}") for b in bins)
    for b in bins:
        bar = "█" * -(-_BARS * b["examples"] // most)
        print(f"  {b['least']}-{b['most']}".ljust(span + 4) + f"{bar} {b['examples']:,}")
    settings = config.data
    batches = Batches(
        examples, batch_size=settings.batch_size, max_length=settings.max_length, packing=settings.packing, shuffle=True
    )
    kind = f"rows of {settings.max_length}" if settings.packing else "examples"
    print(f"\nan epoch: {len(batches):,} batches of {settings.batch_size} {kind}, {batches.padding():.0%} padding")


def _print_example(example: Example, tokenizer: Any, limit: int) -> None:
    """Learned tokens in colour on a terminal, in brackets elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    text = Text()
    if len(example.tokens) > limit:
        text.append(f"... {len(example.tokens) - limit:,} tokens before ...\n", "dim")
    for learned, tokens in runs_of(example, limit):
        written = visible(tokenizer.decode(tokens, skip_special=False, continues=True))
        if learned and not console.is_terminal:
            written = f"{OPEN}{written}{CLOSE}"
        text.append(written, "bold green" if learned else "dim")
    learned = sum(example.learned)
    console.print()
    console.print(Text(f"{example.name}: {len(example.tokens):,} tokens, {learned:,} learned", "bold"))
    console.print(text)


def visible(text: str) -> str:
    """Control characters as the symbols that Unicode has for them: data must not steer a terminal."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "␡" if c == "\x7f" else c for c in text)

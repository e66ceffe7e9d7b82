"""open_data: what the configuration names, as lists of examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxgen.config import DataConfig
from mlxgen.errors import ConfigError, DataError, require
from mlxgen.training.batch import Example
from mlxgen.training.data.encode import Dropped, Encoder, check_tokenizer
from mlxgen.training.data.report import DataReport, SourceReport, numbers_of
from mlxgen.training.data.rows import SPLITS, Row, open_rows
from mlxgen.training.data.shapes import detect, read, unknown


@dataclass(frozen=True, kw_only=True)
class Data:
    """Examples in the order of their files. `valid` and `test` may be empty."""

    train: tuple[Example, ...]
    valid: tuple[Example, ...]
    test: tuple[Example, ...]
    report: DataReport


def open_data(
    config: DataConfig,
    tokenizer: Any,
    *,
    context: int | None = None,
    eos_ids: Iterable[int] = (),
    seed: int = 0,
    raw: bool = False,
    template_args: Mapping[str, Any] | None = None,
    needs: Sequence[str] = ("train",),
) -> Data:
    """Read, check and encode all rows.

    context: tokens that the model takes. eos_ids: that end an answer, besides the tokenizer's own. seed: of the rows
    that are kept apart to evaluate on. raw: prompts and completions as they stand, without the chat template.
    needs: the splits that must not be empty.
    Raises DataError with file and line for the first row that is of no use, unless `config.strict` is false;
    ConfigError for a length above the context.
    """
    if not config.sources:
        raise ConfigError("`data.path` must be given: a file, a folder with train.jsonl, or a hub id.")
    encoder = Encoder(
        tokenizer=check_tokenizer(tokenizer),
        max_length=_max_length(config, context),
        too_long=config.too_long,
        learn_all=config.learn == "all",
        raw=raw,
        eos_ids=frozenset(tokenizer.eos_ids) | frozenset(eos_ids),
        template_args=template_args or {},
    )
    data = _mixed(config, encoder, seed)
    for split in needs:
        if not getattr(data, split):
            why = _why(data.report.sources)
            raise DataError(f"`data.path` must give an example for {split}, but none is left.{why}")
    return data


def _mixed(config: DataConfig, encoder: Encoder, seed: int) -> Data:
    """All sources, each as often as its weight says."""
    parts: dict[str, list[Example]] = {split: [] for split in SPLITS}
    reports, split_off = [], False
    for name, source in config.sources.items():
        found, source_reports = _read_source(source, config, encoder)
        reports += source_reports
        if "valid" not in found and config.validation and "train" in found:
            found["train"], found["valid"] = _apart(found["train"], config.validation, seed)
            split_off = split_off or bool(found["valid"])
        if "train" in found:
            found["train"] = _times(found["train"], config.weights.get(name, 1.0), seed)
        for split, examples in found.items():
            parts[split] += examples
    return Data(
        **{split: tuple(examples) for split, examples in parts.items()},
        report=DataReport(
            sources=tuple(reports),
            splits={split: numbers_of(examples) for split, examples in parts.items()},
            validation_from_train=split_off,
        ),
    )


def _max_length(config: DataConfig, context: int | None) -> int:
    """The configured one if the model takes it; the default gives way to a shorter context."""
    if context is None or config.max_length <= context:
        return config.max_length
    rule = f"at most {context}, the model's context"
    require(config.max_length == DataConfig.max_length, "data.max_length", rule, config.max_length)
    return context


def _read_source(
    source: str, config: DataConfig, encoder: Encoder
) -> tuple[dict[str, list[Example]], list[SourceReport]]:
    found, reports = {}, []
    label = Path(source).name or source
    for split, rows in open_rows(source, config.subset, config.limit).items():
        report = SourceReport(source=label, split=split, shape="" if config.shape == "auto" else config.shape)
        found[split] = _examples(rows, config, encoder, report)
        reports.append(report)
    return found, reports


def _examples(rows: Iterable[Row], config: DataConfig, encoder: Encoder, report: SourceReport) -> list[Example]:
    examples: list[Example] = []
    first = ""
    for row in rows:
        report.rows += 1
        try:
            shape = _shape(row, report.shape, first)
            report.shape, first = report.shape or shape, first or row.place
            examples += _encoded(row, shape, encoder, config.strict)
        except Dropped as reason:
            report.dropped.add(str(reason), row.place)
        except DataError as error:
            if config.strict:
                raise
            report.dropped.add(str(error).removeprefix(row.place).lstrip(": "), row.place)
        for note in dict.fromkeys(encoder.notes):
            report.noted.add(note, row.place)
        encoder.notes.clear()
    return examples


def _shape(row: Row, expected: str, first: str) -> str:
    """The row's shape, which must be that of the first one."""
    shape = detect(row.value)
    if expected in ("", shape) and shape is not None:
        return shape
    if expected and not first and isinstance(row.value, Mapping):
        return expected  # as the configuration says
    if shape is None:
        wanted = "messages, prompt and completion, instruction and output, conversations, or text"
        raise DataError(f"{row.place} must have {wanted}, {unknown(row.value)}.")
    where = f" as {first}" if first else ""
    raise DataError(f"{row.place} must be of shape {expected}{where}, but is of shape {shape}.")


def _encoded(row: Row, shape: str, encoder: Encoder, strict: bool) -> list[Example]:
    try:
        form = read(row.value, shape)
    except DataError as error:
        raise DataError(f"{row.place}: {error}.") from None
    try:
        return encoder(form, row.place)
    except Dropped as reason:
        if strict and str(reason) == "no answer":
            raise DataError(
                f"{row.place} must have an answer to learn, but has none; data.strict=false leaves such rows out."
            ) from None
        raise


def _apart(examples: list[Example], wanted: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(the rest, those kept apart): whole rows, so that answers of one conversation stay together."""
    names = list(dict.fromkeys(example.name for example in examples))
    count = int(wanted) if wanted >= 1 else max(round(wanted * len(names)), 1)
    if count >= len(names):
        require(wanted < 1, "data.validation", f"less than the {len(names)} rows that there are", count)
        return examples, []
    random = _generator("validation", seed)
    chosen = {names[i] for i in random.permutation(len(names))[:count]}
    return [e for e in examples if e.name not in chosen], [e for e in examples if e.name in chosen]


def _times(examples: list[Example], weight: float, seed: int) -> list[Example]:
    """Each example floor(weight) times, and a random share of them once more."""
    whole = int(weight)
    rest = round((weight - whole) * len(examples))
    chosen = sorted(_generator("weights", seed).permutation(len(examples))[:rest])
    return examples * whole + [examples[i] for i in chosen]


def _generator(what: str, seed: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{what} {seed}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _why(reports: Sequence[SourceReport]) -> str:
    dropped = [f"{n} × {what}" for report in reports for what, n in report.dropped.counts.items()]
    return f" Left out: {'; '.join(dropped)}." if dropped else ""

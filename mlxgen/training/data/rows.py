"""Rows of training data: from JSON Lines, JSON and Parquet files, and from data sets of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlxgen.errors import ConfigError, DataError

_FORMATS = (".jsonl", ".ndjson", ".json", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What the files and splits of a data set are called.
SPLITS = {"train": ("train", "training"), "valid": ("valid", "validation", "val", "dev", "eval"), "test": ("test",)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """place: for messages, as "train.jsonl line 7"."""

    place: str
    value: Any


def open_rows(source: str, subset: str | None = None, limit: int | None = None) -> dict[str, Iterable[Row]]:
    """The rows of each split (train, valid, test) that a file, a folder or a data set of the hub has.

    limit: at most so many of each. Raises DataError for what cannot be read, also while the rows are read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        found: dict[str, Iterable[Row]] = {"train": _read(path)}
    elif path.is_dir():
        found = {split: _read(file) for split, file in _files(path).items()}
    elif _HUB_ID.fullmatch(source) and path.suffix not in _FORMATS:
        found = _from_hub(source, subset)
    else:
        raise DataError(f"`data.path` must be a file, a folder or a hub id, but there is no {source}.")
    return {split: islice(rows, limit) for split, rows in found.items()}


def _files(folder: Path) -> dict[str, Path]:
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _FORMATS}
    found = {}
    for split, names in SPLITS.items():
        fitting = [path for path in files.values() if path.stem in names]
        if len(fitting) > 1:
            both = " and ".join(path.name for path in fitting)
            raise DataError(f"`data.path` must have one {split} file, but {folder} has {both}.")
        if fitting:
            found[split] = fitting[0]
    if not found:
        wanted = ", ".join(f"{split}.jsonl" for split in SPLITS)
        raise DataError(
            f"`data.path` must be a folder with {wanted} (or .json, .parquet), but {folder} has "
            f"{', '.join(files) or 'none of these'}."
        )
    return found


def _read(path: Path) -> Iterator[Row]:
    """The rows of a file, one by one; DataError if there are none."""
    if path.suffix not in _FORMATS:
        raise DataError(f"{path.name} must be {', '.join(_FORMATS)}, but is {path.suffix or 'without an ending'}.")
    read = {".json": _json, ".parquet": _parquet}.get(path.suffix, _json_lines)
    empty = True
    try:
        for row in read(path):
            empty = False
            yield row
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise DataError(f"{path.name} must be UTF-8 text, but is not.") from None
    if empty:
        raise DataError(f"{path.name} must have a row at least, but is empty.")


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path.name} line {number}"
                yield Row(place=place, value=_parsed(line.strip(), place))


def _json(path: Path) -> Iterator[Row]:
    value = _parsed(path.read_text(encoding="utf-8-sig"), path.name)
    if isinstance(value, Mapping):  # as some data sets wrap their rows
        value = next((value[key] for key in ("data", "train", "rows") if isinstance(value.get(key), list)), None)
    if not isinstance(value, list):
        raise DataError(f"{path.name} must be a list of rows; for a row in each line, call it .jsonl.")
    for number, row in enumerate(value, 1):
        yield Row(place=f"{path.name} item {number}", value=row)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        raise DataError(f"{place} must be JSON, but {where}: {error.msg}.") from None
    except RecursionError:
        raise DataError(f"{place} must be JSON, but is nested too deeply.") from None


def _parquet(path: Path) -> Iterator[Row]:
    for number, value in enumerate(_parquet_values(path), 1):
        yield Row(place=f"{path.name} row {number}", value=value)


def _parquet_values(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        yield from _datasets(path.name).load_dataset("parquet", data_files=str(path), split="train")
        return
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except ArrowException as error:
        raise DataError(f"{path.name} must be a Parquet file, but: {' '.join(str(error).split())}") from None


def _from_hub(name: str, subset: str | None) -> dict[str, Iterable[Row]]:
    """The splits of a data set, under the first of their names that it has."""
    try:
        splits = _datasets(f"there is no file or folder {name}; as a data set of the hub it").load_dataset(name, subset)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"`data.path`: the data set {name} cannot be loaded: {' '.join(str(error).split())}") from None
    found: dict[str, Iterable[Row]] = {}
    for split, names in SPLITS.items():
        if known := next((n for n in names if n in splits), None):
            found[split] = _numbered(f"{name} {known}", splits[known])
    if not found:
        raise DataError(f"`data.path`: {name} must have a split called train, but has {', '.join(splits)}.")
    return found


def _numbered(place: str, rows: Iterable[Any]) -> Iterator[Row]:
    return (Row(place=f"{place} row {number}", value=value) for number, value in enumerate(rows, 1))


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"`data.path`: {what} needs the datasets library (pip install datasets); .jsonl needs none."
        ) from None
    return datasets

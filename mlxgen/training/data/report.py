"""What was read, what is learned of it, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxgen.training.batch import Example

_PLACES = 3  # that are named of each reason


@dataclass(kw_only=True)
class Tally:
    """How often something happened, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, place: str) -> None:
        self.counts[what] += 1
        where = self.places.setdefault(what, [])
        if len(where) < _PLACES:
            where.append(place)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {what: {"rows": count, "first": self.places[what]} for what, count in self.counts.most_common()}


@dataclass(kw_only=True)
class SourceReport:
    """One split of one source."""

    source: str
    split: str
    shape: str = ""
    rows: int = 0
    dropped: Tally = field(default_factory=Tally)
    noted: Tally = field(default_factory=Tally)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "split": self.split,
            "shape": self.shape,
            "rows": self.rows,
            "dropped": self.dropped.as_dict(),
            "noted": self.noted.as_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """sources: what was read. splits: what came of it; `validation_from_train`: whether valid was split off."""

    sources: tuple[SourceReport, ...]
    splits: dict[str, dict[str, int]]
    validation_from_train: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "sources": [source.as_dict() for source in self.sources],
            "splits": self.splits,
            "validation_from_train": self.validation_from_train,
        }

    def lines(self) -> list[str]:
        """For people: a line for each thing."""
        lines = []
        for s in self.sources:
            lines.append(f"{s.source} {s.split}: {s.rows:,} rows of shape {s.shape}")
            for verb, tally in (("left out", s.dropped), ("note", s.noted)):
                for what, count in tally.counts.most_common():
                    more = ", ..." if count > len(tally.places[what]) else ""
                    lines.append(f"  {verb}: {count:,} × {what} ({', '.join(tally.places[what])}{more})")
        for name, numbers in self.splits.items():
            if numbers["examples"]:
                split_off = ", split off train" if name == "valid" and self.validation_from_train else ""
                lines.append(
                    f"{name}: {numbers['examples']:,} examples, {numbers['tokens']:,} tokens, "
                    f"{numbers['learned']:,} of them learned, longest {numbers['longest']:,}{split_off}"
                )
        return lines


def numbers_of(examples: Sequence[Example]) -> dict[str, int]:
    return {
        "examples": len(examples),
        "tokens": sum(len(example.tokens) for example in examples),
        "learned": sum(sum(example.learned) for example in examples),
        "longest": max((len(example.tokens) for example in examples), default=0),
    }

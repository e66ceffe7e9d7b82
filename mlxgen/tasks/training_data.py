"""The examples of a run as batches, and what is noted of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxgen.config import Config, DataConfig
from mlxgen.loading import LoadedModel
from mlxgen.tokenizer import open_tokenizer
from mlxgen.training.batch import Example
from mlxgen.training.batches import Batches
from mlxgen.training.data import Data, DataReport, open_data


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """`valid` is None where there is nothing to evaluate on."""

    train: Batches
    valid: Batches | None
    batch_size: int
    about: DataReport
    fingerprint: str


def open_training_data(config: Config, loaded: LoadedModel, seed: int) -> TrainingData:
    """Read what `data` names. Raises ConfigError or DataError for what can't be learned from."""
    data = _open(config, config.data, loaded, seed, ("train",))
    return TrainingData(
        train=_batches(config, loaded, data.train, seed),
        valid=_batches(config, loaded, data.valid, seed, shuffle=False) if data.valid else None,
        batch_size=config.data.batch_size,
        about=data.report,
        fingerprint=fingerprint(data.train, data.valid),
    )


def open_evaluation_data(config: Config, loaded: LoadedModel, split: str) -> Batches:
    """The examples of a split as batches; auto: the test file's, else the valid file's, else all there are."""
    settings = config.data if split == "valid" else replace(config.data, validation=0.0)
    data = _open(config, settings, loaded, config.seed or 0, () if split == "auto" else (split,))
    examples = data.test or data.valid or data.train if split == "auto" else getattr(data, split)
    return _batches(config, loaded, examples, 0, shuffle=False)


def _open(config: Config, settings: DataConfig, loaded: LoadedModel, seed: int, needs: Sequence[str]) -> Data:
    return open_data(
        settings,
        open_tokenizer(loaded.checkpoint, config.tokenizer),
        context=loaded.decoder.spec.context,
        eos_ids=loaded.eos_ids,
        seed=seed,
        raw=config.raw,
        needs=needs,
    )


def _batches(
    config: Config, loaded: LoadedModel, examples: Sequence[Example], seed: int, *, shuffle: bool = True
) -> Batches:
    data, context = config.data, loaded.decoder.spec.context
    return Batches(
        examples,
        batch_size=data.batch_size,
        max_length=data.max_length if context is None else min(data.max_length, context),
        packing=data.packing,
        seed=seed,
        shuffle=shuffle,
    )


def fingerprint(*parts: Sequence[Example]) -> str:
    """Of all tokens in their order."""
    digest = hashlib.sha256()
    for examples in parts:
        for example in examples:
            digest.update(repr((example.tokens, example.learned)).encode())
        digest.update(b"\0")
    return digest.hexdigest()

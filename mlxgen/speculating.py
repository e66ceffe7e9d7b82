"""From the configuration to a way to guess tokens: `speculation=lookup`, or `=draft` with its second model."""

from __future__ import annotations

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from mlxgen.blueprint import DecoderSpec
from mlxgen.blueprint.mixers import recurrent_of
from mlxgen.cache import Full
from mlxgen.completion import SpeculationStats
from mlxgen.config import Config, load_config
from mlxgen.engine import DraftModel, Generation, Lookup, TokenSequence
from mlxgen.engine.speculation import PAUSED
from mlxgen.errors import ConfigError, TokenizerError
from mlxgen.loading import load
from mlxgen.protocols import Tokenizer
from mlxgen.sampler import sample
from mlxgen.tokenizer import open_tokenizer


def check_speculation(config: Config) -> None:
    """Raise ConfigError, before anything is loaded, for a draft without a model."""
    if config.speculation.kind == "draft" and config.speculation.model is None:
        raise ConfigError("`speculation.model` must be given: a small model with the same vocabulary.")


def open_speculation(config: Config, spec: DecoderSpec, tokenizer: Tokenizer) -> Lookup | DraftModel | None:
    """What guesses the tokens of a model, None if nothing does. Loads the draft model.

    Raises ConfigError where model and draft can't work together: recurrent layers, another vocabulary.
    """
    chosen = config.speculation
    if chosen.kind == "none":
        return None
    _check_can_forget(spec, f"`speculation` must be none, but is {chosen.kind}: the model")
    if chosen.kind == "lookup":
        return Lookup(tokens=chosen.tokens, ngram=chosen.ngram, always=chosen.always)
    return _draft(config, spec, tokenizer)


def _draft(config: Config, spec: DecoderSpec, tokenizer: Tokenizer) -> DraftModel:
    chosen, own = config.speculation, config.config_dirs
    folder = own[0] if len(own) > 1 else None
    small = load_config([f"model={chosen.model}", f"model.dtype={config.model.dtype}"], config_dir=folder)
    loaded = load(small.model, dirs=config.config_dirs)
    draft = loaded.decoder
    _check_can_forget(draft.spec, "`speculation.model` must be another model: it")
    if config.tokenizer.kind == "auto":
        _check_spelling(tokenizer, open_tokenizer(loaded.checkpoint, config.tokenizer), spec, draft.spec)
    elif draft.spec.vocab_size != spec.vocab_size:
        sizes = f"{draft.spec.vocab_size} and {spec.vocab_size} tokens"
        raise ConfigError(f"`speculation.model` must have the vocabulary of the model, but they have {sizes}.")
    return DraftModel(
        draft,
        lambda: TokenSequence(lambda: Full()(draft.spec)),  # type: ignore[arg-type, return-value]
        sample,
        vocab_size=spec.vocab_size,
        tokens=chosen.tokens,
        context=draft.spec.context,
        always=chosen.always,
    )


def _check_can_forget(spec: DecoderSpec, whose: str) -> None:
    if any(recurrent_of(layer.mixer) is not None for layer in spec.layers):
        raise ConfigError(f"{whose} has recurrent layers, which can't forget a wrong guess.")


def _check_spelling(one: Tokenizer, other: Tokenizer, spec: DecoderSpec, small: DecoderSpec) -> None:
    """Every token means the same to both. Padding at the end of an embedding does not count."""
    sizes = [min(t.vocab_size, s.vocab_size) for t, s in ((one, spec), (other, small))]
    try:
        differ = sum(one.token_bytes(token) != other.token_bytes(token) for token in range(min(sizes)))
    except TokenizerError as error:
        raise ConfigError(f"`speculation.model` must have the vocabulary of the model, but {error}") from None
    if differ or sizes[0] != sizes[1]:
        found = f"they have {sizes[1]} and {sizes[0]} tokens, {differ} of them different"
        raise ConfigError(f"`speculation.model` must have the vocabulary of the model, but {found}.")


def speculation_stats(generation: Generation) -> SpeculationStats | None:
    """What became of a request's guesses; None where it made none."""
    speculator = generation.speculator
    if speculator is None:
        return None
    share = speculator.accepted / speculator.drafted if speculator.drafted else 0.0
    return SpeculationStats(
        checks=speculator.checks,
        drafted=speculator.drafted,
        accepted=speculator.accepted,
        acceptance=share,
        skipped=speculator.skipped,
        note=speculator.off or (PAUSED if speculator.paused else None),
    )

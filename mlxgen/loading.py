"""From a model's configuration to a decoder with weights, ready to run."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlxgen.device

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

from mlxgen.blueprint import Blueprint, DecoderSpec, find_blueprint
from mlxgen.blueprint.spec import MoeSpec
from mlxgen.blueprint.text_part import text_config
from mlxgen.checkpoint import Checkpoint, PackageSource, open_checkpoint, read_config
from mlxgen.checkpoint.load import load_weights, names_of
from mlxgen.config import AdapterConfig, ModelConfig, config_dirs
from mlxgen.decoder import Decoder
from mlxgen.errors import ConfigError, ModelError
from mlxgen.passes.fuse_projections import fuse_projections

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A decoder with its weights. rules: how they are called in files, see mlxgen.checkpoint.save."""

    decoder: Decoder
    checkpoint: Checkpoint
    rules: Mapping[str, Any] = field(default_factory=dict, repr=False)
    adapters: tuple[Any, ...] = ()  # mlxgen.passes.adapters.LoadedAdapter
    merged: bool = False  # whether they are in the weights
    model_type: str = ""
    source: str = ""

    @property
    def identity(self) -> dict[str, str]:
        """What an adapter notes of the model that it was trained on."""
        return {"source": self.source, "model_type": self.model_type, "fingerprint": self.checkpoint.fingerprint()}

    def fingerprint(self) -> str:
        """Everything that a layer's keys and values depend on, but for the tokens.

        These are the weights that were read and the form in which they are held, and what is computed with them.
        """
        held = [(name, array.shape, str(array.dtype)) for name, array in tree_flatten(self.decoder.parameters())]
        added = [(adapter.name, adapter.fingerprint, adapter.weight) for adapter in self.adapters]
        text = f"{mlxgen.__version__} {self.checkpoint.fingerprint()} {self.decoder.spec!r} {held} {added}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def eos_ids(self) -> frozenset[int]:
        return eos_ids_of(self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a model is, before its weights. `checkpoint` is None where only its config.json was fetched."""

    spec: DecoderSpec
    blueprint: Blueprint
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    cache_dtype: mx.Dtype


def describe(
    model: ModelConfig, architecture: Mapping[str, Any] | None = None, dirs: tuple[Path, ...] | None = None
) -> Described:
    """The decoder that a checkpoint describes; of a hub repository that is not here, only config.json is fetched.

    architecture: a composed blueprint to use instead of the one that the checkpoint's `model_type` names.
    Raises ModelError for what does not fit together.
    """
    config, checkpoint = read_config(_source(model), model.revision)
    return _described(config, checkpoint, model, architecture, dirs)


def _described(
    raw: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    model: ModelConfig,
    architecture: Mapping[str, Any] | None,
    dirs: tuple[Path, ...] | None,
) -> Described:
    config = text_config(raw)
    folders = [folder / "architecture" for folder in dirs or config_dirs(None)]
    if architecture and "decoder" in architecture:
        blueprint = Blueprint(name="architecture", tree=architecture)
    else:
        blueprint = find_blueprint(config, folders)
    try:
        names = names_of(checkpoint, blueprint.weights(config)) if checkpoint else None
        spec = blueprint.spec(config, names)
    except ConfigError as error:  # it is the checkpoint's fault, not the user's
        raise ModelError(f"{checkpoint.path if checkpoint else model.source}: {error}") from error
    _check_keys(blueprint, config, folders, strict=model.strict)
    stored = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), mx.bfloat16)
    return Described(
        spec=spec,
        blueprint=blueprint,
        config=config,
        checkpoint=checkpoint,
        cache_dtype=precision(model)[0] or stored,
    )


def load(
    model: ModelConfig,
    architecture: Mapping[str, Any] | None = None,
    dirs: tuple[Path, ...] | None = None,
    adapter: AdapterConfig | None = None,
    check: Callable[[Described], None] = lambda described: None,
) -> LoadedModel:
    """Open the checkpoint, find its blueprint, build the decoder, read the weights, put trained adapters on it.

    check: called before memory is spent; it may raise.

    architecture: a composed blueprint to use instead of the one that the checkpoint's `model_type` names.
    Raises ModelError or ConfigError, before memory is spent, for what does not fit together.
    """
    checkpoint = open_source(model)
    described = _described(checkpoint.config, checkpoint, model, architecture, dirs)
    dtype, dequantize = precision(model)
    _check_experts(described.spec, dtype, dequantize)
    check(described)
    decoder = Decoder(described.spec)
    rules = described.blueprint.weights(described.config)
    adapted = adapter is not None and bool(adapter.folders)
    load_weights(
        decoder,
        checkpoint,
        rules,
        dtype=dtype,
        dequantize=dequantize,
        finish=fuse_projections if model.fuse and not adapted else lambda layer: None,
    )
    loaded = LoadedModel(
        decoder=decoder.eval(),
        checkpoint=checkpoint,
        rules=rules,
        model_type=str(described.config.get("model_type", "")),
        source=model.source,
    )
    return _with_adapters(loaded, adapter, fuse=model.fuse) if adapter is not None and adapted else loaded


def _with_adapters(loaded: LoadedModel, config: AdapterConfig, *, fuse: bool) -> LoadedModel:
    """The model with trained adapters on it. Projections are fused then, with what is on them."""
    from mlxgen.passes.adapters import load_adapters  # the many runs without one do without
    from mlxgen.passes.fuse_adapted import fuse_adapted

    adapters = load_adapters(loaded.decoder, config, loaded.rules, loaded.identity)
    for layer in loaded.decoder.layers if fuse else ():
        fuse_projections(layer)
        fuse_adapted(layer)
        mx.eval(layer.parameters())
    return replace(loaded, adapters=adapters, merged=config.merge)


def eos_ids_of(checkpoint: Checkpoint) -> frozenset[int]:
    """End-of-sequence ids: the union of what config.json and generation_config.json name."""
    ids: set[int] = set()
    for config in (checkpoint.config, checkpoint.generation_config):
        named = config.get("eos_token_id")
        ids |= {named} if isinstance(named, int) else set(named or ())
    return frozenset(ids)


def open_source(model: ModelConfig) -> Checkpoint:
    """The checkpoint that the configuration names, fetched if it is not here; no tensor is read."""
    return open_checkpoint(_source(model), revision=model.revision)


def _source(model: ModelConfig) -> str | PackageSource:
    p = model.package
    if p is None:
        return model.source
    return PackageSource(requirements=p.requirements, members=p.members, sha256=p.sha256, file=p.file)


def precision(model: ModelConfig) -> tuple[mx.Dtype | None, bool]:
    """(dtype of the weights, whether quantized ones are unpacked).

    MLX's CPU backend is fast in float32 only: half precision and quantized products run in plain loops there.
    """
    on_cpu = mx.default_device().type == mx.cpu
    dtype = _DTYPES.get(model.dtype) or (mx.float32 if on_cpu else None)
    return dtype, on_cpu if model.dequantize == "auto" else bool(model.dequantize)


def _check_keys(blueprint: Blueprint, config: Mapping[str, Any], folders: Sequence[Path], *, strict: bool) -> None:
    """A setting that is not understood must not be passed over in silence."""
    stops, unknown = blueprint.unread(config, folders)
    if stops:
        named = ", ".join(f"`{key}` {str(config[key])[:40]}" for key in stops)
        text = (
            f"config.json: {named}: it changes what a model computes, but blueprint {blueprint.name} does not read it"
        )
        if strict:
            raise ModelError(f"{text}; model.strict=false loads all the same.")
        warnings.warn(f"{text}.", stacklevel=2)
    if unknown:
        warnings.warn(f"config.json: nobody knows {', '.join(f'`{key}`' for key in unknown)}; ignored.", stacklevel=2)


def _check_experts(spec: DecoderSpec, dtype: mx.Dtype | None, dequantize: bool) -> None:
    """MLX's CPU backend gathers plain expert weights in float32 only."""
    experts = any(isinstance(layer.ffn, MoeSpec) for layer in spec.layers)
    if experts and dequantize and dtype != mx.float32 and mx.default_device().type == mx.cpu:
        raise ConfigError("`model.dtype` must be float32 for a mixture of experts on a CPU; leave it at auto.")


def load_model(source: str | Path, dtype: str = "float32") -> Decoder:
    """A decoder with weights: tokens [B, L] -> logits [B, L, V]. No tokenizer is needed.

    source: a folder, a .gguf file or a hub id. dtype: float32, bfloat16, float16, or auto for the device's own.
    """
    if dtype not in (*_DTYPES, "auto"):
        raise ConfigError(f"`dtype` must be one of {', '.join(_DTYPES)} or auto, but is {dtype!r}.")
    return load(ModelConfig(source=str(source), dtype=dtype)).decoder  # type: ignore[arg-type]

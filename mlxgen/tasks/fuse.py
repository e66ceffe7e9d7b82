"""task=fuse: a trained adapter goes into the weights, and the whole is written as a checkpoint of its own."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
from mlx.utils import tree_map

from mlxgen.blueprint.text_part import text_config
from mlxgen.checkpoint.save import mlx_quantization, save_weights, write_json
from mlxgen.config import Config
from mlxgen.errors import EXIT_OK, ConfigError, ModelError
from mlxgen.loading import LoadedModel, load, open_source
from mlxgen.passes.merge import Merged, merge, overall
from mlxgen.tasks.output import print_json, say, status
from mlxgen.tokenizer import open_tokenizer

_FLOATS = ("float32", "bfloat16", "float16")
_TOKENIZER = ("*.model", "*.jinja", "*.tiktoken", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
              "added_tokens.json", "chat_template*", "additional_chat_templates")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fuse:
    """Writes a folder that mlx-lm, and unless its weights are packed transformers, load without the adapter.

    packed: what becomes of quantized weights that have an adapter: `repack` quantizes them as before, which rounds,
    and says how much of the adapter is lost; `plain` leaves them whole beside the others, which stay packed;
    `dequantize` writes plain weights only.
    """

    packed: Literal["repack", "plain", "dequantize"] = "repack"

    def __call__(self, config: Config) -> int:
        out = _empty(config.out)
        if not config.adapter.folders:
            raise ConfigError("`adapter.path` must be given: the folder of the adapter that goes into the weights.")
        with status("loading the model"):
            loaded, dtype = self._load(config)
        with status("merging"):
            report = merge(loaded.decoder, "plain" if self.packed == "plain" else "repack")
            if self.packed == "dequantize":
                loaded.decoder.update(tree_map(lambda p: _as(p, dtype), loaded.decoder.parameters()))
        with status("writing"):
            _write(loaded, config, out, dtype)
        _tell(report, config, out)
        return EXIT_OK

    def _load(self, config: Config) -> tuple[LoadedModel, mx.Dtype]:
        """The model in the form in which it is stored, whatever would be fast on this device; and its precision."""
        stored = _stored_dtype(config)
        # A mixture of experts runs in float32 only on some devices; this one never runs.
        dtype = "float32" if self.packed == "dequantize" else stored
        model = dataclasses.replace(config.model, fuse=False, dequantize=self.packed == "dequantize", dtype=dtype)
        adapter = dataclasses.replace(config.adapter, merge=False)
        return load(model, config.architecture, config.config_dirs, adapter), getattr(mx, stored)


def _empty(out: Path | None) -> Path:
    if out is None:
        raise ConfigError("`out` must be given: the folder of the new checkpoint.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"`out` must be a new or an empty folder, but {out} is not.")
    return out


def _stored_dtype(config: Config) -> str:
    """The precision that most of a checkpoint's numbers have; `model.dtype`, if that is set."""
    if config.model.dtype != "auto":
        return config.model.dtype
    sizes = Counter()
    for info in open_source(config.model).tensors.values():
        sizes[info.dtype] += info.nbytes
    found = [dtype for dtype, _ in sizes.most_common() if dtype in _FLOATS]
    return found[0] if found else "bfloat16"


def _as(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _write(loaded: LoadedModel, config: Config, out: Path, dtype: mx.Dtype) -> None:
    checkpoint = loaded.checkpoint
    about = dict(text_config(checkpoint.config))
    if "text_config" in checkpoint.config:  # the language model of a larger one
        about.pop("architectures", None)
    for key in ("quantization", "quantization_config"):
        about.pop(key, None)
    about["torch_dtype"] = about["dtype"] = str(dtype).removeprefix("mlx.core.")
    quantization = mlx_quantization(loaded.decoder, loaded.rules)
    if quantization is not None:
        about |= {"quantization": quantization, "quantization_config": quantization}
    try:
        save_weights(loaded.decoder, loaded.rules, about, out)
        if checkpoint.generation_config:
            write_json(out / "generation_config.json", checkpoint.generation_config)
        _write_tokenizer(loaded, config, out)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"`out`: {out} can't be written: {error}.") from None


def _write_tokenizer(loaded: LoadedModel, config: Config, out: Path) -> None:
    """The tokenizer's own files, where it has some."""
    folder = loaded.checkpoint.tokenizer_folder
    if folder is None and loaded.checkpoint.gguf_metadata is None:
        return
    if folder is None:
        tokenizer: Any = open_tokenizer(loaded.checkpoint, config.tokenizer)
        if hasattr(tokenizer, "save"):
            tokenizer.save(out)
        return
    for path in sorted({path for pattern in _TOKENIZER for path in folder.glob(pattern)}):
        if path.is_dir():
            shutil.copytree(path, out / path.name)
        else:
            shutil.copyfile(path, out / path.name)


def _tell(report: list[Merged], config: Config, out: Path) -> None:
    whole = overall(report)
    if config.output != "text":
        modules = {one.path: {"kept": one.kept, "noise": one.noise} for one in report}
        print_json({"folder": str(out), "kept": whole.kept, "noise": whole.noise, "modules": modules}, config)
        return
    say(f"written to {out}: {len(report)} modules changed")
    if whole.noise > 0.02:
        say(
            f"rounding: {100 * whole.kept:.0f} % of the adapter's change is kept, with noise {whole.noise:.1f} times "
            "its size; packed=plain or packed=dequantize keeps it whole"
        )

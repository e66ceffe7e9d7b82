"""Vision-language checkpoints: only their text part is loaded.

Their config.json keeps the language model's keys under `text_config`, and their tensors carry a prefix. What belongs
to the eyes and ears is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys that may stand beside `text_config` and belong to the text part too.
_SHARED = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "vocab_size", "quantization", "quantization_config")

# The text model's type, for wrappers whose `text_config` does not say it.
_TEXT_TYPES = {
    "llava": "llama",
    "pixtral": "mistral",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_vl",
    "llama4": "llama4_text",
}

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
_OTHER_SENSES = (
    "vision_tower.", "vision_model.", "visual.", "vision_embed", "multi_modal_projector.", "mm_projector.",
    "connector.", "patch_merge", "audio_tower.", "audio_model.", "embed_vision.", "embed_audio.",
    "image_newline",
)  # fmt: skip


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json; a config without `text_config` is that already."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = config.get("model_type")
    own = inner.get("model_type") or _TEXT_TYPES.get(str(outer), outer)
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {**shared, **{k: v for k, v in inner.items() if v is not None or k not in shared}, "model_type": own}


def text_name(name: str) -> str | None:
    """A tensor's name without the prefix of a vision-language checkpoint; None if it is not of the text part."""
    bare = name.removeprefix("model.")
    if bare.startswith(_OTHER_SENSES):
        return None
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name

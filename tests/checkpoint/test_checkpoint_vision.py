"""Vision-language checkpoints load their text part, and nothing of the rest."""

import json

import mlx.core as mx
import numpy as np
import parity_cases as parity
import pytest
from safetensors.numpy import save_file

import mlxgen

# case of the text model -> the wrapper's model_type, what its tensors are called, what its text_config leaves out
WRAPPERS = {
    "gemma3": ("gemma3_text", "language_model.{}", ()),
    "gemma3-v5": ("gemma3_text", "v5", ()),
    "mistral3": ("mistral", "language_model.{}", ("model_type",)),
    "qwen3_vl": ("qwen3", "v5", ()),
    "qwen2_5_vl": ("qwen2", "flat", ()),
}


def renamed(name, style):
    if style == "flat":
        return name
    if style == "v5":
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    return style.format(name)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_text_part_computes_as_the_text_model(wrapper, tmp_path):
    case, style, left_out = WRAPPERS[wrapper]
    tensors = {renamed(name, style): value for name, value in parity.weights(case).items()}
    eyes = {"vision_tower.a.weight": np.ones(3, np.float32), "model.visual.b": np.ones(2, np.float32)}
    save_file({**tensors, **eyes, "multi_modal_projector.w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    text = {k: v for k, v in parity.config(case).items() if k not in left_out}
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    outer = {"model_type": wrapper.removesuffix("-v5"), "vision_config": {"hidden_size": 7}, **tied}
    config = {**text, **outer} if style == "flat" else {**outer, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    want = parity.golden(case)
    got = np.array(mlxgen.load_model(tmp_path)(mx.array(want["tokens"])[None]))[0]
    assert np.abs(got - want["logits"]).max() < 1e-3 * np.abs(want["logits"]).max()

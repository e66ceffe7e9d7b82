"""Tiny checkpoints are complete, and the same every time."""

import pytest

import mlxgen
from mlxgen.testing.checkpoints import write_tiny

FAMILIES = {
    "llama": {},
    "gemma3_text": {},  # norms stored minus one
    "phi3": {},  # fused projections
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},  # one tensor per expert
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_give_the_same_files(tmp_path):
    one, two, other = (write_tiny(tmp_path / name, seed=seed) for name, seed in (("1", 0), ("2", 0), ("3", 1)))
    assert files(one) == files(two) != files(other)
    assert set(files(one)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_kind_of_layout_is_written_so_that_it_loads_again(tmp_path, model_type):
    import mlx.core as mx

    from mlxgen.testing.models import tiny_decoder

    config = FAMILIES[model_type]
    decoder = mlxgen.load_model(write_tiny(tmp_path, model_type, seed=3, **config))
    tokens = mx.array([[5, 70, 71, 72]])
    expected = tiny_decoder(model_type, seed=3, **config)(tokens)
    assert mx.allclose(decoder(tokens), expected, atol=1e-4, rtol=1e-4)

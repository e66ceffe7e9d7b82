"""What is loaded can be saved: every family's checkpoint comes back, tensor for tensor, under its own names."""

from typing import ClassVar

import mlx.core as mx
import numpy as np
import parity_cases as parity
import pytest

from mlxgen.blueprint import find_blueprint
from mlxgen.checkpoint.load import load_weights, names_of
from mlxgen.checkpoint.save import their_arrays
from mlxgen.config import conf_dir
from mlxgen.decoder import Decoder

# Tensors of which another form is written: a padding row that the authors' code overwrites with zeros, convolutions
# that transformers cuts into equal parts whatever their sizes.
OTHERWISE = ("youtu/model.embed_tokens", "olmo_hybrid/q_conv1d", "olmo_hybrid/k_conv1d", "olmo_hybrid/v_conv1d")


def written_otherwise(name, key):
    module = key.removesuffix(".weight")
    return any(name.startswith(f) and module.endswith(m) for f, m in (entry.split("/") for entry in OTHERWISE))


class InMemory:
    """A checkpoint without files."""

    config: ClassVar = {}
    quantization = None
    baked = frozenset()

    def __init__(self, arrays):
        self.tensors = arrays

    def load(self, name):
        return mx.array(self.tensors[name])


@pytest.mark.parametrize("name", parity.NAMES)
def test_a_saved_checkpoint_is_the_one_that_was_loaded(name):
    config, arrays = parity.config(name), parity.weights(name)
    blueprint = find_blueprint(config, [conf_dir() / "architecture"])
    source, rules = InMemory(arrays), blueprint.weights(config)
    decoder = Decoder(blueprint.spec(config, names_of(source, rules)))
    load_weights(decoder, source, rules)
    saved = their_arrays(decoder, rules)
    assert sorted(saved) == sorted(arrays)
    for key, array in arrays.items():
        if written_otherwise(name, key):
            continue
        assert saved[key].shape == array.shape, key
        np.testing.assert_allclose(np.array(saved[key].astype(mx.float32)), array, rtol=0, atol=1e-6, err_msg=key)

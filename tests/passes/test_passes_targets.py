"""Where adapters are put: parts, names, patterns, layers; and what is wrong is said with the names that there are."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from passes_helpers import decoder_of

from mlxgen.config import AdapterConfig
from mlxgen.errors import ConfigError
from mlxgen.passes.attach import attach
from mlxgen.passes.fuse_projections import fuse_projections
from mlxgen.passes.targets import adaptable, chosen
from mlxgen.testing.models import tiny_decoder


def names(family, patterns, layers=None):
    decoder = decoder_of(family)
    return chosen(list(adaptable(decoder)), patterns, layers, len(decoder.layers))


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (["all_linear"], 2 * 4 + 3 + 3),  # attention, one dense block, one of experts
        (["all-linear"], 2 * 4 + 3 + 3),
        (["attention"], 8),
        (["mlp"], 3),
        (["experts"], 3),
        (["router"], 1),
        (["embeddings"], 1),
        (["q_proj"], 2),
        (["self_attn.q_proj", "v_proj"], 4),
        (["layers.1.self_attn.q_proj"], 1),
        (["*.q_proj"], 2),
        (["[qk]_proj"], 4),
        (["layers.0.*"], 7),
        ([r"re:.*\.experts\..*"], 3),
        (["re:embed_tokens"], 1),
        (["q_proj", "attention"], 8),
    ],
)
def test_patterns(patterns, count):
    assert len(names("qwen3_moe", patterns)) == count


@pytest.mark.parametrize(("layers", "numbers"), [(None, {0, 1}), (1, {1}), (2, {0, 1}), ((0,), {0}), ((-1,), {1})])
def test_layers(layers, numbers):
    assert {int(name.split(".")[1]) for name in names("llama", ["attention"], layers)} == numbers


def test_an_embedding_is_in_no_layer():
    assert names("llama", ["embeddings"], 1) == ["embed_tokens"]


@pytest.mark.parametrize(
    ("patterns", "layers", "message"),
    [
        (["q_prj"], None, r"'q_prj' fits no module.*self_attn.q_proj.*parts: all_linear.*Did you mean `q_proj`"),
        (["q_proj", "nothing.*"], None, r"'nothing.\*' fits no module"),
        (["mixer"], None, "'mixer' fits no module"),
        (["head"], None, "'head' fits no module"),  # it is tied to the embedding
        (["re:("], None, "no regular expression"),
        ([], None, "at least one module"),
        (["layers.0.*"], 1, "fits nothing in `adapter.layers` 1"),
        (["q_proj"], 3, "at most the model's 2"),
        (["q_proj"], (2,), "from 0 to 1"),
        (["q_proj"], (), "from 0 to 1"),
    ],
)
def test_what_fits_nothing(patterns, layers, message):
    with pytest.raises(ConfigError, match=message):
        names("llama", patterns, layers)


def test_a_rank_above_the_dimension():
    with pytest.raises(
        ConfigError, match=r"`adapter.rank` must be at most 16 for layers.0.self_attn.k_proj \(16 x 32\)"
    ):
        attach(decoder_of("llama"), AdapterConfig(kind="lora", rank=17, targets=("k_proj",)), key=mx.random.key(0))


@pytest.mark.parametrize("text", ["[q_proj, v_proj]", "['q_proj','v_proj']"])
def test_targets_as_text(text):
    assert AdapterConfig(targets=text).patterns == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "`rank` must be at least 1"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
        ({"alpha": 16.0, "scale": 2.0}, "must not be given together"),
        ({"path": "a", "paths": {"b": "c"}}, "must not be given together"),
        ({"paths": {"b": "c"}, "weights": {"d": 1.0}}, "`weights.d` must be the name of an adapter"),
        ({"layers": 0}, "`layers` must be at least 1"),
    ],
)
def test_values_that_can_not_be_meant(given, message):
    with pytest.raises(ConfigError, match=message):
        AdapterConfig(**given)


def test_full_fine_tuning_of_everything_of_the_last_layers_and_of_parts():
    def trained(**config):
        decoder = decoder_of("llama")
        attach(decoder, AdapterConfig(kind="full", **config), key=mx.random.key(0))
        return {name for name, _ in tree_flatten(decoder.trainable_parameters())}

    everything = {name for name, _ in tree_flatten(decoder_of("llama").parameters())}
    assert trained() == everything
    assert trained(layers=1) == {name for name in everything if name.startswith("layers.1.")}
    assert trained(targets=("attention",), layers=(0,)) == {
        f"layers.0.self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")
    }


def test_what_a_rule_adjusts_is_not_trained_by_gradients():
    latent = {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
        "routed_scaling_factor": 2.0, "norm_topk_prob": True,
    }  # fmt: skip
    decoder = tiny_decoder("deepseek_v3", **latent)
    attach(decoder, AdapterConfig(kind="full"), key=mx.random.key(0))
    frozen = {n for n, _ in tree_flatten(decoder.parameters())} - {
        n for n, _ in tree_flatten(decoder.trainable_parameters())
    }
    assert frozen == {"layers.1.mlp.router.select_bias"}


def test_full_fine_tuning_of_quantized_weights_is_refused():
    with pytest.raises(ConfigError, match=r"must have plain weights, but embed_tokens is quantized.*model.dequantize"):
        attach(decoder_of("llama", "affine"), AdapterConfig(kind="full"), key=mx.random.key(0))


def test_an_adapter_that_trains_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"Choose e.g. adapter=lora"):
        attach(decoder_of("llama"), AdapterConfig(), key=mx.random.key(0))


def test_choices_and_values_of_the_group():
    from mlxgen.config import load_config

    assert load_config(["+adapter=last_layers", "adapter.layers=2"]).adapter == AdapterConfig(kind="full", layers=2)
    assert load_config(["adapter=rslora", "adapter.rank=16"]).adapter.factor == 4.0
    assert load_config(["adapter=lora", "adapter.targets=[q_proj,*.v_proj]"]).adapter.patterns == ("q_proj", "*.v_proj")
    with pytest.raises(ConfigError, match=r"`adapter.rank` must be at least 1"):
        load_config(["adapter=lora", "adapter.rank=0"])


def test_fused_projections_can_not_be_trained():
    """Nothing of a model may be left out in silence because its projections have been put together."""
    decoder = decoder_of("llama")
    for layer in decoder.layers:
        fuse_projections(layer)
    with pytest.raises(ConfigError, match=r"`model.fuse` must be false"):
        attach(decoder, AdapterConfig(kind="lora", rank=2), key=mx.random.key(0))

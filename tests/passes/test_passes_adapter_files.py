"""Adapters in folders: ours come back bit for bit, mlx-lm and PEFT read and write the same."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from passes_helpers import FAMILIES, TOKENS, decoder_of, distance, rules, settings, stir, trained

from mlxgen.config import AdapterConfig, ModelConfig
from mlxgen.errors import ConfigError, ModelError
from mlxgen.loading import load
from mlxgen.passes.adapters import load_adapter, load_adapters, save_adapter
from mlxgen.passes.attach import attach
from mlxgen.testing.checkpoints import write_tiny

PEFT = Path(__file__).parent / "fixtures/peft"
EXPECTED = json.loads((PEFT / "expected.json").read_text())
EVERYWHERE = ("all_linear", "embeddings")
ignore_their_warnings = pytest.mark.filterwarnings("ignore")  # of transformers, which mlx-lm imports


def saved(folder, family, **config):
    """(the answers of a model with a trained adapter, its folder)."""
    decoder, config = trained(family, **config)
    save_adapter(decoder, folder, config, rules(family))
    return decoder(TOKENS), folder


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("config", [{"kind": "lora"}, {"kind": "dora"}, {"kind": "lora", "format": "peft"}])
def test_what_is_saved_comes_back_bit_for_bit(family, config, tmp_path):
    targets = ("attention",) if "format" in config else ("all_linear",)
    decoder, config = trained(family, targets=targets, **config)
    save_adapter(decoder, tmp_path / "a", config, rules(family))
    again = decoder_of(family)
    load_adapter(again, tmp_path / "a", rules(family))
    want, got = (dict(tree_flatten(d.parameters())) for d in (decoder, again))
    assert set(want) == set(got)
    assert all(mx.array_equal(want[name], got[name]) for name in want)


def test_parts_of_one_projection_elsewhere_are_written_as_one(tmp_path):
    """Three changes of rank 2 of what PEFT and mlx-lm keep in one piece are one of rank 6, of the same effect."""
    for layout, file, leaf in (("mlx", "adapters", "lora_a"), ("peft", "adapter_model", "lora_A.weight")):
        want, folder = saved(
            tmp_path / layout, "phi3", format=layout, targets=("q_proj", "k_proj", "v_proj", "up_proj")
        )
        arrays = mx.load(str(folder / f"{file}.safetensors"))
        assert {name.split(".")[-3 if layout == "peft" else -2] for name in arrays} == {"qkv_proj", "gate_up_proj"}
        assert {min(a.shape) for name, a in arrays.items() if name.endswith(leaf)} == {6}
        decoder = decoder_of("phi3")
        load_adapter(decoder, folder, rules("phi3"))
        assert distance(decoder(TOKENS), want) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("layers", [None, 1, (0,)])
@ignore_their_warnings
def test_mlx_lm_loads_it_and_computes_the_same(family, kind, layers, tmp_path):
    if kind == "dora" and family in ("qwen3_moe", "mixtral"):
        pytest.skip("mlx-lm has no DoRA for experts")
    from mlx_lm import utils
    from mlx_lm.tuner.utils import load_adapters as theirs

    want, folder = saved(tmp_path / "a", family, kind=kind, layers=layers, targets=EVERYWHERE)
    model, _ = utils.load_model(write_tiny(tmp_path / "base", family, tokenizer=False, **settings(family)))
    before = model(TOKENS)
    model = theirs(model, str(folder))
    model.eval()
    assert distance(model(TOKENS), want) < 1e-5 * mx.abs(want).max().item()
    assert distance(before, want) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@ignore_their_warnings
def test_one_that_mlx_lm_has_written(family, kind, tmp_path):
    """With its own defaults: every linear map of the last layer, the router too, and a scale of 20."""
    if kind == "dora" and family in ("qwen3_moe", "mixtral"):
        pytest.skip("mlx-lm has no DoRA for experts")
    from mlx_lm import utils
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, _ = utils.load_model(write_tiny(tmp_path / "base", family, tokenizer=False, **settings(family)))
    parameters = {"rank": 2, "scale": 20.0, "dropout": 0.0}
    model.freeze()
    linear_to_lora_layers(model, 1, parameters, use_dora=kind == "dora")
    stir(model, 0.05)
    model.eval()
    folder = tmp_path / "theirs"
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    about = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    decoder = decoder_of(family)
    load_adapter(decoder, folder, rules(family))
    assert distance(decoder(TOKENS), model(TOKENS)) < 1e-5 * mx.abs(model(TOKENS)).max().item()


@pytest.mark.parametrize("family", FAMILIES)
@ignore_their_warnings
def test_full_fine_tuning_goes_to_mlx_lm_and_back(family, tmp_path):
    from mlx_lm import utils
    from mlx_lm.tuner.utils import load_adapters as theirs

    decoder = decoder_of(family)
    config = AdapterConfig(kind="full", layers=1)
    attach(decoder, config, key=mx.random.key(0))
    stir(decoder)
    save_adapter(decoder, tmp_path / "a", config, rules(family))
    again = decoder_of(family)
    load_adapter(again, tmp_path / "a", rules(family))
    assert mx.array_equal(again(TOKENS), decoder(TOKENS))
    model, _ = utils.load_model(write_tiny(tmp_path / "base", family, tokenizer=False, **settings(family)))
    assert distance(theirs(model, str(tmp_path / "a"))(TOKENS), decoder(TOKENS)) < 2e-5


@pytest.mark.parametrize("name", EXPECTED)
def test_peft_s_adapters_compute_what_transformers_and_peft_do(name, tmp_path):
    """LoRA, rsLoRA with ranks and alphas of their own, DoRA, embeddings, fused projections, experts, Conv1D.

    Made with peft 0.21.2 and transformers 5.24 from the same random checkpoints.
    """
    case = EXPECTED[name]
    write_tiny(tmp_path, case["model_type"], tokenizer=False, **case["config"])
    plain = load(ModelConfig(source=str(tmp_path), dtype="float32")).decoder(TOKENS)
    loaded = load(ModelConfig(source=str(tmp_path), dtype="float32"), adapter=AdapterConfig(path=str(PEFT / name)))
    want = mx.array(case["logits"])
    assert distance(loaded.decoder(TOKENS)[0, -1], want) < 1e-4
    assert distance(plain[0, -1], want) > 0.01


@pytest.mark.parametrize("name", ["lora", "dora", "experts", "fused"])
def test_what_is_written_for_peft_is_what_peft_writes(name, tmp_path):
    """Read and written again: the same tensors under the same names, and of the settings those that count."""
    case = EXPECTED[name]
    write_tiny(tmp_path / "base", case["model_type"], tokenizer=False, **case["config"])
    about = json.loads((PEFT / name / "adapter_config.json").read_text())
    loaded = load(ModelConfig(source=str(tmp_path / "base"), fuse=False), adapter=AdapterConfig(path=str(PEFT / name)))
    kind = "dora" if about["use_dora"] else "lora"
    config = AdapterConfig(kind=kind, format="peft", rank=about["r"], alpha=about["lora_alpha"])
    attach(loaded.decoder, config, key=mx.random.key(0))
    save_adapter(loaded.decoder, tmp_path / "a", config, loaded.rules)
    written = json.loads((tmp_path / "a/adapter_config.json").read_text())
    ours, theirs = (mx.load(str(f / "adapter_model.safetensors")) for f in (tmp_path / "a", PEFT / name))
    assert {key: written[key] for key in ("r", "lora_alpha", "use_dora", "use_rslora", "peft_type")} == {
        key: about[key] for key in ("r", "lora_alpha", "use_dora", "use_rslora", "peft_type")
    }
    assert set(ours) == set(theirs)
    assert all(mx.array_equal(ours[key], theirs[key]) for key in ours)


def test_an_adapter_is_trained_on(tmp_path):
    want, folder = saved(tmp_path / "a", "llama", kind="dora")
    decoder = decoder_of("llama")
    load_adapter(decoder, folder, rules("llama"))
    attached = attach(decoder, AdapterConfig(kind="dora", rank=2, learning_rate_ratio=2.0), key=mx.random.key(0))
    assert distance(decoder(TOKENS), want) < 1e-5
    assert attached.trained == sum(p.size for _, p in tree_flatten(decoder.trainable_parameters())) > 0
    stir(decoder)
    assert distance(decoder(TOKENS), want) > 0.01


def test_other_values_than_the_decoder_s_can_be_saved(tmp_path):
    """An average of the weights, as it may be kept beside them while training."""
    decoder, config = trained("llama")
    zeros = {n: mx.zeros_like(p) for n, p in tree_flatten(decoder.trainable_parameters())}
    save_adapter(decoder, tmp_path, config, rules("llama"), parameters=zeros)
    again = decoder_of("llama")
    load_adapter(again, tmp_path, rules("llama"))
    assert mx.array_equal(again(TOKENS), decoder_of("llama")(TOKENS))


def test_several_adapters_add_up(tmp_path):
    """Both the loaded sum and the merged one are W + 0.5 * first + 2 * second."""
    for number, name in enumerate(("first", "second")):
        decoder, config = trained("llama", targets=("q_proj", "down_proj"))
        stir(decoder, 0.1 * number)
        save_adapter(decoder, tmp_path / name, config, rules("llama"))
    paths = {name: str(tmp_path / name) for name in ("first", "second")}
    answers = []
    for merge in (False, True):
        decoder = decoder_of("llama")
        config = AdapterConfig(paths=paths, weights={"first": 0.5, "second": 2.0}, merge=merge)
        loaded = load_adapters(decoder, config, rules("llama"))
        assert len({adapter.fingerprint for adapter in loaded}) == 2
        assert any("lora_a" in name for name, _ in tree_flatten(decoder.parameters())) != merge
        answers.append(decoder(TOKENS))
    assert distance(*answers) < 1e-5


# Bad input


def broken(folder, change):
    """An adapter of which one thing is wrong."""
    _, folder = saved(folder, "llama")
    change(folder)
    return folder


def rewrite(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename(folder, old, new):
    arrays = mx.load(str(folder / "adapters.safetensors"))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {n.replace(old, new): a for n, a in arrays.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: shutil.rmtree(f), "must be the folder of an adapter"),
        (lambda f: (f / "adapter_config.json").unlink(), "must hold adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "must be JSON"),
        (lambda f: (f / "adapters.safetensors").unlink(), "adapters.safetensors` is missing"),
        (lambda f: (f / "adapters.safetensors").write_bytes(b"1234"), "Truncated"),
        (lambda f: rewrite(f, lora_parameters=None), "`lora_parameters` with a scale"),
        (lambda f: rewrite(f, peft_type="IA3"), "`peft_type` is 'IA3'"),
        (lambda f: rename(f, "layers.0", "layers.7"), r"for another model: this one has no layers.7\S+ and 6 more"),
        (lambda f: rename(f, "q_proj.lora_a", "q_proj.lora_x"), "can't be used: .*q_proj.lora_x"),
        (lambda f: rename(f, "layers.0.self_attn.q_proj.lora_b", "layers.9.self_attn.q_proj.lora_b"), "lacks lora_"),
        (lambda f: rename(f, "k_proj", "q_proj_"), "another model"),
    ],
)
def test_a_broken_adapter_is_refused_in_one_line(change, message, tmp_path):
    folder = broken(tmp_path / "a", change)
    decoder = decoder_of("llama")
    before = decoder(TOKENS)
    with pytest.raises(ModelError, match=message):
        load_adapter(decoder, folder, rules("llama"))
    assert mx.array_equal(decoder(TOKENS), before)


def test_an_adapter_for_another_model(tmp_path):
    _, folder = saved(tmp_path / "a", "llama")
    decoder = decoder_of("llama", hidden_size=64)
    with pytest.raises(ModelError, match=r"is for another model: layers.\d.\S+ must be \d+ x \d+, but its matrices"):
        load_adapter(decoder, folder, rules("llama"))
    config = AdapterConfig(kind="lora", rank=2)
    trained_decoder, _ = trained("llama")
    known = {"fingerprint": "1", "model_type": "llama", "source": "org/name"}
    save_adapter(trained_decoder, folder, config, rules("llama"), base=known)
    with pytest.raises(ModelError, match=r"trained on other weights than these \(org/name\).*adapter.strict=false"):
        load_adapter(decoder_of("llama"), folder, rules("llama"), base={**known, "fingerprint": "2"})
    with pytest.raises(ModelError, match="trained on llama, not qwen2"):
        load_adapter(decoder_of("llama"), folder, rules("llama"), base={**known, "model_type": "qwen2"})
    with pytest.warns(UserWarning, match="trained on other weights"):
        load_adapter(decoder_of("llama"), folder, rules("llama"), base={**known, "fingerprint": "2"}, strict=False)


def test_what_a_format_can_not_hold(tmp_path):
    decoder = decoder_of("llama")
    config = AdapterConfig(kind="full", layers=1, format="peft")
    attach(decoder, config, key=mx.random.key(0))
    with pytest.raises(ConfigError, match=r"`adapter.format` must be mlx for adapter.kind=full"):
        save_adapter(decoder, tmp_path, config, rules("llama"))
    decoder, config = trained("llama", kind="dora", targets=("embeddings",), format="peft")
    with pytest.raises(ConfigError, match=r"`adapter.format` must be mlx for DoRA on embeddings"):
        save_adapter(decoder, tmp_path, config, rules("llama"))


def test_whole_weights_can_not_be_mixed(tmp_path):
    decoder = decoder_of("llama")
    config = AdapterConfig(kind="full", layers=1)
    attach(decoder, config, key=mx.random.key(0))
    save_adapter(decoder, tmp_path / "whole", config, rules("llama"))
    saved(tmp_path / "a", "llama")
    both = AdapterConfig(paths={"one": str(tmp_path / "a"), "two": str(tmp_path / "whole")})
    with pytest.raises(ConfigError, match=r"`adapter.paths.two` replaces the model's own weights"):
        load_adapters(decoder_of("llama"), both, rules("llama"))
    with pytest.raises(ModelError, match="plain weights"):
        load_adapter(decoder_of("llama", "affine"), tmp_path / "whole", rules("llama"))


def test_a_full_disk_leaves_the_older_adapter(tmp_path, monkeypatch):
    want, folder = saved(tmp_path / "a", "llama")
    decoder, config = trained("llama", rank=3)

    def full(*_, **__):
        raise RuntimeError("[save_safetensors] No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(ModelError, match=r"can't be written.*No space left"):
        save_adapter(decoder, folder, config, rules("llama"))
    again = decoder_of("llama")
    load_adapter(again, folder, rules("llama"))
    assert mx.array_equal(again(TOKENS), want)

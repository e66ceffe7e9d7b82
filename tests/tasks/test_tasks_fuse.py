"""fuse: the checkpoint that is written computes what model and adapter did, here and in mlx-lm."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

import mlxgen
from mlxgen.config import AdapterConfig, ModelConfig
from mlxgen.loading import load
from mlxgen.passes.adapters import save_adapter
from mlxgen.passes.attach import attach
from mlxgen.testing.checkpoints import write_tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, which mlx-lm imports

TOKENS = mx.array([[5, 17, 3, 41, 8, 63]])
COMMON = {
    "hidden_size": 64, "intermediate_size": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
    "phi3": {"original_max_position_embeddings": 512, "pad_token_id": 0},
}  # fmt: skip
MODES = {"affine": (32, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


def checkpoint(folder, family, mode=None):
    """A checkpoint of a family, converted and quantized by mlx-lm if a mode is given."""
    source = write_tiny(folder / "source", family, **COMMON | FAMILIES[family])
    if mode is None:
        return source
    from mlx_lm import utils

    group_size, bits = MODES[mode]
    model, config = utils.load_model(source)
    model, config = utils.quantize_model(model, config, group_size, bits, mode=mode)
    (folder / "quantized").mkdir()
    utils.save_model(folder / "quantized", model)
    utils.save_config(config, folder / "quantized/config.json")
    return folder / "quantized"


def with_adapter(folder, base, kind="lora", **model):
    """(the answers of the model with its adapter, the adapter's folder)."""
    loaded = load(ModelConfig(source=str(base), fuse=False, dtype="float32", **model))
    config = AdapterConfig(kind=kind, rank=2)
    attach(loaded.decoder, config, key=mx.random.key(0))
    keys = iter(mx.random.split(mx.random.key(7), 1000))
    change = tree_map(
        lambda p: p + 0.1 * mx.random.normal(p.shape, key=next(keys)), loaded.decoder.trainable_parameters()
    )
    loaded.decoder.update(change)
    save_adapter(loaded.decoder, folder / "adapter", config, loaded.rules, base=loaded.identity)
    return loaded.decoder(TOKENS), folder / "adapter"


def distance(a, b):
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


def in_mlx_lm(folder):
    from mlx_lm import utils

    return utils.load_model(folder)[0](TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_plain_weights(family, kind, cli, tmp_path):
    base = checkpoint(tmp_path, family)
    want, adapter = with_adapter(tmp_path, base, kind)
    out = tmp_path / "out"
    assert cli("fuse", f"model={base}", f"adapter.path={adapter}", f"out={out}").code == 0
    assert distance(mlxgen.load_model(out)(TOKENS), want) < 1e-5
    assert distance(in_mlx_lm(out), want) < 1e-5
    assert distance(mlxgen.load_model(base)(TOKENS), want) > 0.01
    source, written = (dict(mx.load(str(f / "model.safetensors"))) for f in (base, out))
    assert {n: a.shape for n, a in source.items()} == {n: a.shape for n, a in written.items()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((base / name).read_text())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", ["repack", "plain", "dequantize"])
def test_quantized_weights(mode, packed, cli, tmp_path):
    base = checkpoint(tmp_path, "qwen3_moe", mode)
    want, adapter = with_adapter(tmp_path, base, dequantize=True)
    out = tmp_path / "out"
    ran = cli("fuse", f"model={base}", f"adapter.path={adapter}", f"out={out}", f"packed={packed}", "output=json")
    assert ran.code == 0
    report = json.loads(ran.out.splitlines()[-1])  # mlx-lm prints, too
    config, arrays = json.loads((out / "config.json").read_text()), mx.load(str(out / "model.safetensors"))
    scales = [name for name in arrays if name.endswith(".scales")]
    before = [name for name in mx.load(str(base / "model.safetensors")) if name.endswith(".scales")]
    if packed == "repack":
        assert 0.9 < report["kept"] < 1.1
        assert 0.01 < report["noise"] < 1
        assert sorted(scales) == sorted(before)
        return
    assert report["kept"] == pytest.approx(1, abs=0.01)
    assert report["noise"] < 0.02  # of half precision
    assert ("quantization" in config) == (packed == "plain")
    assert len(scales) == (0 if packed == "dequantize" else len(before) - 14)
    assert distance(mlxgen.load_model(out)(TOKENS), want) < 0.02
    assert distance(in_mlx_lm(out).astype(mx.float32), want) < (0.05 if packed == "dequantize" else 0.2)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_packed_again_it_is_what_mlx_lm_loads(family, cli, tmp_path):
    base = checkpoint(tmp_path, family, "affine")
    want, adapter = with_adapter(tmp_path, base, dequantize=True)
    out = tmp_path / "out"
    ran = cli("fuse", f"model={base}", f"adapter.path={adapter}", f"out={out}")
    assert "of the adapter's change is kept" in ran.err
    assert "packed=plain" in ran.err
    plain = mlxgen.load_model(out)(TOKENS)
    assert distance(in_mlx_lm(out), plain) < 1e-2
    assert distance(plain, want) < distance(mlxgen.load_model(base)(TOKENS), want)


def test_generate_with_an_adapter_is_generate_with_the_fused_model(cli, tmp_path):
    base = checkpoint(tmp_path, "llama")
    _, adapter = with_adapter(tmp_path, base)
    assert cli("fuse", f"model={base}", f"adapter.path={adapter}", f"out={tmp_path / 'out'}").code == 0
    words = ["prompt=the cat", "sampler=greedy", "max_tokens=12"]
    answers = [
        cli(f"model={base}", f"adapter.path={adapter}", *words).out,
        cli(f"model={base}", f"adapter.path={adapter}", "adapter.merge=true", *words).out,
        cli(f"model={tmp_path / 'out'}", *words).out,
    ]
    assert len(set(answers)) == 1
    assert cli(f"model={base}", *words).out != answers[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "`out` must be given"),
        (["out=new"], "`adapter.path` must be given"),
        (["out={base}", "adapter.path={base}"], "must be a new or an empty folder"),
        (["out=new", "adapter.path={base}"], "must hold adapter_config.json"),
        (["out=new", "adapter.path={base}", "task.packed=no"], "`task.packed` must be one of"),
    ],
)
def test_bad_input(words, message, cli, tiny_checkpoint):
    ran = cli("fuse", f"model={tiny_checkpoint}", *(word.format(base=tiny_checkpoint) for word in words))
    assert ran.code in (2, 3)
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_parameters_of_the_fused_decoder_are_the_model_s(tmp_path):
    base = checkpoint(tmp_path, "llama")
    _, adapter = with_adapter(tmp_path, base)
    config = AdapterConfig(path=str(adapter), merge=True)
    merged = load(ModelConfig(source=str(base)), adapter=config).decoder
    plain = load(ModelConfig(source=str(base))).decoder
    assert [n for n, _ in tree_flatten(merged.parameters())] == [n for n, _ in tree_flatten(plain.parameters())]

"""Adapters chosen by the request: rows of one batch are each computed with their own."""

import json

import mlx.core as mx
import pytest
from passes_helpers import stir

from mlxgen.batching import answer_all
from mlxgen.config import AdapterConfig, ModelConfig
from mlxgen.errors import ConfigError, MlxgenError, RequestError
from mlxgen.loading import load
from mlxgen.passes.adapters import save_adapter
from mlxgen.passes.attach import attach
from mlxgen.pipeline import load_pipeline
from mlxgen.testing.checkpoints import write_tiny

MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
FAMILIES = {"llama": {}, "qwen3_moe": MOE}
GREEDY = ("sampler=greedy", "max_tokens=3", "raw=true")


def write_adapter(base, folder, seed, kind="lora", layers=None):
    loaded = load(ModelConfig(source=str(base), fuse=False))
    config = AdapterConfig(
        kind=kind, rank=2, layers=layers, targets=None if kind == "full" else ("all_linear", "embeddings")
    )
    attach(loaded.decoder, config, key=mx.random.key(seed))
    stir(loaded.decoder, 0.05 * (seed + 1))
    save_adapter(loaded.decoder, folder, config, loaded.rules, base=loaded.identity)


@pytest.fixture(scope="module", params=FAMILIES)
def files(request, tmp_path_factory):
    """(a model, its adapters)."""
    folder = tmp_path_factory.mktemp(request.param)
    base = write_tiny(folder / "base", request.param, **FAMILIES[request.param])
    for seed, (name, kind) in enumerate({"one": "lora", "two": "dora"}.items()):
        write_adapter(base, folder / name, seed, kind)
    return folder


def several(files, *words):
    paths = [f"adapter.paths.{name}={files / name}" for name in ("one", "two")]
    return load_pipeline(f"model={files / 'base'}", *paths, *GREEDY, *words)


def answer(pipeline, prompt, **choice):
    completion = pipeline.generate(prompt, logprobs=True, **choice)
    return [entry.logprob for entry in completion.logprobs], completion.text


def close(a, b):
    return a[1] == b[1] and a[0] == pytest.approx(b[0], abs=2e-3)


def test_rows_of_one_batch_have_adapters_of_their_own(files):
    pipeline, prompts = several(files), ["the cat", "in the"]
    choices = [{}, {"adapter": "one"}, {"adapter": "two"}, {"adapter": "none"}, {"adapter": {"one": 0.5, "two": 1}}]
    jobs = [(prompt, {"logprobs": True, **choice}) for prompt in prompts for choice in choices]
    jobs *= 4  # 40 rows: experts see more than 64 tokens at once, and sort them
    together = dict(answer_all(pipeline, jobs, at_once=40))
    alone = {}
    for place, (prompt, choice) in enumerate(jobs):
        done = together[place]
        if isinstance(done, Exception):
            raise done
        key = (prompt, str(choice))
        if key not in alone:
            alone[key] = answer(several_cached(files), prompt, **{k: v for k, v in choice.items() if k == "adapter"})
        assert close(([entry.logprob for entry in done.logprobs], done.text), alone[key]), choice
    assert len({text for _, text in alone.values()}) > len(prompts)


_KEPT = {}


def several_cached(files):
    return _KEPT.setdefault(files, several(files))


def test_each_is_the_model_with_that_adapter_alone(files):
    pipeline = several(files)
    for name in ("one", "two"):
        alone = load_pipeline(f"model={files / 'base'}", f"adapter.path={files / name}", *GREEDY)
        assert close(answer(pipeline, "the cat", adapter=name), answer(alone, "the cat"))
        assert alone.decoder is not pipeline.decoder
    plain = load_pipeline(f"model={files / 'base'}", *GREEDY)
    assert close(answer(pipeline, "the cat", adapter="none"), answer(plain, "the cat"))
    mixed = several(files, "adapter.weights.one=0.25", "adapter.weights.two=0.5")
    assert close(answer(mixed, "the cat"), answer(pipeline, "the cat", adapter={"one": 0.25, "two": 0.5}))


def test_computed_prompts_are_shared_only_with_the_same_adapter(files):
    pipeline = several(files, "prefix=memory")
    fresh = several(files)
    prompt = "the cat in the house and the other cat " * 4
    for choice in ({"adapter": "one"}, {"adapter": "two"}, {}, {"adapter": "one"}, {"adapter": "none"}):
        assert close(answer(pipeline, prompt, **choice), answer(fresh, prompt, **choice))
    again = pipeline.generate(prompt, adapter="one")
    assert again.stats.cached_tokens > 0


def test_a_conversation_keeps_its_adapter(files):
    pipeline = several(files)
    texts = {}
    for name in ("one", "two", "none"):
        chat = pipeline.chat(adapter=name)
        texts[name] = [chat("the cat").text, chat("and the other").text]
    chats = {name: pipeline.chat(adapter=name) for name in texts}
    for turn, said in enumerate(("the cat", "and the other")):
        for name, chat in chats.items():
            assert chat(said).text == texts[name][turn]
    assert len({tuple(said) for said in texts.values()}) > 1


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("tow", "`adapter` must be none or one of one, two, but is 'tow'. Did you mean `two`?"),
        ({"one": "much"}, "a name or a mapping of names to weights"),
        (3, "a name or a mapping of names to weights"),
    ],
)
def test_a_choice_that_there_is_not(files, choice, message):
    with pytest.raises(RequestError) as caught:
        several_cached(files).generate("the cat", adapter=choice)
    assert message in str(caught.value)


def test_where_there_is_no_choice(tmp_path, tiny_checkpoint):
    write_adapter(tiny_checkpoint, tmp_path / "a", 1)
    write_adapter(tiny_checkpoint, tmp_path / "full", 1, "full", layers=1)
    for words in ([], [f"adapter.path={tmp_path / 'full'}"], [f"adapter.path={tmp_path / 'a'}", "adapter.merge=true"]):
        pipeline = load_pipeline(f"model={tiny_checkpoint}", *words, *GREEDY)
        with pytest.raises(RequestError, match="no adapters are loaded to choose from"):
            pipeline.generate("the cat", adapter="default")
    with pytest.raises(ConfigError, match=r"`adapter.path` must be given"):
        load_pipeline(f"model={tiny_checkpoint}", "adapter=lora")
    with pytest.raises(MlxgenError, match="must be the folder of an adapter"):
        load_pipeline(f"model={tiny_checkpoint}", "adapter.path=nowhere")


def test_in_a_file_of_prompts(files, cli, tmp_path):
    lines = [{"prompt": "the cat", "adapter": name} for name in ("one", "two", "none", "three")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [f"adapter.paths.{name}={files / name}" for name in ("one", "two")]
    words = [f"model={files / 'base'}", *paths, *GREEDY]
    ran = cli("batch", f"prompts={tmp_path / 'prompts.jsonl'}", f"out={tmp_path / 'results.jsonl'}", *words)
    assert ran.code != 0  # one of them does not exist
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    pipeline = several_cached(files)
    for line, result in zip(lines[:3], results[:3], strict=True):
        assert result["text"] == pipeline.generate("the cat", adapter=line["adapter"]).text
    assert "three" in json.dumps(results[3])

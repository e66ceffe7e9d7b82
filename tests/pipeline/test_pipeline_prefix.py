"""prefix=memory and prefix=disk: the same answers as without, faster; nothing crosses models; at worst a miss."""

import json
import os
import subprocess
import sys
import warnings

import pytest

import mlxgen
from mlxgen.engine.shelf_folder import StoredFile
from mlxgen.testing.checkpoints import write_tiny

LONG = "Read this first. It is a long text that every prompt begins with. " * 3
ASK = [LONG + "What is it?", LONG + "Who wrote it?", LONG]
FAMILIES = {
    "llama": {},
    "gemma2": {"sliding_window": 8, "head_dim": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("prefix"), request.param, **FAMILIES[request.param])


def load(folder, *words):
    return mlxgen.load(f"model={folder}", "max_tokens=6", "sampler.temperature=1", "seed=5", *words)


def on_disk(folder, place, *words):
    return load(folder, "prefix=disk", f"prefix.folder={place}", *words)


def written(pipe):
    pipe.engine.store._shelf.wait()


def test_prompts_in_memory_answer_alike_and_cost_less(folder):
    cold, warm = load(folder), load(folder, "prefix=memory", "prefix.memory=50MB")
    for place, prompt in enumerate([*ASK, *ASK]):
        want, got = cold.generate(prompt), warm.generate(prompt)
        assert (got.text, got.tokens) == (want.text, want.tokens)
        assert want.stats.cached_tokens == 0
        # At the latest the second time; before, only layers that can go back to any token share a beginning.
        assert got.stats.cached_tokens == want.prompt_tokens - 1 or place < 3
    assert warm.engine.store.budget_bytes == 50_000_000


def test_a_system_prompt_is_shared_by_batches_and_conversations(tiny_checkpoint):
    pipe = load(tiny_checkpoint, "prefix=memory", f"system={LONG}")
    first = pipe.generate("Hi")
    together = pipe.generate_batch(["Hello", "And you?"], n=2)
    assert all(one.stats.cached_tokens > 150 for one in together)
    chat = pipe.chat()
    turns = [chat("Hi"), chat("And then?")]
    assert (turns[0].text, turns[0].stats.cached_tokens) == (first.text, first.prompt_tokens - 1)
    assert turns[1].stats.cached_tokens >= turns[0].prompt_tokens
    plain = load(tiny_checkpoint, f"system={LONG}").chat()
    assert [plain("Hi").text, plain("And then?").text] == [turn.text for turn in turns]


def test_without_a_store_a_prompt_is_computed_anew(tiny_checkpoint):
    pipe = load(tiny_checkpoint)
    assert [pipe.generate(LONG).stats.cached_tokens for _ in range(2)] == [0, 0]


def test_the_next_process_goes_on_from_the_folder(tiny_checkpoint, tmp_path):
    want = load(tiny_checkpoint).generate(ASK[0])
    code = f"""
import mlxgen
pipe = mlxgen.load("model={tiny_checkpoint}", "max_tokens=6", "sampler.temperature=1", "seed=5", "prefix=disk",
                   "prefix.folder={tmp_path}")
print(pipe.generate({ASK[0]!r}).as_dict()["stats"]["cached_tokens"])
"""
    other = {**os.environ, "PYTHONHASHSEED": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=other)
    assert ran.stdout == "0\n"
    got = on_disk(tiny_checkpoint, tmp_path).generate(ASK[0])
    assert (got.text, got.tokens) == (want.text, want.tokens)
    assert got.stats.cached_tokens == want.prompt_tokens - 1


def test_nothing_crosses_weights_policies_precisions_and_blueprints(tiny_checkpoint, tmp_path):
    store, other = tmp_path / "store", write_tiny(tmp_path / "other", seed=1)
    variants = [
        (tiny_checkpoint,),
        (tiny_checkpoint, "cache=window", "cache.size=64"),
        (tiny_checkpoint, "model.dtype=bfloat16"),
        (tiny_checkpoint, "model.fuse=false"),
        (tiny_checkpoint, "architecture=llama", "architecture.norm.eps=0.01"),
        (other,),
    ]
    for again in (False, True):
        for folder, *words in variants:
            pipe = on_disk(folder, store, *words)
            assert (pipe.generate(ASK[0]).stats.cached_tokens > 0) == again, words
            written(pipe)


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), OSError(28, "No space left on device")])
def test_a_folder_that_is_read_only_or_full_costs_one_warning(tiny_checkpoint, tmp_path, monkeypatch, error):
    def fails(self, content):
        raise error

    monkeypatch.setattr(StoredFile, "write", fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = on_disk(tiny_checkpoint, tmp_path / "store")
        texts = [pipe.generate(prompt).text for prompt in ASK]
    assert texts == [load(tiny_checkpoint).generate(prompt).text for prompt in ASK]
    assert len(caught) == 1 and str(caught[0].message).startswith(f"`prefix.folder` {tmp_path}/store can't be written")


def test_the_command_line_shows_what_was_cached(cli, tiny_checkpoint, tmp_path):
    words = [f"model={tiny_checkpoint}", "max_tokens=2", f"prompt={LONG}", "output=json"]
    words += ["prefix=disk", f"prefix.folder={tmp_path}/store"]
    first, again = (json.loads(cli(*words).out) for _ in range(2))
    assert first["tokens"] == again["tokens"]
    assert first["stats"]["cached_tokens"] == 0 < again["stats"]["cached_tokens"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["prefix.memory=lots"], "`prefix.memory` must be a size such as 512MB, but is 'lots'."),
        (["prefix.memory=-1"], "`prefix.memory` must be a size such as 512MB, but is -1."),
        (["prefix.folder=x"], "`prefix.disk` must be above 0 with `prefix.folder` (prefix=disk sets both), but is 0."),
    ],
)
def test_settings_that_are_wrong(cli, tiny_checkpoint, words, message):
    ran = cli(f"model={tiny_checkpoint}", "prompt=Hi", *words)
    assert (ran.code, ran.err) == (2, f"mlxgen: {message}\n")

"""Computed prompts in a folder: another process goes on from them; whatever happens to a file is at worst a miss."""

import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
from engine_oracles import GREEDY, PARTS, POLICIES, alone, finish, new_sequence, random_tokens

from mlxgen.cache import Full, Quantized, Window, storage
from mlxgen.engine import Engine, PrefixStore, Request
from mlxgen.engine.shelf import Shelf
from mlxgen.engine.shelf_folder import StoredFile

PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def _little_slack(monkeypatch):
    monkeypatch.setattr("mlxgen.cache.layer_cache.WindowCache.slack", 3)


def shelf(folder, *, weights="these", budget_bytes=PLENTY):
    return Shelf(folder, budget_bytes, lambda: weights, storage)


def process(model, folder, **options):
    """An engine as a new process has it: nothing in memory."""
    return Engine(model, PARTS, store=PrefixStore(PLENTY, shelf(folder, **options)))


def answer(engine, prompt, policy=None, count=5, **options):
    policy = policy or Full()
    request = Request(prompt=tuple(prompt), sampler=GREEDY, max_tokens=count, prefill_chunk=8, **options)
    generation = engine.submit(request, new_sequence(engine.model, policy))
    finish(engine)
    engine.store._shelf.wait()
    return generation


def files(folder):
    return sorted(folder.glob("*.kv"))


@pytest.mark.parametrize("seed", range(4))
def test_restored_equals_cold(model, seed, tmp_path):
    """Prompts that begin alike, in one process after another."""
    policies = POLICIES if model.spec.layers[-1].mixer is not None else POLICIES[:1]
    policy, rnd = policies[seed % len(policies)], random.Random(seed)
    prompt, cached = random_tokens(rnd, 30), 0
    for _ in range(6):
        generation = answer(process(model, tmp_path), prompt, policy, top_logprobs=0)
        cold = alone(model, generation.request, policy)
        assert generation.produced == cold.produced
        atol = 5e-2 if isinstance(policy, Quantized) else 1e-5
        for warm, want in zip(generation.waiting, cold.waiting, strict=True):
            assert warm.logprob == pytest.approx(want.logprob, abs=atol)
        cached += generation.cached_tokens
        kept = rnd.choice([len(generation.known), 30, rnd.randint(17, 29)])
        prompt = (*generation.known[:kept], *random_tokens(rnd, rnd.randint(0, 20)))
    assert cached > 0


def test_the_same_prompt_in_the_next_process_computes_one_token(model, tmp_path):
    prompt = random_tokens(random.Random(1), 40)
    first, again = (answer(process(model, tmp_path), prompt) for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, 39) and first.produced == again.produced


def test_a_conversation_is_not_written_anew_after_every_turn(llama, tmp_path):
    known, sizes = (), []
    for turn in range(40):
        generation = answer(process(llama, tmp_path), (*known, *random_tokens(random.Random(turn), 20)))
        assert generation.cached_tokens >= len(known) - 1
        known = tuple(generation.known)
        sizes.append(sum(file.stat().st_size for file in files(tmp_path)))
    growth = [b - a for a, b in itertools.pairwise(sizes)]
    assert sorted(growth)[-2] < 1.5 * growth[0]  # but once, as no file builds on more than some dozens
    per_token = 2 * len(llama.layers) * 2 * 32 * 4
    assert files(tmp_path)[0].stat().st_size > 20 * per_token


def test_nothing_crosses_models_and_policies(llama, tmp_path):
    prompt = random_tokens(random.Random(2), 30)
    answer(process(llama, tmp_path), prompt)
    for policy in (Window(size=9, sinks=2), Quantized(group_size=32), Quantized(group_size=32, k_bits=4)):
        assert answer(process(llama, tmp_path), prompt, policy).cached_tokens == 0
    assert answer(process(llama, tmp_path, weights="others"), prompt).cached_tokens == 0
    assert answer(process(llama, tmp_path), prompt).cached_tokens == 29


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES = {
    "first byte": lambda data: flipped(data, 0),
    "a token id": lambda data: flipped(data, data.index(b"tokens") + 12),
    "a value": lambda data: flipped(data, len(data) - 5000),
    "the checksum": lambda data: flipped(data, len(data) - 1),
    "truncated": lambda data: data[: len(data) // 2],
    "nearly nothing": lambda data: data[:7],
    "empty": lambda data: b"",
    "something else": lambda data: b"hello" * 1000,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("when", ["before the process", "while it runs"])
def test_a_broken_file_is_a_miss_and_goes_away(llama, tmp_path, damage, when):
    prompt = random_tokens(random.Random(3), 30)
    want = answer(process(llama, tmp_path), prompt).produced
    (file,) = files(tmp_path)
    later = process(llama, tmp_path)
    if when == "while it runs":
        answer(later, random_tokens(random.Random(4), 5))
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    broken = answer(later, prompt)
    assert (broken.cached_tokens, broken.produced) == (0, want)
    assert answer(process(llama, tmp_path), prompt).cached_tokens == 29  # it was written again


def test_a_broken_parent_takes_its_children_along(llama, tmp_path):
    prompt = random_tokens(random.Random(5), 30)
    first = answer(process(llama, tmp_path), prompt)
    (parent,) = files(tmp_path)
    longer = (*first.known, *random_tokens(random.Random(6), 30))
    want = answer(process(llama, tmp_path), longer).produced
    assert len(files(tmp_path)) == 2
    parent.write_bytes(flipped(parent.read_bytes(), 3000))
    assert answer(process(llama, tmp_path), longer).produced == want
    parent.unlink(missing_ok=True)
    assert answer(process(llama, tmp_path), longer).produced == want


def test_the_folder_stays_within_its_budget_and_keeps_what_was_used(llama, tmp_path):
    prompts = [random_tokens(random.Random(seed), 40) for seed in range(6)]
    answer(process(llama, tmp_path), prompts[0])
    size = files(tmp_path)[0].stat().st_size
    for prompt in prompts[1:]:
        answer(process(llama, tmp_path, budget_bytes=3 * size + 100), prompt)
        assert answer(process(llama, tmp_path, budget_bytes=3 * size + 100), prompts[0]).cached_tokens == 39
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 3 * size + 100
    cached = [answer(process(llama, tmp_path, budget_bytes=0), prompt).cached_tokens for prompt in prompts]
    assert cached == [39, 0, 0, 0, 39, 39]


def test_short_prompts_are_not_worth_a_file(llama, tmp_path):
    answer(process(llama, tmp_path), [1, 2, 3])
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), OSError(28, "No space left on device")])
def test_a_folder_that_cant_be_written_is_one_warning(llama, tmp_path, monkeypatch, error):
    prompts = [random_tokens(random.Random(seed), 30) for seed in range(4)]
    answer(process(llama, tmp_path), prompts[0])
    working = StoredFile.write

    def fails(self, content):
        if error.errno == 30 or content:  # a full one still has room for the empty probe
            raise error
        working(self, content)

    monkeypatch.setattr(StoredFile, "write", fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = process(llama, tmp_path)
        for prompt in prompts[1:]:
            assert answer(engine, prompt).finish == "length"
        assert answer(engine, prompts[0]).cached_tokens == 29  # it can still be read
    assert len(caught) == 1
    assert str(caught[0].message).endswith(f"can't be written ({error.strerror}); from now on it is only read.")


def test_a_folder_that_cant_be_there_is_one_warning(llama, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="can't be written") as caught:
        engine = process(llama, tmp_path / "file" / "folder")
        assert answer(engine, random_tokens(random.Random(0), 30)).finish == "length"
    assert len(caught) == 1


def test_two_processes_share_a_folder(llama, tmp_path):
    """Each sees what the other wrote while it ran, and neither minds what the other removes."""
    a, b = process(llama, tmp_path), process(llama, tmp_path)
    rnd = random.Random(7)
    for round in range(4):
        prompt = random_tokens(rnd, 30)
        assert answer(a, prompt).cached_tokens == 0
        assert answer(b, (*prompt, 5)).cached_tokens == 30
        for file in files(tmp_path)[round:]:
            file.unlink()
        assert answer(process(llama, tmp_path), prompt).cached_tokens in (0, 29)


WRITER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from engine_oracles import family, random_tokens
    from test_engine_shelf import answer, process
    import random
    engine = process(family("llama"), Path({folder!r}))
    for seed in range(1000):
        answer(engine, random_tokens(random.Random(seed), 300), count=1)
        print(seed, flush=True)
"""


def test_a_writer_may_be_killed_at_any_moment(llama, tmp_path):
    code = textwrap.dedent(WRITER.format(tests=os.path.dirname(__file__), folder=str(tmp_path)))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
        for line in writer.stdout:
            if int(line) == 4:
                break
        time.sleep(random.random() * 0.02)
        os.kill(writer.pid, signal.SIGKILL)
    for file in files(tmp_path):
        StoredFile(path=file, tokens=()).read()  # whole, every one
    engine = process(llama, tmp_path)
    for seed in range(5):
        generation = answer(engine, random_tokens(random.Random(seed), 300), count=4)
        assert generation.cached_tokens == 299
        assert generation.produced == alone(llama, generation.request, Full()).produced


def test_what_a_killed_writer_left_goes_away(llama, tmp_path):
    left = tmp_path / ".0123456789abcdef-0.kv.77"
    left.write_bytes(b"half")
    answer(process(llama, tmp_path), random_tokens(random.Random(8), 30))
    assert left.exists()  # perhaps it is being written
    os.utime(left, (0, 0))
    answer(process(llama, tmp_path), random_tokens(random.Random(9), 30))
    assert not left.exists()

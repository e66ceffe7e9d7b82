"""task=batch: a file of prompts in, a file of results out, whatever stands in the one and whenever the process dies."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mlxgen
from mlxgen.batching import answer_all
from mlxgen.errors import ConfigError, RequestError
from mlxgen.tasks import batch as batch_task
from mlxgen.tasks.prompt_lines import count_lines, read_lines
from mlxgen.tasks.result_file import ResultFile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pipe(tiny_checkpoint):
    return mlxgen.load(f"model={tiny_checkpoint}", "max_tokens=6", "seed=1", "sampler.temperature=1")


@pytest.fixture
def ask(cli, tiny_checkpoint, tmp_path):
    """The batch task on some lines; returns what it ran like, and the results."""

    def run(lines, *words, out="out.jsonl", **options):
        data = lines if isinstance(lines, bytes) else "".join(json.dumps(line) + "\n" for line in lines).encode()
        (tmp_path / "in.jsonl").write_bytes(data)
        target = out if out == "-" else str(tmp_path / out)
        files = (f"prompts={tmp_path / 'in.jsonl'}", f"out={target}")
        ran = cli("batch", f"model={tiny_checkpoint}", "max_tokens=4", "seed=1", *files, *words, **options)
        text = ran.out if out == "-" else (tmp_path / out).read_text() if (tmp_path / out).exists() else ""
        return ran, [json.loads(line) for line in text.splitlines()]

    return run


def plain(results):
    """Without what differs from run to run."""
    return [{k: v for k, v in result.items() if k != "stats"} for result in results]


def test_each_line_is_what_it_would_be_alone(ask, pipe):
    lines = [
        {"prompt": "Hi", "id": "first"},
        {"messages": [{"role": "user", "content": "A cat"}], "temperature": 0.5, "top_p": 0.9, "seed": 7},
        {"tokens": [5, 6, 7], "temperature": 0, "max_tokens": 9, "id": {"a": [1]}},
        {"prompt": "the ", "choice": ["yes", "no"], "system": "Be brief."},
        {"prompt": "a", "stop": ["e"], "top_logprobs": 1, "n": 2},
    ]
    ran, results = ask(lines)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert [r["index"] for r in results] == [0, 1, 2, 3, 4]
    assert [r.get("id") for r in results] == ["first", None, {"a": [1]}, None, None]
    assert results[3]["text"] in ("yes", "no")
    alone = mlxgen.load(*[f"model={pipe.config.model.source}", "max_tokens=4", "seed=1"])
    for line, result in zip(lines, results, strict=True):
        values = {k: v for k, v in line.items() if k not in ("id", "prompt", "messages", "tokens")}
        prompt = next(line[form] for form in ("prompt", "messages", "tokens") if form in line)
        want = alone.generate(prompt, **values).as_dict()
        assert [result[k] for k in ("text", "tokens", "seed")] == [want[k] for k in ("text", "tokens", "seed")]
        assert len(result.get("others", ())) == len(want.get("others", ()))


BAD = [
    (b"not json", "must be a JSON object"),
    (b'["prompt"]', "must be a JSON object, but is list"),
    (b"[" * 100_000, "must be a JSON object"),
    (b'{"prompt": "\xff"}', "must be UTF-8, but byte 12 is 0xff"),
    (b"{}", "must have one of prompt, messages, tokens, but has none"),
    (b'{"prompt": "a", "tokens": [1]}', "but has prompt and tokens"),
    (b'{"prompt": 5}', "`prompt` must be text, but is '5'"),
    (b'{"messages": ["a"]}', "`messages` must be a list of messages"),
    (b'{"tokens": [1.5]}', "`tokens` must be a list of token ids"),
    (b'{"tokens": [9999]}', "token ids from 0 to 297"),
    (b'{"prompt": ""}', "`prompt` must not be empty"),
    (b'{"prompt": "a", "top_p": 3}', "`sampler.top_p` must be in"),
    (b'{"prompt": "a", "tempratur": 1}', "Did you mean `temperature`?"),
    (b'{"prompt": "a", "max_tokens": "many"}', "`max_tokens` must be an integer"),
    (b'{"prompt": "a", "json_schema": {"type": "nothing"}}', "json_schema"),
    (b'{"tokens": [' + b", ".join([b"5"] * 600) + b"]}", "must fit into a context"),
    (b'{"prompt": "\\ud800"}', ""),
]


def test_a_bad_line_is_reported_and_stops_nobody(ask):
    lines = [line for bad, _ in BAD for line in (bad, b'{"prompt": "Hi"}')]
    ran, results = ask(b"\n".join(lines))
    assert ran.code == 2 and len(results) == len(lines)
    for place, (_, message) in enumerate(BAD):
        assert message in results[2 * place]["error"] and f"line {2 * place + 1}: " in ran.err
        assert results[2 * place]["index"] == 2 * place
    assert len({result["text"] for result in results[1::2]}) == 1
    assert len(ran.err.splitlines()) == len(BAD)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_forms_of_files(ask, end):
    lines = [b'\xef\xbb\xbf{"prompt": "Hi"}', b"", b"   ", b'{"prompt": "a\xe2\x80\xa8b", "id": 1}', b'{"prompt": "c"}']
    ran, results = ask(end.join(lines))  # no end of the last line
    assert ran.code == 0 and [r["index"] for r in results] == [0, 1, 2]
    assert ask(b"", out="none.jsonl")[1] == []


def test_standard_streams(ask, cli, tiny_checkpoint):
    ran = cli("batch", f"model={tiny_checkpoint}", "prompts=-", "max_tokens=2", stdin=b'{"prompt": "Hi"}\n')
    assert ran.code == 0 and json.loads(ran.out)["index"] == 0
    assert ask([{"prompt": "a"}], out="-")[1][0]["completion_tokens"] <= 4


def test_what_can_not_be_is_said_before_the_model_is_loaded(cli, tmp_path, capsys):
    here = tmp_path / "p.jsonl"
    here.write_text("{}\n")
    used = tmp_path / "used.jsonl"
    used.write_text("precious")
    for words, message in [
        ([], "`prompts` must be given"),
        (["prompts=/no/such.jsonl"], "`prompts` must be a file"),
        ([f"prompts={tmp_path}", f"out={tmp_path / 'new'}"], "`prompts` must be a file"),
        ([f"prompts={here}", f"out={used}"], "exists; add resume=true or overwrite=true"),
        ([f"prompts={here}", f"out={used}", "resume=true"], "line 1 is none"),
        ([f"prompts={here}", f"out={here}", "overwrite=true"], "must be another file"),
        ([f"prompts={here}", "resume=true"], "need `out`"),
        ([f"prompts={here}", "out=/no/folder/x"], "must be a file that can be written"),
        ([f"prompts={here}", "prompt=Hi"], "`prompt` has no place"),
        ([f"prompts={here}", "order=random"], "must be one of input, done"),
    ]:
        ran = cli("batch", "model=/no/such/folder", *words)
        assert ran.code in (2, 3) and message in ran.err and ran.err.count("\n") == 1
    assert used.read_text() in ("precious",)


def test_resuming_skips_what_is_done(ask, tmp_path):
    lines = [{"prompt": f"number {i}", "seed": i, "id": i} for i in range(5)]
    _, whole = ask(lines)
    out = tmp_path / "out.jsonl"
    kept = out.read_bytes().splitlines(keepends=True)
    for torn in (b"", b'{"index": 3, "te', kept[3][:-1]):
        out.write_bytes(b"".join(kept[:3]) + torn)
        ran, again = ask(lines, "resume=true")
        assert ran.code == 0 and plain(again) == plain(whole)
        assert out.read_bytes().splitlines(keepends=True)[:3] == kept[:3]
    out.write_bytes(kept[4] + kept[1])  # of a run in the order of completion
    _, again = ask(lines, "resume=true", "order=done")
    assert sorted(plain(again), key=lambda r: r["index"]) == plain(whole)
    assert ask(lines, "resume=true")[1] == again and plain(ask(lines, "overwrite=true")[1]) == plain(whole)
    out.unlink()
    assert plain(ask(lines, "resume=true")[1]) == plain(whole)  # nothing to go on from


def test_an_error_of_before_stays_one(ask):
    assert ask([{"prompt": ""}, {"prompt": "a"}])[0].code == 2
    ran, results = ask([{"prompt": ""}, {"prompt": "a"}, {"prompt": "b"}], "resume=true")
    assert ran.code == 2 and ran.err == "" and len(results) == 3


def test_only_one_process_writes(tmp_path):
    first = ResultFile(str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="another process has"):
        ResultFile(str(tmp_path / "out"), resume=True)
    first.close()
    ResultFile(str(tmp_path / "out"), resume=True).close()


def test_kill_at_any_time_then_resume(ask, tmp_path, tiny_checkpoint):
    lines = [{"prompt": f"number {i}", "seed": i, "max_tokens": 20 + i % 7} for i in range(60)]
    _, want = ask(lines, out="want.jsonl")
    out = tmp_path / "out.jsonl"
    base = [sys.executable, "-m", "mlxgen", "batch", f"model={tiny_checkpoint}", f"prompts={tmp_path / 'in.jsonl'}"]
    with subprocess.Popen([*base, f"out={out}"], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not out.exists() or out.stat().st_size < 2000):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert out.read_bytes().count(b"\n") < 60
    _, results = ask(lines, "resume=true")
    assert plain(results) == plain(want)


def test_ctrl_c_keeps_what_was_done(ask, monkeypatch):
    lines = [{"prompt": f"{i}", "max_tokens": 1 + 3 * i} for i in range(6)]
    seen = []

    class Stopping(ResultFile):
        def write(self, result):
            super().write(result)
            seen.append(result["index"])
            if len(seen) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(batch_task, "ResultFile", Stopping)
    ran, results = ask(lines)
    assert ran.code == 130 and [r["index"] for r in results] == [0, 1] and "interrupted" in ran.err
    ran, results = ask(lines, "resume=true")
    assert [r["index"] for r in results][:4] == [0, 1, 2, 3]


# -- the core


def test_prompts_are_read_as_there_is_room(pipe):
    """However many there are, only so many are held: running, or done before their turn."""
    read = yielded = 0
    rnd = random.Random(0)

    def jobs():
        nonlocal read
        for i in range(400):
            read += 1
            yield "Hi", {"max_tokens": 60 if i == 0 else rnd.randint(1, 2), "seed": i}

    farthest = 0
    for place, _ in answer_all(pipe, jobs(), at_once=3, ordered=True):
        assert place == yielded
        yielded += 1
        farthest = max(farthest, read - yielded)
    assert yielded == read == 400 and farthest <= 8 * 3


def test_closing_cancels_what_is_running(pipe):
    results = answer_all(pipe, ((("Hi"), {"max_tokens": 9 * i}) for i in range(1, 50)), at_once=4)
    next(results)
    assert pipe.engine.scheduler.running
    results.close()
    scheduler = pipe.engine.scheduler
    assert not (scheduler.running or scheduler.prefilling or scheduler.waiting)


def test_a_list_of_prompts(pipe):
    prompts = ["Hi", [5, 6, 7], [{"role": "user", "content": "a"}]]
    answers = pipe.generate_batch(prompts, max_tokens=5)
    assert [a.tokens for a in answers] == [pipe.generate(p, max_tokens=5).tokens for p in prompts]
    with pytest.raises(RequestError, match="must not be empty"):
        pipe.generate_batch(["Hi", ""])


def test_lines_are_counted_as_they_are_read(tmp_path):
    path = tmp_path / "p"
    path.write_bytes(b'{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert count_lines(str(path)) == len(list(read_lines(str(path)))) == 2
    assert count_lines("-") is None

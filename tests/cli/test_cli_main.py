"""The command line in one process: exit codes, streams, flags, sweeps."""

import json
import os
import re

import pytest

import mlxgen
from mlxgen.cli import main, read_flags
from mlxgen.errors import ConfigError


@pytest.fixture
def ask(cli, tiny_checkpoint):
    """A command line with the tiny model; few tokens, always the same ones."""

    def run(*words, **options):
        return cli(f"model={tiny_checkpoint}", "max_tokens=6", "seed=1", *words, **options)

    return run


# -- the answer


def test_the_answer_alone_is_on_standard_output(ask):
    ran = ask("prompt=Hi")
    answer = mlxgen_answer(ask)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == answer + "\n"


def mlxgen_answer(ask) -> str:
    return json.loads(ask("prompt=Hi", "output=json").out)["text"]


def test_output_json_is_one_object(ask):
    ran = ask("prompt=Hi", "output=json", "top_logprobs=2")
    answer = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    fields = ["text", "tokens", "finish_reason", "prompt_tokens", "completion_tokens", "seed", "stats", "logprobs"]
    assert list(answer) == fields
    rates = {"ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_memory_bytes"}
    counts = {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert set(answer["stats"]) == rates | counts
    assert answer["completion_tokens"] == len(answer["tokens"]) == len(answer["logprobs"]) == 6
    assert (answer["seed"], answer["finish_reason"]) == (1, "length")
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [2] * 6


def test_output_jsonl_is_one_object_per_event(ask):
    events = [json.loads(line) for line in ask("prompt=Hi", "output=jsonl").out.splitlines()]
    *pieces, last = events
    assert "".join(event["text"] for event in events) == last["completion"]["text"]
    assert [token for event in pieces for token in event["tokens"]] == last["completion"]["tokens"]
    assert [event.get("finish_reason") for event in events] == [None] * len(pieces) + ["length"]


def test_text_that_is_no_ascii_is_printed_as_it_is(cli):
    assert "prompt: 你好🙂\n" in cli("--cfg", "job", "prompt=你好🙂").out


def test_stats_go_to_standard_error_and_name_the_sampling(ask):
    ran = ask("prompt=Hi", "stats=true", "sampler=xtc", "sampler.xtc.threshold=0.2")
    assert re.search(r"^\d+ prompt tokens, \d+ tok/s, first \d+\.\d\d s · 6 tokens, .* MB · length$", ran.err, re.M)
    assert "xtc.threshold 0.2 (user)" in ran.err and "seed 1" in ran.err
    assert "\033" not in ran.err  # colours are for terminals
    assert "tok/s" not in ran.out
    assert ask("prompt=Hi", "stats=false").err == ask("prompt=Hi", "stats=auto").err == ""


# -- exit codes and errors

FAILING = """
from dataclasses import dataclass
from mlxgen import errors

@dataclass(frozen=True, kw_only=True)
class Fails:
    error: str

    def __call__(self, config):
        raise {"FitError": errors.FitError, "ModelError": errors.ModelError, "MemoryError": MemoryError,
               "KeyboardInterrupt": KeyboardInterrupt, "KeyError": KeyError}[self.error]("first\\nsecond")
"""


@pytest.fixture
def failing(tmp_path, monkeypatch, cli):
    """A task of the user's own that fails as it is told to."""
    (tmp_path / "failing_task.py").write_text(FAILING)
    (tmp_path / "own" / "task").mkdir(parents=True)
    (tmp_path / "own" / "task" / "fail.yaml").write_text("# Fail.\n_target_: failing_task.Fails\nerror: KeyError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("fail", "trust=[failing_task]", f"--config-dir={tmp_path / 'own'}")
    return lambda *more: cli(*words, *more)


@pytest.mark.parametrize(
    "error, code, message",
    [
        ("ModelError", 3, "mlxgen: first second\n"),
        ("FitError", 4, "mlxgen: first second\n"),
        ("MemoryError", 4, "mlxgen: out of memory.\n"),
        ("KeyboardInterrupt", 130, "\nmlxgen: interrupted\n"),
        ("KeyError", 1, "mlxgen: internal error: KeyError: 'first\\nsecond' (debug=true shows where)\n"),
    ],
)
def test_exit_codes(failing, error, code, message):
    ran = failing(f"task.error={error}")
    assert (ran.code, ran.out, ran.err) == (code, "", message)


@pytest.mark.parametrize(
    "words, code",
    [
        (["promt=hi"], 2),
        (["prompt=hi", "model=/no/such/folder"], 3),
        (["prompt=hi", "model=no_such.gguf"], 3),
        (["--config-dir", "/no/such/folder"], 2),
    ],
)
def test_an_error_is_one_line_on_standard_error(cli, words, code):
    ran = cli(*words)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("mlxgen: ") and ran.err.count("\n") == 1


def test_debug_shows_the_trace_before_the_line(failing, cli, tmp_path):
    ran = failing("debug=true")
    lines = ran.err.splitlines()
    assert lines[0].startswith("Traceback") and "failing_task.py" in ran.err
    assert ran.code == 1 and lines[-1] == "mlxgen: internal error: KeyError: 'first\\nsecond'"
    ran = cli("promt=hi", "+debug=true")
    assert ran.code == 2 and ran.err.startswith("Traceback")
    (tmp_path / "own" / "experiment").mkdir()
    (tmp_path / "own" / "experiment" / "traced.yaml").write_text("# @package _global_\ndebug: true\n")
    assert failing("experiment=traced").err.startswith("Traceback")


def test_mistakes_are_found_before_anything_is_loaded(cli, tmp_path):
    """The model does not exist, and that is not what the message is about."""
    for words in (["sampler.top_p=2"], ["tokenize", "sampler.top_p=2"], ["chat", "cache=window", "cache.size=1"]):
        ran = cli("model=/no/such/folder", "prompt=hi", *words)
        assert ran.code == 2 and re.search("`(sampler.top_p|cache.size)` must be", ran.err)


# -- flags


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["chat", "prompt=x", "--help"], ["help"]])
def test_help(cli, words):
    ran = cli(*words)
    assert ran.code == 0 and ran.err == ""
    expected = "task=chat" if "chat" in words else "usage: mlxgen [TASK]"
    assert expected in ran.out


def test_help_lists_every_choice_and_every_key(cli, tmp_path):
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("# A model of mine.\nsource: x\n")
    text = cli("--help", "--config-dir", str(tmp_path / "own")).out
    for part in ("  chat ", "  mine ", "A model of mine.", "  top_p ", "qwen3_moe", "max_tokens=512", "--multirun"):
        assert part in text
    assert "  base " not in text and "  source " not in text  # parents are not to be chosen


def test_help_on_a_choice_shows_its_keys_and_those_it_inherits(cli):
    text = cli("sampler=top_p", "+cache=window", "--help").out
    for part in ("top_p: 0.9", "mirostat:", "cache.KEY=VALUE", "sinks: 4"):
        assert part in text


def test_version(cli):
    assert cli("--version").out == f"mlxgen {mlxgen.__version__}\n"


def test_cfg_prints_a_checked_configuration(cli):
    ran = cli("prompt=1e-5", "sampler=top_p", "--cfg", "job")
    assert ran.code == 0
    assert "prompt: '1e-5'\n" in ran.out and "\n- override /sampler: top_p\n" in ran.out
    assert cli("--cfg", "job", "max_tokens=x").code == 2


def test_info_names_the_folders_that_are_searched(cli, tmp_path):
    (tmp_path / "own").mkdir()
    ran = cli("--info", "searchpath", f"--config-dir={tmp_path / 'own'}")
    assert ran.code == 0 and f"file://{tmp_path / 'own'}" in ran.out and "/conf " in ran.out
    assert "sampler/top_k" in cli("--info", "defaults", "sampler=top_k").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_shell_completion(cli, shell):
    ran = cli("-sc", f"install={shell}")
    assert ran.code == 0 and "mlxgen -sc query=" in ran.out


@pytest.mark.parametrize(
    "line, found",
    [
        ("mlxgen cha", ["chat"]),
        ("mlxgen sampler=top", ["sampler=top_k", "sampler=top_n_sigma", "sampler=top_p"]),
        ("mlxgen chat +sampler=top_", ["+sampler=top_k", "+sampler=top_n_sigma", "+sampler=top_p"]),
        ("mlxgen max", ["max_tokens="]),
        ("mlxgen cache=window prompt='a b' +cache.", ["+cache.size=", "+cache.sinks="]),
        ("mlxgen prompt=x", []),
        ("mlxgen output=j", ["output=json", "output=jsonl"]),
        ("mlxgen stats=", ["stats=true", "stats=false", "stats=auto"]),
        ("mlxgen sampler", ["sampler="]),
        ("mlxgen sampler=nonsense sampler.temp", ["sampler.temperature="]),
    ],
)
def test_what_a_word_may_become(cli, monkeypatch, line, found):
    monkeypatch.setenv("COMP_LINE", line)
    ran = cli("-sc", "query=bash")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.split()) == sorted(found)


@pytest.mark.parametrize(
    "words, flags, rest",
    [
        (["a", "-m", "b"], {"--multirun": ""}, ["a", "b"]),
        (["--info", "a=b"], {"--info": "all"}, ["a=b"]),
        (["--info", "config", "a=b"], {"--info": "config"}, ["a=b"]),
        (["-cd", "x", "prompt=-c"], {"--config-dir": "x"}, ["prompt=-c"]),
        (["--config-dir=x=y"], {"--config-dir": "x=y"}, []),
    ],
)
def test_flags(words, flags, rest):
    assert read_flags(words) == (flags, rest)


@pytest.mark.parametrize("words", [["--config-dir"], ["--cfg", "hydra"], ["-x"], ["--hlp"], ["-sc", "install=csh"]])
def test_flags_that_cannot_be_meant(cli, words):
    ran = cli(*words)
    assert ran.code == 2 and ran.err.startswith("mlxgen: ")


def test_a_misspelt_flag_is_recognized():
    with pytest.raises(ConfigError, match="Did you mean `--multirun`"):
        read_flags(["--multi-run"])


# -- sweeps


def test_a_sweep_runs_each_and_says_which(ask):
    ran = ask("-m", "sampler.temperature=0,1", "prompt=Hi")
    assert ran.code == 0
    assert ran.err == "# sampler.temperature=0\n# sampler.temperature=1\n"
    single = [ask(f"sampler.temperature={t}", "prompt=Hi").out for t in (0, 1)]
    assert ran.out == "".join(single) and single[0] != single[1]


def test_a_sweep_in_json_carries_its_values_and_reads_standard_input_once(ask):
    ran = ask("--multirun", "seed=1,2", "sampler.temperature=1", "output=json", stdin=b"Hi there")
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert [answer["variant"] for answer in answers] == [["seed=1"], ["seed=2"]]
    assert answers[0]["prompt_tokens"] == answers[1]["prompt_tokens"] == 20
    assert answers[0]["tokens"] != answers[1]["tokens"]


def test_a_sweep_is_checked_as_a_whole_before_it_starts(ask):
    ran = ask("-m", "sampler.top_p=0.5,0.9,1.7", "prompt=Hi")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "mlxgen: `sampler.top_p` must be in [0, 1], but is 1.7.\n"


def test_a_failing_run_does_not_end_a_sweep_but_an_interruption_does(failing):
    ran = failing("-m", "task.error=ModelError,FitError")
    assert ran.code == 4 and ran.err.count("mlxgen: first second") == 2
    ran = failing("-m", "task.error=KeyboardInterrupt,FitError")
    assert ran.code == 130 and "FitError" not in ran.err


# -- the surroundings


def test_no_socket_is_opened_for_a_model_on_this_disk(ask, monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert ask("prompt=Hi").code == 0


def test_relative_paths_start_where_the_caller_stands(tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(tiny_checkpoint.parent)
    assert main([f"model=./{tiny_checkpoint.name}", "prompt=Hi", "max_tokens=1"]) == 0
    assert main([f"model={tiny_checkpoint.name}", "prompt=Hi", "max_tokens=1"]) == 0
    assert os.listdir() == [tiny_checkpoint.name]


def test_an_architecture_of_the_users_own_serves_a_new_model_type(cli, tmp_path, tiny_checkpoint):
    """A folder with a model_type nobody knows, and a YAML file that says what it is."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_checkpoint.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "brand_new"}))
    words = [f"model={model}", "prompt=Hi", "max_tokens=3", "seed=1"]
    ran = cli(*words)
    assert ran.code == 3 and "`model_type` 'brand_new' has no blueprint" in ran.err
    (tmp_path / "own" / "architecture").mkdir(parents=True)
    (tmp_path / "own" / "architecture" / "brand_new.yaml").write_text("# New.\ndefaults: [llama, _self_]\n")
    ran = cli(*words, "--config-dir", str(tmp_path / "own"))
    expected = cli(f"model={tiny_checkpoint}", *words[1:])
    assert (ran.code, ran.out) == (0, expected.out)


def test_a_sampler_stage_of_the_users_own(cli, tmp_path, tiny_checkpoint, monkeypatch):
    (tmp_path / "my_stages.py").write_text(
        "from dataclasses import dataclass\nimport mlx.core as mx\nfrom mlxgen.sampler import Stage\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Only(Stage):\n    token: int\n\n"
        "    def __call__(self, logits, context):\n"
        "        return mx.where(mx.arange(logits.shape[-1]) == self.token, 0.0, -mx.inf) + 0 * logits\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own" / "sampler").mkdir(parents=True)
    (tmp_path / "own" / "sampler" / "only.yaml").write_text(
        "# One token.\ndefaults: [base, _self_]\nonly: {_target_: my_stages.Only, token: 70}\n"
    )
    words = [f"model={tiny_checkpoint}", "prompt=Hi", "max_tokens=3", "sampler=only", f"--config-dir={tmp_path}/own"]
    assert "trust=[my_stages]" in cli(*words).err
    ran = cli(*words, "trust=[my_stages]", "output=json")
    assert json.loads(ran.out)["tokens"] == [70, 70, 70]

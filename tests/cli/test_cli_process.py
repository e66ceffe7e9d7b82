"""The command as a process of its own: signals, pipes, start-up time, the installed wheel."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from mlxgen.testing.checkpoints import write_tiny

ROOT = Path(__file__).parents[2]
MLXGEN = [sys.executable, "-m", "mlxgen"]
HEAVY = ("hydra", "omegaconf", "mlx", "numpy", "huggingface_hub", "transformers", "jinja2", "tokenizers", "torch")


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A checkpoint that never comes to an end."""
    return write_tiny(tmp_path_factory.mktemp("talkative"), max_position_embeddings=10**6)


@pytest.fixture
def start(tmp_path):
    """Start a command in an empty folder; what still runs at the end is killed."""
    running = []

    def begin(*command, **options):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, bufsize=0, **{**pipes, **options})
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def endless(model, *words):
    return [
        *MLXGEN,
        f"model={model}",
        "prompt=Hi",
        "max_tokens=100000",
        "sampler.logit_bias={1: -.inf, 3: -.inf}",
        *words,
    ]


@pytest.mark.parametrize("output", ["text", "json"])
def test_ctrl_c_ends_with_what_was_generated(start, talkative, output):
    process = start(*endless(talkative, "output=jsonl" if output == "json" else "output=text"))
    first = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, b"")
    text = (first + rest).decode()
    assert text.endswith("\n")
    if output == "json":
        last = json.loads(text.splitlines()[-1])
        assert last["finish_reason"] == "interrupted"
        assert last["completion"]["completion_tokens"] == len(last["completion"]["tokens"]) > 0


def test_ctrl_c_while_something_loads_is_quiet_too(start, tmp_path):
    (tmp_path / "slow_part.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    process = start(*MLXGEN, "trust=[slow_part]", "cache._target_=slow_part.Part", "prompt=Hi")
    assert process.stdout.readline() == b"loading\n"
    time.sleep(0.3)  # until it sleeps
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, b"\nmlxgen: interrupted\n")


def test_sigterm_ends_at_once_and_keeps_what_was_shown(start, talkative):
    process = start(*endless(talkative))
    assert process.stdout.read(5)
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (-signal.SIGTERM, b"")


def test_a_reader_that_goes_away_is_no_error(start, talkative):
    command = " ".join(f"'{word}'" for word in endless(talkative, "output=jsonl"))
    process = start("bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}")
    out, errors = process.communicate(timeout=20)
    event, status = out.decode().splitlines()
    assert "text" in json.loads(event) and status in ("0", "141")
    assert errors == b""


def test_a_closed_standard_input_does_no_harm(start, talkative):
    command = " ".join(f"'{word}'" for word in [*MLXGEN, f"model={talkative}", "prompt=Hi", "max_tokens=1"])
    process = start("bash", "-c", f"{command} <&-", stdin=None)
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, b"") and out.endswith(b"\n")


def cpu_seconds(*command) -> tuple[float, bytes]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, out


def test_help_is_quick():
    """0.2 s at most on a quiet machine. CPU time does not count the others, but a busy machine is slower by itself."""
    quickest = min(cpu_seconds(*MLXGEN, "--help")[0] for _ in range(3))
    assert quickest < 0.4


def test_help_and_the_package_load_nothing_heavy():
    code = (
        "import sys, time; start = time.process_time(); import mlxgen; took = time.process_time() - start\n"
        "from mlxgen.cli import main; light = set(sys.modules); main(['--help']); main(['--version'])\n"
        "print(took, *{name.split('.')[0] for name in sys.modules}, sep='\\n')"
    )
    lines = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    _, _, loaded = lines.partition("mlxgen 0.")
    _, took, *names = loaded.splitlines()
    assert not set(names) & set(HEAVY)
    assert float(took) < 0.1  # 0.02 s on a quiet machine


def test_a_message_about_a_mistake_is_quick():
    """Nothing is loaded but Hydra: some half second of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    process = subprocess.run(
        [*MLXGEN, "prompt=Hi", "max_tokns=3"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert process.stderr == "mlxgen: `max_tokns` is not a key. Did you mean `max_tokens`?\n"
    assert process.returncode == 2
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 3


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, built and unpacked: what pip install --target does, without pip."""
    hatchling = pytest.importorskip("hatchling.build", reason="builds the wheel; part of the dev extra")
    source = tmp_path_factory.mktemp("source")
    for name in ("mlxgen", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    (source / "README.md").touch()
    target = tmp_path_factory.mktemp("target")
    build = f"import {hatchling.__name__} as h; print(h.build_wheel({str(source)!r}))"
    name = subprocess.run(
        [sys.executable, "-c", build], check=True, capture_output=True, text=True, cwd=source
    ).stdout.split()[-1]
    with zipfile.ZipFile(source / name) as wheel:
        wheel.extractall(target)
    return target


def test_the_wheel_finds_its_configuration_from_another_folder(installed, tmp_path):
    assert (installed / "mlxgen" / "conf" / "config.yaml").is_file()
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*words):
        command = [*MLXGEN, *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert "usage: mlxgen" in run("--help") and "qwen3_4b" in run("--help")
    assert "- override /model: qwen3_4b\n" in run("+model=qwen3_4b", "sampler=top_p", "--cfg", "job")
    assert f"{installed}/mlxgen/conf " in run("--info", "searchpath")
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_holds_every_file_and_no_other(installed):
    def files(root, pattern):
        return {str(path.relative_to(root)) for path in root.rglob(pattern) if "__pycache__" not in path.parts}

    assert files(installed / "mlxgen" / "conf", "*.yaml") == files(ROOT / "conf", "*.yaml")
    assert files(installed / "mlxgen", "*.py") == files(ROOT / "mlxgen", "*.py")

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlxgen.device  # noqa: F401  a fast BLAS, before mlx

# isort: split
import mlx.core as mx
import pytest

from mlxgen.errors import ConfigError, RunError
from mlxgen.training.checkpoints import Checkpoints, Snapshot
from mlxgen.training.run_folder import RunFolder

# Trains the tiny model; `python -c ... FOLDER` goes on from the newest checkpoint.
_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import mlxgen.device  # noqa: F401  a fast BLAS, before mlx
from training_batches import Listed, make_batch, make_trainer
from mlxgen.training.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])) as folder:
    loop = {{"steps": 40, "save_every": 2, "evaluate_every": 4, "ema": 0.9, "neftune": 5.0}}
    valid = Listed([make_batch(9)])
    trainer = make_trainer(loop=loop, checkpoints=folder.checkpoints, valid=valid, report=folder.record)
    print("ready", flush=True)
    if folder.checkpoints.steps():
        trainer.restore(folder.checkpoints.load())
        folder.rewind(trainer.progress.step)
    trainer.run()
"""


def snapshot(step, **values):
    return Snapshot(step=step, arrays={"parameters/a": mx.full((3,), step)}, values=values)


def start(folder):
    code = _RUN.format(here=str(Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env=environment)


def killed_and_resumed(folder, kills, seconds, seed):
    """Run to the end, with `kills` at random moments of `seconds` of work; returns how long the last part worked."""
    moments = random.Random(seed)
    for _ in range(kills):
        process = start(folder)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    process = start(folder)
    assert process.stdout.readline() == b"ready\n"
    began = time.monotonic()
    process.communicate()
    assert process.returncode == 0
    return time.monotonic() - began


def check_kills(tmp_path, runs, kills):
    seconds = killed_and_resumed(tmp_path / "whole", 0, 0, 0)
    whole = Checkpoints(tmp_path / "whole/checkpoints").load(40)
    losses = [(e["event"], e["step"], e["loss"]) for e in RunFolder(tmp_path / "whole").metrics()]
    for number in range(runs):
        folder = tmp_path / str(number)
        killed_and_resumed(folder, kills, 0.9 * seconds / kills, number)
        end = Checkpoints(folder / "checkpoints").load(40)
        assert end.values == whole.values
        assert all(mx.array_equal(end.arrays[name], a).item() for name, a in whole.arrays.items())
        assert [(e["event"], e["step"], e["loss"]) for e in RunFolder(folder).metrics()] == losses


def test_killed_at_random_moments_it_ends_bit_for_bit_the_same(tmp_path):
    check_kills(tmp_path, runs=1, kills=2)


@pytest.mark.full
def test_killed_twenty_times_it_ends_bit_for_bit_the_same(tmp_path):
    check_kills(tmp_path, runs=20, kills=1)


def test_newest_and_best_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        checkpoints.save(snapshot(step, best_step=4))
    assert checkpoints.steps() == [4, 6, 8] and checkpoints.best() == 4
    assert checkpoints.load().step == 8 and checkpoints.load(4).arrays["parameters/a"].tolist() == [4, 4, 4]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", "step-00000006", "step-00000008"}


def test_leftovers_of_a_crash_are_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [] and checkpoints.best() is None
    (tmp_path / ".step-00000006.partial").mkdir(parents=True)
    (tmp_path / ".step-00000002.old").mkdir()
    checkpoints.save(snapshot(4))
    assert checkpoints.steps() == [4]
    checkpoints.save(snapshot(6))
    assert checkpoints.steps() == [4, 6]


def test_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(4))
    real = mx.save_safetensors
    monkeypatch.setattr(mx, "save_safetensors", lambda path, *a, **k: real(_full(path), *a, **k))
    with pytest.raises(RunError, match=r"checkpoint of step 6 could not be written.*the one of step 4 is whole"):
        checkpoints.save(snapshot(6))
    assert checkpoints.steps() == [4] and checkpoints.load().step == 4
    assert not (tmp_path / ".step-00000006.partial").exists()


def _full(path):
    """The same name, on a device that is always full."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    os.symlink("/dev/full", path)
    return path


def test_two_runs_in_one_folder(tmp_path):
    with (
        RunFolder(tmp_path / "run"),
        pytest.raises(RunError, match="another run is writing"),
        RunFolder(tmp_path / "run"),
    ):
        pass


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.start("seed: 1\n", {"seed": 1})
        with pytest.raises(ConfigError, match=r"must be a new or an empty folder.*resume=DIR"):
            folder.start("seed: 1\n", {})
        folder.note({"outcome": "done"})
        assert folder.about == {"seed": 1, "outcome": "done"} and folder.config_yaml == "seed: 1\n"


def test_torn_lines_and_steps_that_will_come_again_are_forgotten(tmp_path):
    with RunFolder(tmp_path) as folder:
        for step in (1, 2, 3):
            folder.record({"event": "train", "step": step})
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"event": "tr')
        folder.rewind(2)
        folder.record({"event": "train", "step": 3})
        assert [event["step"] for event in folder.metrics()] == [1, 2, 3]


def test_broken_and_missing_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(RunError, match="must hold a checkpoint, but has none"):
        checkpoints.load()
    path = checkpoints.save(snapshot(4))
    (path / "state.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match="is broken"):
        checkpoints.load()

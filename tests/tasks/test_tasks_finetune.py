"""finetune and evaluate on a tiny model: what a run leaves behind, how it goes on, and what it refuses."""

import json
import re
import shutil

import pytest

from mlxgen.training.run_folder import RunFolder

FAST = ("task.epochs=2", "optimizer.learning_rate=1e-2", "schedule=constant", "data.validation=0")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A folder with train and valid files."""
    folder = tmp_path_factory.mktemp("facts")
    for name, count in (("train", 9), ("valid", 3)):
        rows = [{"prompt": f"what is {i}?", "completion": f"it is {i * 7}"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def run_folder(tiny_checkpoint, facts, tmp_path_factory):
    """A run that has ended."""
    from mlxgen.cli import main

    out = tmp_path_factory.mktemp("runs") / "run"
    words = ("adapter=lora", "adapter.dropout=0.1", f"out={out}", "task.save_every=1")
    assert main(["finetune", f"model={tiny_checkpoint}", f"data.path={facts}", *words, *FAST]) == 0
    return out


def events(folder):
    """What must be the same in a run that was broken off: all but times and memory."""
    kept = ("event", "step", "loss", "learning_rate", "grad_norm", "tokens")
    return [{k: v for k, v in event.items() if k in kept} for event in RunFolder(folder).metrics()]


def test_a_run_leaves_what_it_takes_to_understand_and_repeat_it(run_folder):
    names = {path.name for path in run_folder.iterdir()}
    assert {"config.yaml", "run.json", "metrics.jsonl", "report.html", "checkpoints", "adapter"} <= names
    about = json.loads((run_folder / "run.json").read_text())
    assert about["seed"] == 0 and about["versions"]["mlx"] and len(about["model"]["fingerprint"]) == 64
    assert about["outcome"]["ended"] == "done" and about["outcome"]["steps"] == 6
    losses = [e["loss"] for e in events(run_folder) if e["event"] == "valid"]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert "learning_rate: 0.01" in (run_folder / "report.html").read_text()


def test_before_and_after(cli, tiny_checkpoint, facts, run_folder):
    words = (f"model={tiny_checkpoint}", f"data.path={facts}", f"adapter.path={run_folder / 'adapter'}", "output=json")
    result = json.loads(cli("evaluate", *words).out)
    losses = [e["loss"] for e in events(run_folder) if e["event"] == "valid"]
    assert result["model"]["loss"] == pytest.approx(losses[0], rel=1e-4)
    assert result["with adapter"]["loss"] == pytest.approx(min(losses), rel=1e-4)
    ran = cli("evaluate", f"model={tiny_checkpoint}", f"data.path={facts}")
    assert re.search(r"model +\d\.\d+ +\d+\.\d+", ran.out) and "with adapter" not in ran.out


def test_generate_takes_the_adapter(cli, tiny_checkpoint, run_folder):
    ran = cli(f"model={tiny_checkpoint}", f"adapter.path={run_folder / 'adapter'}", "prompt=what is 3?", "max_tokens=2")
    assert ran.code == 0


def test_goes_on_as_if_it_had_not_stopped(cli, run_folder, tmp_path):
    """Back to the checkpoint before the last, with the events of what is lost still there."""
    folder = tmp_path / "broken"
    shutil.copytree(run_folder, folder)
    checkpoints = RunFolder(folder).checkpoints
    assert checkpoints.steps()[-2:] == [5, 6]
    shutil.rmtree(folder / "checkpoints/step-00000006")
    shutil.rmtree(folder / "adapter")
    ran = cli("finetune", f"resume={folder}", "output=json")
    assert ran.code == 0 and json.loads(ran.out)["steps"] == 6
    assert events(folder) == events(run_folder)
    ours, theirs = (f / "adapter/adapters.safetensors" for f in (folder, run_folder))
    assert ours.read_bytes() == theirs.read_bytes()
    assert json.loads((folder / "run.json").read_text())["resumed_at"] == [5]


def test_longer_is_fine_but_another_run_is_not(cli, run_folder, tmp_path):
    folder = tmp_path / "longer"
    shutil.copytree(run_folder, folder)
    ran = cli("finetune", f"resume={folder}", "optimizer.learning_rate=1")
    assert ran.code == 2 and "`optimizer.learning_rate` must stay 0.01 in a run that goes on, but is 1;" in ran.err
    ran = cli("finetune", f"resume={folder}", "task.epochs=3", "output=json")
    assert ran.code == 0 and json.loads(ran.out)["steps"] == 9


def test_sweep_gives_one_table_of_all_runs(cli, tiny_checkpoint, facts, tmp_path):
    out = tmp_path / "sweep"
    ran = cli(
        *("finetune", f"model={tiny_checkpoint}", f"data.path={facts}", "adapter=lora", f"out={out}", *FAST),
        *("task.epochs=1", "adapter.rank=2,4", "--multirun"),
    )
    assert ran.code == 0
    table = (out / "sweep.md").read_text()
    assert ran.out.endswith(table) and table.startswith("| adapter.rank | best validation |")
    assert {line.split(" | ")[0] for line in table.splitlines()[2:]} == {"| 2", "| 4"}
    assert (out / "adapter.rank=2/adapter").is_dir() and len(json.loads((out / "sweep.json").read_text())) == 2


def test_interrupted_it_finishes_the_step_and_says_how_to_go_on(cli, tiny_checkpoint, facts, tmp_path, monkeypatch):
    import signal

    record = RunFolder.record

    def press(self, event):
        record(self, event)
        if event["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunFolder, "record", press)
    out = tmp_path / "run"
    words = (f"model={tiny_checkpoint}", f"data.path={facts}", "adapter=lora", f"out={out}", *FAST)
    ran = cli("finetune", *words)
    assert ran.code == 130 and f"interrupted after step 2; resume={out} goes on" in ran.err
    monkeypatch.undo()
    assert RunFolder(out).checkpoints.steps() == [2]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("adapter=lora",), 2, "`data.path` must be given"),
        (("data.path=x",), 2, "`adapter` must be one that trains something, but is none; choose e.g. adapter=lora."),
        (("adapter=lora", "data.path=x", "task.ema=1"), 2, r"`task.ema` must be in \(0, 1\), but is 1.0."),
        (("adapter=lora", "data.path=x", "optimizer=sampler"), 2, "`optimizer` must be one of adafactor, adamw"),
        (("adapter=lora", "data.path=x", "task.loggers=[x]"), 2, r"`task.loggers\[0\]` must be one of tensorboard"),
        (("resume=nowhere",), 2, "`resume` must be the folder of a run, but nowhere is none."),
        (("adapter=lora", "data.path=x", "adapter.rank=2,4", "-m"), 2, "`out` must be given in a sweep"),
    ],
)
def test_refused_before_anything_is_loaded(cli, words, code, message):
    ran = cli("finetune", "model=/no/such/folder", *words)
    assert ran.code == code and re.search(message, ran.err)


def test_a_folder_with_a_run_in_it_is_refused(cli, tiny_checkpoint, facts, run_folder):
    ran = cli("finetune", f"model={tiny_checkpoint}", f"data.path={facts}", "adapter=lora", f"out={run_folder}")
    assert ran.code == 2 and "must be a new or an empty folder" in ran.err and "resume=DIR" in ran.err
    with RunFolder(run_folder):
        assert "another run is writing" in cli("finetune", f"resume={run_folder}").err


def test_other_data_is_another_run(cli, run_folder, facts, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(run_folder, folder)
    config = folder / "config.yaml"
    moved = tmp_path / "data"
    shutil.copytree(facts, moved)
    (moved / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    config.write_text(config.read_text().replace(str(facts), str(moved)))
    ran = cli("finetune", f"resume={folder}")
    assert ran.code == 2 and "the data must be what it was" in ran.err

"""Display, report and loggers."""

import io
import math
import sys
import types

import pytest

from mlxgen.errors import ConfigError
from mlxgen.training import display as display_module
from mlxgen.training.display import Lines, Live, curve
from mlxgen.training.loggers import numbers, open_loggers
from mlxgen.training.report import page, run_picture, smoothed, sweep_picture, write_report


def events(count=10):
    found = [{"event": "valid", "step": 0, "loss": 3.0}]
    for step in range(1, count + 1):
        found.append(
            {"event": "train", "step": step, "epoch": step / 5, "loss": 3 / step, "learning_rate": 1e-4}
            | {"grad_norm": 1.0, "tokens": 9 * step, "tokens_per_s": 100.0, "peak_memory_bytes": 10**6}
        )
    return [*found, {"event": "valid", "step": count, "loss": 0.5}]


def test_curve():
    assert curve([]) == "" and curve([1.0]) == "▁"
    assert curve([0, 7]) == "▁█" and len(curve(list(range(1000)), width=20)) == 20


def test_lines_are_few_and_hold_what_matters(capsys):
    with Lines(100) as lines:
        for event in events(100):
            lines.show(event)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2 + 1 + 20
    assert shown[0] == "step 0/100: validation loss 3.0000"
    assert shown[-2].startswith("step 100/100: loss 0.03") and "100 tok/s · 1 MB" in shown[-2]


def test_live_display_shows_curve_and_speed(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    from rich.console import Console

    live = Live(10)
    live._live.console = Console(file=stream, width=120)
    for event in events():
        live.show(event)
    Console(file=stream, width=120).print(live._table(events()[-2]))
    text = stream.getvalue()
    assert "step 10/10" in text and "█" in text and "best 0.5000 at 10" in text and "100 tok/s" in text
    assert display_module._clock(3700) == "1:01:40 left" and display_module._clock(59) == "0:59 left"


def test_running_mean():
    assert smoothed([1, 2, 3, 4], share=0.5) == [1, 1.5, 2.5, 3.5]
    assert smoothed([]) == []


def test_report_without_pictures_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not write_report(tmp_path, events(), {"best_loss": 0.5, "steps": 10}, "a: <b>\n")
    text = (tmp_path / "report.html").read_text()
    assert "matplotlib is not installed" in text and "a: &lt;b&gt;" in text and "0.5000" in text
    assert not (tmp_path / "report.png").exists() and sweep_picture({"a": events()}) is None


def test_pictures():
    pytest.importorskip("matplotlib")
    for picture in (run_picture(events(), "run"), sweep_picture({"a=1": events(), "a=2": events(5)})):
        assert picture is not None and picture[:4] == b"\x89PNG"
    assert "data:image/png;base64," in page("run", b"x", {}, [], "")


class Fake(types.ModuleType):
    """Stands for tensorboardX, wandb and mlflow: notes what it is told."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **options):
            self.calls.append((name, args, options))
            return self

        return call


@pytest.mark.parametrize(
    ("name", "package", "last", "end"),
    [
        ("tensorboard", "tensorboardX", ("add_scalar", ("train/loss", 3.0, 1), {}), "close"),
        ("wandb", "wandb", ("log", ({"train/loss": 3.0},), {"step": 1}), "finish"),
        ("mlflow", "mlflow", ("log_metrics", ({"train/loss": 3.0},), {"step": 1}), "end_run"),
    ],
)
def test_loggers(name, package, last, end, tmp_path, monkeypatch):
    fake = Fake(package)
    monkeypatch.setitem(sys.modules, package, fake)
    (logger,) = open_loggers([name], tmp_path, {"adapter.rank": 8})
    logger.log(1, {"train/loss": 3.0})
    assert fake.calls[-1] == last
    logger.close()
    assert fake.calls[-1][0] == end


def test_a_logger_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"`task.loggers` must be installed, but wandb is not: pip install wandb\."):
        open_loggers(["wandb"], tmp_path, {})


def test_loggers_get_numbers_only():
    assert numbers({"event": "valid", "step": 3, "loss": math.pi, "why": "x"}) == {"valid/loss": math.pi}

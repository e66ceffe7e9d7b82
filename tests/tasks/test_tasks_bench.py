"""Measurements can be chosen, and a row knows whether its bar is met."""

import json

import pytest

from mlxgen.bench.compare import row
from mlxgen.errors import ConfigError
from mlxgen.tasks.bench import GROUPS, Bench, chosen, table


def test_rows_are_chosen_by_name_or_group():
    every = [name for names in GROUPS.values() for name in names]
    assert chosen([]) == every == chosen(list(GROUPS))
    assert chosen("engine") == list(GROUPS["engine"])
    assert chosen(["lookup", "step"]) == ["step", "lookup"]
    with pytest.raises(ConfigError, match=r"`task.rows` must be of .* Did you mean `lookup`"):
        Bench(rows=["lokup"])
    with pytest.raises(ConfigError, match=r"`task.clock` must be wall or cpu"):
        Bench(clock="sun")


@pytest.mark.parametrize(
    ("bar", "ratio", "met"),
    [
        (">= 1.2", 1.2, True),
        (">= 1.2", 1.1, False),
        ("<= 0.5", 0.5, True),
        ("<= 0.5", 0.6, False),
        ("1 to 1.15", 1.0, True),
        ("1 to 1.15", 0.99, False),
        ("1 to 1.15", 1.16, False),
    ],
)
def test_bars(bar, ratio, met):
    line = row("speed", "tok/s", [2 * ratio, 3 * ratio, 100 * ratio], [2.0, 3.0, 100.0], bar, "others")
    assert line.ratio == pytest.approx(ratio) and line.mlxgen == pytest.approx(3 * ratio)
    exact = type(line)(**{**vars(line), "ratio": ratio})
    assert exact.met == met
    assert table([exact]).endswith("| met |" if met else "| missed |")


def test_rows_of_a_tiny_model_as_json(cli, tiny_checkpoint, tmp_path):
    words = ["task=bench", f"model={tiny_checkpoint}", "task.rows=[batch_step]", "task.clock=cpu", "output=json"]
    out = cli(*words, f"task.file={tmp_path / 'bench.json'}")
    report = json.loads(out.out)
    assert out.code == 0 and report == json.loads((tmp_path / "bench.json").read_text())
    (line,) = report["rows"]
    assert line["met"] and line["against"] == "one request" and 1 <= line["ratio"] <= 1.3

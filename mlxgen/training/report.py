"""A run as a picture and as a page; several runs as a table and a picture. The pictures need matplotlib."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxgen.training.checkpoints import write_file

Events = Sequence[Mapping[str, Any]]
NO_PICTURE = "no picture was drawn: matplotlib is not installed (pip install 'mlxgen[train]')"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; color: #555; } img { max-width: 100%; }
pre { background: #f6f6f6; padding: 1rem; overflow: auto; font-size: 12px; }
"""


def write_report(folder: Path, events: Events, facts: Mapping[str, Any], config_yaml: str) -> bool:
    """report.html, and report.png where matplotlib is. Returns whether there is a picture."""
    picture = run_picture(events, folder.name)
    if picture is not None:
        write_file(folder / "report.png", picture)
    write_file(folder / "report.html", page(folder.name, picture, facts, events, config_yaml))
    return picture is not None


def page(name: str, picture: bytes | None, facts: Mapping[str, Any], events: Events, config_yaml: str) -> str:
    """One file that needs no other."""
    image = base64.b64encode(picture).decode() if picture is not None else None
    shown = f'<img alt="curves of the run" src="data:image/png;base64,{image}">' if image else f"<p>{NO_PICTURE}</p>"
    valid = [[str(e["step"]), f"{e['loss']:.4f}"] for e in events if e["event"] == "valid"]
    rows = [[key.replace("_", " "), _text(value)] for key, value in facts.items()]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f"<style>{_STYLE}</style>\n<h1>{html.escape(name)}</h1>\n{shown}\n<h2>Run</h2>{_table(rows)}\n"
        f"<h2>Validation</h2>{_table(valid, ('step', 'loss')) if valid else '<p>There was none.</p>'}\n"
        f"<h2>Configuration</h2><pre>{html.escape(config_yaml)}</pre></html>\n"
    )


def _table(rows: Sequence[Sequence[str]], heads: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def run_picture(events: Events, title: str) -> bytes | None:
    """PNG: loss, learning rate, size of the gradient, throughput. None without matplotlib."""
    figure_class = _figure_class()
    if figure_class is None:
        return None
    train, valid = ([e for e in events if e["event"] == kind] for kind in ("train", "valid"))
    figure = figure_class(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplot_mosaic([["loss", "loss", "loss"], ["rate", "norm", "speed"]], height_ratios=[2, 1])
    steps = [e["step"] for e in train]
    losses = [e["loss"] for e in train]
    axes["loss"].plot(steps, losses, color="C0", alpha=0.3, linewidth=1)
    axes["loss"].plot(steps, smoothed(losses), color="C0", label="training")
    if valid:
        best = min(valid, key=lambda e: e["loss"])
        axes["loss"].plot([e["step"] for e in valid], [e["loss"] for e in valid], "o-", color="C1", label="validation")
        text = f"best {best['loss']:.3f}"
        place = {"xytext": (0, 10), "textcoords": "offset points", "ha": "center"}
        axes["loss"].annotate(text, (best["step"], best["loss"]), color="C1", **place)
    axes["loss"].set(ylabel="loss per learned token", xlabel="step")
    axes["loss"].legend(frameon=False)
    for name, key, label in (
        ("rate", "learning_rate", "learning rate"),
        ("norm", "grad_norm", "gradient norm"),
        ("speed", "tokens_per_s", "tokens/s"),
    ):
        axes[name].plot(steps, [e[key] for e in train], color="C2", linewidth=1)
        axes[name].set(title=label, xlabel="step", ylim=(0, None))
    return _png(figure, axes.values())


def sweep_picture(runs: Mapping[str, Events]) -> bytes | None:
    """PNG: the losses of several runs. None without matplotlib."""
    figure_class = _figure_class()
    if figure_class is None:
        return None
    figure = figure_class(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, events) in enumerate(runs.items()):
        color = f"C{number % 10}"
        train, valid = ([e for e in events if e["event"] == kind] for kind in ("train", "valid"))
        axes.plot([e["step"] for e in train], smoothed([e["loss"] for e in train]), color=color, alpha=0.5)
        drawn = valid or train
        axes.plot(
            [e["step"] for e in drawn], [e["loss"] for e in drawn], "o-" if valid else "-", color=color, label=name
        )
    valid_too = any(e["event"] == "valid" for events in runs.values() for e in events)
    title = "points: validation, lines: training" if valid_too else ""
    axes.set(xlabel="step", ylabel="loss per learned token", title=title)
    axes.legend(frameon=False, fontsize="small")
    return _png(figure, [axes])


def smoothed(values: Sequence[float], share: float = 0.05) -> list[float]:
    """A running mean over the last `share` of all values."""
    width = max(round(len(values) * share), 1)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(i + 1 - width, 0)]) / (i + 1 - max(i + 1 - width, 0)) for i in range(len(values))]


def _figure_class() -> Any:
    """matplotlib's Figure, which needs no display and no global state."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found]
    except ImportError:
        return None
    return Figure


def _png(figure: Any, axes: Any) -> bytes:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()

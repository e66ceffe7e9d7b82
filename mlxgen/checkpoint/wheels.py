"""pip as a subprocess: with the user's configuration, without running anybody's code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxgen.checkpoint.base import Progress
from mlxgen.errors import DownloadError

Run = Callable[[list[str], Callable[[str], None]], int]
"""Runs a command, hands every line of its output to the function, returns the exit code."""

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_NO_NETWORK = (
    "connection broken",
    "NewConnectionError",
    "name resolution",
    "Max retries",
    "dns error",
    "Network is",
)


def run_command(command: list[str], on_line: Callable[[str], None]) -> int:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line.rstrip())
            return process.wait()
        except BaseException:  # Ctrl-C above all: pip must not go on without us
            process.kill()
            raise


def download_wheels(requirements: Sequence[str], folder: Path, report: Progress, run: Run) -> None:
    """Put the wheels of `requirements` into `folder`, or (by uv, where there is no pip) their unpacked files.

    Raises DownloadError with the reason and what to do.
    """
    names = ", ".join(requirements)
    label = f"Fetching {requirements[0]}" + (
        f" and {len(requirements) - 1} more" if len(requirements) > 1 else ""
    )
    lines: list[str] = []
    before, current, size = 0, 0, 0

    def on_line(line: str) -> None:
        nonlocal before, current, size
        if match := _PROGRESS.fullmatch(line.strip()):
            done, total = int(match[1]), int(match[2])
            if total != size or done < current:  # the next file
                before, size = before + current, total
            current = done
            report(label, before + current, before + size if len(requirements) == 1 else None)
        elif line.strip():
            lines.append(line.strip())

    report(label, 0, None)
    if run(_command(requirements, folder), on_line) != 0:
        raise DownloadError(_reason(names, lines, folder))


def _command(requirements: Sequence[str], folder: Path) -> list[str]:
    # Wheels only: building from source would run the package's code.
    common = ["--no-deps", "--only-binary", ":all:"]
    if offline():
        common.append("--no-index")
    version = _pip_version()
    if version is not None:
        bar = "raw" if version >= (24, 1) else "off"
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", bar, "--dest", str(folder)]
        return [sys.executable, "-m", "pip", "download", *common, *options, *requirements]
    if uv := shutil.which("uv"):
        options = ["--python", sys.executable, "--target", str(folder)]
        return [uv, "pip", "install", "--quiet", *common, *options, *requirements]
    raise DownloadError(
        f"pip or uv is needed to fetch {', '.join(requirements)}, but neither is there. "
        "Run `python -m ensurepip`."
    )


def _pip_version() -> tuple[int, ...] | None:
    from importlib import metadata

    try:
        text = metadata.version("pip")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def offline() -> bool:
    """Whether the user has forbidden the network with the hub's variable."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


def _reason(names: str, lines: list[str], folder: Path) -> str:
    output = "\n".join(lines)
    if "No space left" in output or "Disk quota" in output:
        return f"No space left in {folder.parent} for {names}. Free some, or set MLXGEN_CACHE elsewhere."
    if offline():
        return f"`{names}` is not in the cache, and HF_HUB_OFFLINE forbids fetching it. Unset it once."
    if any(sign in output for sign in _NO_NETWORK):
        return f"`{names}` could not be fetched: no connection to the package index. Check the network."
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.lower().startswith("error")]
    last = (errors or lines or ["no output"])[-1]
    return f"`{names}` could not be fetched: {last} Check that `pip download {names.split(',')[0]}` works."

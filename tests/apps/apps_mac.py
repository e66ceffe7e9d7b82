"""A Mac as far as the scripts see one: a home folder, and stand-ins on PATH that write down what they are asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACOS = ROOT / "apps" / "macos"
SCRIPTS = ("summarize-clipboard", "propose-names", "prepare-commit-msg")
# A Mac's /bin/sh is bash 3.2 in its POSIX mode; Debian's is dash.
any_shell = pytest.mark.parametrize("mac", ["sh", "bash --posix"], indirect=True)

_STAND_INS = {
    # Call n: the words end with NUL in call<n>/words. The answer is answer<n>, or else answer.
    "mlxgen": r"""
n=1; while ! mkdir "$MAC/call$n" 2>/dev/null; do n=$((n + 1)); done
printf '%s\0' "$@" >"$MAC/call$n/words"
cat >"$MAC/call$n/stdin"
cat "$MAC/answer$n" 2>/dev/null || cat "$MAC/answer"
exit "$(cat "$MAC/code")"
""",
    # As the real ones, these speak UTF-8 only where the locale says so.
    "pbpaste": r"""
case ${LC_ALL-} in *.UTF-8) cat "$MAC/clipboard" ;; *) tr '\200-\377' '?' <"$MAC/clipboard" ;; esac
""",
    "pbcopy": r"""
case ${LC_ALL-} in *.UTF-8) cat >"$MAC/clipboard" ;; *) tr '\200-\377' '?' >"$MAC/clipboard" ;; esac
""",
    # A list is answered by the lines in `choice`, or all of it; before that, `meanwhile` runs.
    "osascript": r"""
printf '%s\0' "$@" >>"$MAC/osascript"
for last do :; done
case $* in
*'choose from list'*)
    if [ -f "$MAC/meanwhile" ]; then . "$MAC/meanwhile"; fi
    cat "$MAC/choice" 2>/dev/null || printf '%s\n' "$last" ;;
esac
exit "$(cat "$MAC/osascript-code" 2>/dev/null || echo 0)"
""",
    "mdls": r"""
echo 'kMDItemContentCreationDate = 2024-02-02 08:10:41 +0000'
echo 'kMDItemKind                = "PDF document"'
echo 'kMDItemTitle               = (null)'
""",
    "textutil": r"""printf 'The text of a document.'""",
}
_FILE = """case $* in *--mime-encoding*) grep -qI . "$3" && echo utf-8 || echo binary ;; *) echo data ;; esac"""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the stand-in mlxgen."""

    words: list[str]
    text: bytes

    @property
    def keys(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.words)


class Mac:
    """`shell` runs the scripts, which are for any POSIX shell."""

    def __init__(self, folder: Path, shell: str = "sh"):
        self.folder, self.shell = folder, shell
        self.home, self.bin = folder / "home", folder / "bin"
        self.home.mkdir(parents=True)
        self.bin.mkdir()
        self.env = {
            "PATH": os.pathsep.join([str(self.bin), *_path_without_mlxgen()]),
            "HOME": str(self.home),
            "MAC": str(self.folder),
            "GIT_CONFIG_GLOBAL": str(self.home / ".gitconfig"),
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        for name, body in _STAND_INS.items():
            self.command(name, body)
        if shutil.which("file") is None:
            self.command("file", _FILE)
        self.answers("An answer")

    def command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def real_mlxgen(self, model: Path) -> None:
        """The real command line and a model of your own instead of the stand-in."""
        self.env["MLXGEN_MODEL"] = str(model)
        self.command("mlxgen", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -P -m mlxgen seed=1 "$@"')

    def answers(self, text: str, call: int | None = None, code: int = 0) -> None:
        """What the stand-in mlxgen answers, at the call of that number or at every other, and its exit code."""
        (self.folder / f"answer{call or ''}").write_text(text)
        (self.folder / "code").write_text(str(code))

    @property
    def clipboard(self) -> bytes:
        return (self.folder / "clipboard").read_bytes()

    @property
    def calls(self) -> list[Call]:
        folders = sorted(self.folder.glob("call*"), key=lambda path: int(path.name.removeprefix("call")))
        return [
            Call(words=_words(folder / "words"), text=(folder / "stdin").read_bytes()) for folder in folders
        ]

    @property
    def dialogs(self) -> list[str]:
        """All words that osascript was called with."""
        path = self.folder / "osascript"
        return _words(path) if path.exists() else []

    def run(self, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd or self.home,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())

    def script(self, name: str, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.run(*self.shell.split(), MACOS / name, *words, cwd=cwd)


def _path_without_mlxgen() -> list[str]:
    return [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "mlxgen").exists()]


def _words(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1]

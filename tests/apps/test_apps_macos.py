"""The macOS scripts as they are shipped: lint, the Quick Action's bundle, and the installation of the README."""

import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from apps_mac import MACOS, ROOT, SCRIPTS, Mac

README = (MACOS / "README.md").read_text()
CONTENTS = MACOS / "Propose names.workflow" / "Contents"


def installation(name: str) -> list[str]:
    """The shell lines below the script's heading."""
    found = re.search(rf"^## {name}\n+```sh\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[1].splitlines()


def install(mac: Mac, name: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return mac.run("sh", "-euc", "\n".join(installation(name)), cwd=root)


def test_shellcheck_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    command = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert command, "shellcheck is missing; it comes with the extra `dev`"
    result = subprocess.run(
        [command, "--norc", *(MACOS / name for name in SCRIPTS)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_thin_plain_sh(name: str) -> None:
    path = MACOS / name
    text = path.read_text()
    assert path.stat().st_mode & 0o111 and text.startswith("#!/bin/sh\n") and "\nset -eu\n" in text
    assert len(text.splitlines()) <= 250 and max(map(len, text.splitlines())) <= 200
    assert len(re.findall(r"^ *mlxgen ", text, re.MULTILINE)) == 1 and "python" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_says_how_it_is_installed_as_the_readme_does(name: str) -> None:
    lines = installation(name)
    assert len(lines) == 2
    head = (MACOS / name).read_text().split("\nset -eu\n")[0]
    assert "\n".join(f"#   {line}" for line in lines) in head


def test_the_readmes_name_every_script() -> None:
    apps = (ROOT / "apps" / "README.md").read_text()
    for name in SCRIPTS:
        assert f"[macos/{name}](macos/README.md#{name})" in apps


def load(name: str) -> dict:
    with (CONTENTS / name).open("rb") as file:
        return plistlib.load(file, fmt=plistlib.FMT_XML)


def test_finder_offers_the_action_for_any_file_or_folder() -> None:
    (service,) = load("Info.plist")["NSServices"]
    assert service["NSMenuItem"] == {"default": "Propose names"}
    assert service["NSMessage"] == "runWorkflowAsService"
    assert service["NSRequiredContext"] == {"NSApplicationIdentifier": "com.apple.finder"}
    assert service["NSSendFileTypes"] == ["public.item"]
    about = load("document.wflow")["workflowMetaData"]
    assert about["workflowTypeIdentifier"] == "com.apple.Automator.servicesMenu"
    assert about["serviceApplicationBundleID"] == "com.apple.finder"
    assert about["serviceInputTypeIdentifier"] == "com.apple.Automator.fileSystemObject"


def shell_action(bundle: Path) -> dict:
    with (bundle / "Contents" / "document.wflow").open("rb") as file:
        (step,) = plistlib.load(file)["actions"]
    assert step["action"]["BundleIdentifier"] == "com.apple.RunShellScript"
    return step["action"]["ActionParameters"]


def test_the_action_runs_the_script_with_files_as_arguments() -> None:
    parameters = shell_action(MACOS / "Propose names.workflow")
    assert parameters["inputMethod"] == 1  # 0 would be standard input
    assert parameters["shell"] == "/bin/sh"
    assert parameters["COMMAND_STRING"].endswith('exec "$HOME/.local/bin/propose-names" -- "$@"\n')


def test_summarize_clipboard_installs(tmp_path: Path) -> None:
    mac = Mac(tmp_path / "mac")
    for _ in range(2):  # the second time over the first
        assert install(mac, "summarize-clipboard").returncode == 0
    (mac.folder / "clipboard").write_text("text")
    result = mac.run(mac.home / ".local" / "bin" / "summarize-clipboard")
    assert (result.returncode, result.stdout, mac.clipboard) == (0, "An answer\n", b"An answer")


def test_the_quick_action_installs_and_renames(tmp_path: Path) -> None:
    mac = Mac(tmp_path / "mac")
    for _ in range(2):
        assert install(mac, "propose-names").returncode == 0
    services = mac.home / "Library" / "Services"
    (bundle,) = services.iterdir()
    assert sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*.*")) == [
        "Contents/Info.plist", "Contents/document.wflow",
    ]  # fmt: skip
    old = mac.home / "two words.txt"
    old.write_text("text")
    parameters = shell_action(bundle)
    result = mac.run(parameters["shell"], "-c", parameters["COMMAND_STRING"], parameters["shell"], old)
    assert result.returncode == 0, result.stderr
    assert (mac.home / "an-answer.txt").read_text() == "text" and not old.exists()


def test_the_hook_installs_and_never_replaces_another(tmp_path: Path) -> None:
    mac = Mac(tmp_path / "mac")
    project = mac.home / "my-project"
    mac.run("git", "init", "-q", "--template=", project)
    assert install(mac, "prepare-commit-msg").returncode == 0
    hook = project / ".git" / "hooks" / "prepare-commit-msg"
    assert hook.read_bytes() == (MACOS / "prepare-commit-msg").read_bytes()
    hook.unlink()
    hook.write_text("mine")
    assert install(mac, "prepare-commit-msg").returncode != 0
    assert hook.read_text() == "mine"


@pytest.mark.parametrize("name", ["summarize-clipboard", "propose-names"])
def test_mlxgen_is_found_where_the_readme_puts_it(tmp_path: Path, name: str) -> None:
    """Finder and Shortcuts start programs with a short PATH."""
    mac = Mac(tmp_path / "mac")
    checkout = tmp_path / "checkout"
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.move(mac.bin / "mlxgen", checkout / ".venv" / "bin" / "mlxgen")
    (line,) = re.findall(r"^    (mkdir .*\.venv/bin/mlxgen.*)$", README, re.MULTILINE)
    assert mac.run("sh", "-euc", line, cwd=checkout).returncode == 0
    (mac.folder / "clipboard").write_text("text")
    (mac.home / "a.txt").write_text("text")
    result = mac.script(name, *(["--dry-run", "a.txt"] if name == "propose-names" else []))
    assert (result.returncode, len(mac.calls)) == (0, 1)

"""The README's commands, code and file tree are those of the project."""

import re
import shlex
from pathlib import Path

import pytest

from mlxgen.cli import check_parts
from mlxgen.config import load_config, sweep

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = [line.strip() for line in re.findall(r"^    (?:\S.*)$", README, re.M)]
COMMANDS = [part.strip() for line in SHOWN for part in line.removeprefix("$ ").split(" | ")]
COMMANDS = [command for command in COMMANDS if command.startswith("mlxgen ")]


def test_there_are_commands():
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_composes_and_its_parts_build(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-checkpoint").mkdir()
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "answers.jsonl").write_text("")
    words = shlex.split(command, comments=True)[1:]
    if "..." in words or words[0].startswith("--"):
        return  # a pattern of a command; flags have tests of their own
    if "--multirun" in words:
        words.remove("--multirun")
        words, _ = sweep(words)[-1]
    config = load_config(words)
    if "resume=true" not in words and config.task["_target_"].endswith("Batch"):
        (tmp_path / "answers.jsonl").unlink()
    check_parts(config)


def test_code_is_python():
    for code in re.findall(r"```python\n(.*?)```", README, re.S):
        compile(code, "README.md", "exec")


def test_yaml_composes(tmp_path):
    """Each file of the chapter on adding one's own, in its place."""
    for name, text in re.findall(r"`(\w+/\w+\.yaml)`[^`]*```yaml\n(.*?)```", README, re.S):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        load_config([f"{file.parent.name}={file.stem}"], config_dir=tmp_path)


def test_the_tree_names_what_there_is():
    tree = README.partition("## Where things are")[2].partition("Reading order")[0]
    parts = set(re.findall(r"^      (\w+(?:/|\.py))", tree, re.M))
    package = ROOT / "mlxgen"
    assert all((package / name).exists() for name in parts)
    assert {f"{folder.parent.name}/" for folder in package.glob("*/__init__.py")} <= parts


def test_linked_files_are_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target

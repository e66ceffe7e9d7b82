"""The git hook prepare-commit-msg, in real repositories on a Mac of stand-ins."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from apps_mac import MACOS, Mac, any_shell

EDITOR = 'cp "$1" "$MAC/seen"; if [ -f "$MAC/typed" ]; then cat "$MAC/typed" "$1" >"$MAC/new"; cp "$MAC/new" "$1"; fi'
COMMENTS = "\n# Please enter the commit message for your changes."


class Repository:
    """A repository with the hook and one commit. The editor keeps what it is shown, and adds `typed` above it."""

    def __init__(self, mac: Mac):
        self.mac, self.folder = mac, mac.home / "my project"
        mac.command("editor", EDITOR)
        mac.env["GIT_EDITOR"] = str(mac.bin / "editor")
        (mac.home / ".gitconfig").write_text("[user]\nname = A\nemail = a@example.org\n")
        mac.run("git", "init", "-q", "--template=", self.folder)
        self.write("kept.txt", "one\ntwo\nthree\n")
        self.commit("-m", "First")
        hook = self.folder / ".git" / "hooks" / "prepare-commit-msg"
        hook.parent.mkdir()
        hook.write_text(f"#!/bin/sh\nexec {mac.shell} '{MACOS / 'prepare-commit-msg'}' \"$@\"\n")
        hook.chmod(0o755)

    def git(self, *words: str | Path) -> CompletedProcess[str]:
        return self.mac.run("git", *words, cwd=self.folder)

    def write(self, name: str, text: str | bytes) -> None:
        (self.folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        self.git("add", "--", name)

    def commit(self, *words: str | Path) -> CompletedProcess[str]:
        return self.git("commit", *words)

    def type(self, text: str) -> None:
        (self.mac.folder / "typed").write_text(text)

    @property
    def seen(self) -> str:
        """What the editor was shown."""
        return (self.mac.folder / "seen").read_bytes().decode()

    @property
    def message(self) -> str:
        return self.git("log", "-1", "--format=%B").stdout.strip()


@pytest.fixture
def repo(mac: Mac) -> Repository:
    return Repository(mac)


@any_shell
def test_the_editor_opens_with_a_proposal_above_the_comments(repo: Repository) -> None:
    repo.mac.answers(' prices to "include" tax.\nAnd more\n')
    repo.write("kept.txt", "one\ntwo\nvier\n")
    result = repo.commit()
    assert result.returncode == 0 and "prepare-commit-msg" not in result.stderr
    assert repo.seen.startswith('Update prices to "include" tax\n' + COMMENTS)
    assert repo.message == 'Update prices to "include" tax'
    assert not list((repo.folder / ".git").glob("*.proposed"))
    (call,) = repo.mac.calls
    assert call.keys == {
        "prompt": "Write a one-line git commit message for these changes.",
        "prefill": 'git commit -m "Update',
        "stop": '["\\n", "\\""]',
        "max_tokens": "32",
        "sampler": "greedy",
        "stats": "false",
    }
    diff = call.text.decode()
    assert " kept.txt | 2 +-\n" in diff and "\n-three\n+vier" in diff


def test_the_model_comes_from_the_environment(repo: Repository) -> None:
    repo.mac.env["MLXGEN_MODEL"] = "/my models/one"
    repo.write("kept.txt", "")
    repo.commit()
    assert repo.mac.calls[0].keys["model"] == "/my models/one"


def change(repo: Repository, kind: str) -> None:
    if "add" in kind:
        repo.write("new.txt", "new")
    if "remove" in kind:
        repo.git("rm", "-q", "kept.txt")
    if "rename" in kind:
        repo.git("mv", "kept.txt", "moved.txt")


@pytest.mark.parametrize(
    ("kind", "verb"), [("add", "Add"), ("remove", "Remove"), ("rename", "Rename"), ("add and remove", "Update")]
)
def test_the_verb_says_what_happened_to_the_files(repo: Repository, kind: str, verb: str) -> None:
    change(repo, kind)
    repo.mac.answers(" it")
    assert repo.commit().returncode == 0
    assert repo.message == f"{verb} it"


def test_the_first_commit_of_a_repository(repo: Repository) -> None:
    repo.git("update-ref", "-d", "HEAD")
    repo.mac.answers(" a file")
    assert repo.commit().returncode == 0 and repo.message == "Add a file"


@pytest.mark.parametrize("words", [["-a"], ["kept.txt"], ["-v"], ["-v", "-a"]])
def test_what_is_described_is_what_will_be_committed(repo: Repository, words: list[str]) -> None:
    repo.mac.answers(" it")
    (repo.folder / "kept.txt").write_text("changed\n")
    if words == ["-v"]:
        repo.git("add", "kept.txt")
    elif words == ["kept.txt"]:
        repo.write("staged-for-later.txt", "later")
    assert repo.commit(*words).returncode == 0
    assert repo.message == "Update it"
    diff = repo.mac.calls[0].text.decode()
    assert "+changed" in diff and "later" not in diff
    assert ("diff --git" in repo.seen) == ("-v" in words)


def prepare_merge(repo: Repository, *how: str) -> None:
    repo.git("checkout", "-q", "-b", "side")
    repo.write("side.txt", "side")
    repo.commit("-m", "Side")
    repo.git("checkout", "-q", "-")
    repo.write("main.txt", "main")
    repo.commit("-m", "Main")
    repo.git("merge", "--no-commit", *how, "side")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "Mine"], "Mine"),
        (["-m", "Mine", "--edit"], "Mine"),
        (["-m", "", "--edit"], "Typed"),
        (["-F", "../mine"], "From a file"),
        (["--amend"], "First"),
        (["-c", "HEAD"], "First"),
        (["--fixup", "HEAD"], "fixup! First"),
        (["-t", "../mine"], "From a file\nand typed"),
    ],
)
def test_a_message_that_exists_is_left_alone(repo: Repository, words: list[str], message: str) -> None:
    (repo.mac.home / "mine").write_text("From a file\n")
    if "-t" in words:
        (repo.mac.home / "mine").write_text("and typed\n")
        repo.type("From a file\n")  # git refuses a template that nobody changed
    if "" in words:
        repo.type("Typed\n")
    repo.write("new.txt", "new")
    assert repo.commit(*words).returncode == 0
    assert repo.message == message and not repo.mac.calls


@pytest.mark.parametrize(("how", "message"), [("--no-ff", "Merge branch 'side'"), ("--squash", "Squashed commit")])
def test_merges_and_squashes_are_left_alone(repo: Repository, how: str, message: str) -> None:
    prepare_merge(repo, how)
    assert repo.commit().returncode == 0
    assert repo.message.startswith(message) and not repo.mac.calls


def test_comments_of_a_template_stay(repo: Repository) -> None:
    (repo.mac.home / "template").write_text("; Why?\n  \n; Which issue?\n")
    repo.git("config", "core.commentChar", ";")
    repo.git("config", "commit.template", str(repo.mac.home / "template"))
    repo.mac.answers(" it")
    repo.write("new.txt", "new")
    assert repo.commit().returncode == 0
    assert repo.seen.startswith("Add it\n; Why?\n  \n; Which issue?\n")
    assert repo.message == "Add it"


def test_an_empty_diff_is_not_described(repo: Repository) -> None:
    repo.type("Nothing\n")
    assert repo.commit("--allow-empty").returncode == 0
    assert repo.message == "Nothing" and not repo.mac.calls


def test_nothing_is_committed_that_nobody_has_seen(repo: Repository) -> None:
    repo.write("new.txt", "new")
    result = repo.commit("--no-edit")
    assert result.returncode != 0 and repo.message == "First" and not repo.mac.calls


@any_shell
@pytest.mark.parametrize("code", [3, 127])
def test_a_failure_stops_no_commit(repo: Repository, code: int) -> None:
    repo.mac.answers(" half an ans", code=code)
    repo.type("Typed\n")
    repo.write("new.txt", "new")
    result = repo.commit()
    assert result.returncode == 0 and repo.message == "Typed"
    assert repo.seen.startswith(COMMENTS)
    assert f"prepare-commit-msg: no proposal: mlxgen ended with code {code}" in result.stderr


def test_an_empty_answer_stops_no_commit(repo: Repository) -> None:
    repo.mac.answers("\n")
    repo.type("Typed\n")
    repo.write("new.txt", "new")
    result = repo.commit()
    assert result.returncode == 0 and repo.message == "Typed" and repo.seen.startswith(COMMENTS)
    assert "no proposal" in result.stderr


@any_shell
@pytest.mark.parametrize("words", [[], ["/nowhere/message"]])
def test_the_hook_itself_never_fails(repo: Repository, words: list[str]) -> None:
    repo.write("new.txt", "new")
    assert repo.mac.script("prepare-commit-msg", *words, cwd=repo.folder).returncode == 0
    assert repo.mac.script("prepare-commit-msg", *words, cwd=repo.mac.home).returncode == 0


@pytest.mark.parametrize("shift", range(2))
def test_a_large_diff_is_cut_to_valid_text(repo: Repository, shift: int) -> None:
    repo.write("große.txt", "x" * shift + "ä" * 10000)
    repo.write("latin.txt", "ä".encode("latin-1"))
    assert repo.commit().returncode == 0
    text = repo.mac.calls[0].text
    assert 5998 <= len(text) <= 6000 and "große.txt" in text.decode()


@pytest.mark.parametrize(
    ("answer", "subject"),
    [
        (" " + "some word " * 20, "Add " + "some word " * 6 + "some"),
        (" \x07bell\tand\x1b[31mred", "Add  bell and [31mred"),
        (" 你好" + "好" * 40, "Add 你好" + "好" * 20),
        ("ed a file", "Added a file"),
        (" `%s` $(false) \\n 'x'", "Add `%s` $(false) \\n 'x'"),
    ],
)
def test_an_answer_becomes_a_subject(repo: Repository, answer: str, subject: str) -> None:
    repo.mac.answers(answer)
    repo.write("new.txt", "new")
    assert repo.commit().returncode == 0
    assert repo.message == subject and len(subject.encode()) <= 72


def test_in_a_linked_worktree(repo: Repository) -> None:
    repo.mac.answers(" it")
    repo.git("worktree", "add", "-q", repo.mac.home / "tree")
    repo.folder = repo.mac.home / "tree"
    repo.write("new.txt", "new")
    assert repo.commit().returncode == 0 and repo.message == "Add it"


def test_with_the_real_command_and_a_model(repo: Repository, tiny_model: Path) -> None:
    repo.mac.real_mlxgen(tiny_model)
    repo.write("cats.txt", "The cat sat on the mat, 你好.\n")
    result = repo.commit()
    assert result.returncode == 0, result.stderr
    assert repo.message.startswith("Add") and "no proposal" not in result.stderr

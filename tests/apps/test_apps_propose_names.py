"""propose-names, on a Mac of stand-ins."""

import re
import string
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from apps_mac import Mac, any_shell
from hypothesis import given, settings
from hypothesis import strategies as st

ABOUT_TEXT = "What is this file about? Answer with a title of 2 to 5 words."
AWKWARD = [
    "two words.txt", "it's \"quoted\".txt", "line\nbreak.txt", "-n.txt", "--yes.txt", "日本 ä.txt",
    "$(false) `x` *.txt", "back\\slash.txt", "end\n", "a -> b.txt", "%s.txt",
]  # fmt: skip


def write(mac: Mac, **files: str | bytes) -> Path:
    """Files in a new folder; two underlines stand for the dot."""
    folder = mac.home / "my files"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def propose(mac: Mac, folder: Path, *words: str) -> CompletedProcess[str]:
    return mac.script("propose-names", *words, cwd=folder)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


ANSWERS = [
    (' "The Birthday Party"\n', "the-birthday-party.txt"),
    ("\n\n Shopping for Saturday: A Day of Love\nmore", "shopping-for-saturday.txt"),
    ("Title: notes.txt\n", "notes.txt"),
    ("`monthly_budget_2024.TXT`", "monthly-budget-2024.txt"),
    ("../../etc/passwd", "etc-passwd.txt"),
    (".hidden -- --yes", "hidden-yes.txt"),
    ("Grüße aus Köln, 你好", "grüße-aus-köln-你好.txt"),
    ("Mia’s “cake” – it's big…", "mias-cake-its-big.txt"),
    ("a\x07b\tc\u200fd\ufffde", "a-b-c-d-e.txt"),
    ("$(touch x); rm *", "touch-x-rm.txt"),
    ("some word " * 20, "-".join(["some", "word"] * 6) + ".txt"),
    ("w" * 70, "w" * 60 + ".txt"),
    ("2024 " + "好" * 40, "2024-" + "好" * 18 + ".txt"),
    ("好" * 40, "好" * 20 + ".txt"),
    ("", None),
    ("...///---", None),
    ("F16", None),
]


@any_shell
def test_an_answer_becomes_a_name(mac: Mac) -> None:
    names = [f"f{i}.txt" for i in range(len(ANSWERS))]
    folder = write(mac, **{name.replace(".", "__"): name for name in names})
    for i, (answer, _) in enumerate(ANSWERS):
        mac.answers(answer, call=i + 1)
    result = propose(mac, folder, "--yes", *names)
    expected = {old: new for old, (_, new) in zip(names, ANSWERS, strict=True)}
    assert result.returncode == 0
    assert contents(folder) == {new or old: old for old, new in expected.items()}
    changed = [f"{old} -> {new}" for old, new in expected.items() if new]
    assert result.stdout.splitlines() == [f"{i + 1}. {line}" for i, line in enumerate(changed)]
    kept = [f"propose-names: {old} keeps its name" for old, new in expected.items() if not new]
    assert result.stderr.splitlines() == kept and len(kept) == 3


@settings(max_examples=5, deadline=None)
@given(st.lists(st.text(max_size=90).filter(lambda t: "\0" not in t), min_size=6, max_size=6))
def test_any_answer_gives_a_decent_name_and_loses_nothing(answers: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        mac = Mac(Path(temporary) / "mac")
        names = [f"f{i}__md" for i in range(len(answers))]
        folder = write(mac, **{name: name for name in names})
        for i, answer in enumerate(answers):
            mac.answers(answer.encode(errors="replace").decode(), call=i + 1)
        assert propose(mac, folder, "--yes", *(name.replace("__", ".") for name in names)).returncode == 0
        after = contents(folder)
    assert sorted(after.values()) == names
    for name in after:
        assert re.fullmatch(r"[^-./][^/\x00-\x20]*\.md", name) and len(name.encode()) <= 66
        assert not set(name[:-3]) & set(string.punctuation) - {"-"} and name[:-3] == name[:-3].strip("-")


def test_what_the_model_is_asked(mac: Mac) -> None:
    mac.env["MLXGEN_MODEL"] = "/my models/one"
    folder = write(mac, a__txt="Grüße\n" + "x" * 5000)
    assert propose(mac, folder, "--dry-run", "a.txt").returncode == 0
    (call,) = mac.calls
    assert call.keys == {
        "model": "/my models/one",
        "prompt": ABOUT_TEXT,
        "prefill": "Title:",
        "stop": '["\\n"]',
        "max_tokens": "24",
        "sampler": "greedy",
        "stats": "false",
    }
    assert call.text == b"Gr\xc3\xbc\xc3\x9fe\n" + b"x" * (3000 - 8)


def test_what_is_known_of_each_kind_of_file(mac: Mac) -> None:
    folder = write(
        mac,
        latin__txt="Grüße aus Köln\n".encode("latin-1") * 5,
        wide__txt="Grüße aus Köln\n".encode("utf-16"),
        cut__txt=b"x" * 2999 + "ä".encode(),
        picture__pdf=b"\0\1\2\3",
        empty__txt="",
        letter__docx=b"\0PK",
    )
    (folder / "trip").mkdir()
    for name in ("boarding-pass.pdf", "hotel.pdf", ".hidden"):
        (folder / "trip" / name).touch()
    names = ["latin.txt", "wide.txt", "cut.txt", "letter.docx", "picture.pdf", "empty.txt", "trip/"]
    assert propose(mac, folder, "--dry-run", *names).returncode == 0
    asked = dict(zip(names, mac.calls, strict=True))
    texts = {name: call.text.decode().lstrip("\ufeff") for name, call in asked.items()}
    assert texts["latin.txt"] == "\n".join(["Grüße aus Köln"] * 5)
    assert texts["wide.txt"] == "Grüße aus Köln"
    assert texts["cut.txt"] == "x" * 2999
    assert texts["letter.docx"] == "The text of a document."
    facts = "Created: 2024-02-02 08:10:41 +0000\nKind: PDF document\n"
    assert texts["picture.pdf"] == f"Name: picture.pdf\n{facts}"
    assert texts["empty.txt"] == f"Name: empty.txt\n{facts}"
    assert texts["trip/"] == "Name: trip\nKind: folder with boarding-pass.pdf, hotel.pdf, \n"
    prompts = [call.keys["prompt"] for call in asked.values()]
    assert prompts == [ABOUT_TEXT] * 4 + ["Describe this file in 2 to 5 words."] * 3


@pytest.mark.skipif(sys.platform == "darwin", reason="there is always an mdls on a Mac")
def test_without_mdls_the_kind_comes_from_file(mac: Mac) -> None:
    (mac.bin / "mdls").unlink()
    folder = write(mac, picture__pdf=b"\0\1\2\3")
    assert propose(mac, folder, "--dry-run", "picture.pdf").returncode == 0
    assert mac.calls[0].text.decode().startswith("Name: picture.pdf\nKind: data")


@pytest.mark.parametrize(("mac", "absolute"), [("sh", False), ("bash --posix", True)], indirect=["mac"])
def test_awkward_names_are_taken_as_they_are(mac: Mac, absolute: bool) -> None:
    folder = write(mac)
    for i, name in enumerate(AWKWARD):
        (folder / name).write_text(name)
        mac.answers(f"Number {i}", call=i + 1)
    words = [str(folder / name) if absolute else name for name in AWKWARD]
    result = propose(mac, folder, "--yes", "--", *words)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == len(AWKWARD)
    ends = ["" if name == "end\n" else ".txt" for name in AWKWARD]
    assert contents(folder) == {f"number-{i}{ends[i]}": name for i, name in enumerate(AWKWARD)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("photos.tar.gz", "plan.tar.gz"),
        ("A.JPEG", "plan.JPEG"),
        ("Mr. Smith letter", "plan"),
        ("v1.2 final, really", "plan"),
        ("README", "plan"),
        ("note.", "plan"),
    ],
)
def test_the_extension_stays(mac: Mac, old: str, new: str) -> None:
    mac.answers("plan")
    folder = write(mac, **{old.replace(".", "__"): "text"})
    assert propose(mac, folder, "--yes", old).returncode == 0
    assert contents(folder) == {new: "text"}


@any_shell
def test_nothing_is_ever_overwritten(mac: Mac) -> None:
    mac.answers("Plan")
    folder = write(mac, plan__txt="0", a__txt="1", b__txt="2", c__TXT="3", d__md="4")
    (folder / "plan-2.txt").symlink_to("nowhere")
    names = ["a.txt", "b.txt", "c.TXT", "d.md"]
    result = propose(mac, folder, "--yes", *names)
    assert result.returncode == 0
    (folder / "plan-2.txt").unlink()
    # plan-5.TXT: where capitals do not count, plan-3.txt and plan-4.txt are in its way
    expected = {"plan.txt": "0", "plan-3.txt": "1", "plan-4.txt": "2", "plan.TXT": "3", "plan.md": "4"}
    if (folder / "PLAN.md").exists():
        expected["plan-5.TXT"] = expected.pop("plan.TXT")
    assert contents(folder) == expected


def test_a_good_name_is_kept(mac: Mac) -> None:
    mac.answers("Plan")
    folder = write(mac, Plan__txt="0", **{"plan-2__md": "1"}, plan__md="2")
    result = propose(mac, folder, "--yes", "Plan.txt", "plan-2.md")
    assert (result.returncode, result.stdout) == (0, "")
    assert contents(folder) == {"Plan.txt": "0", "plan-2.md": "1", "plan.md": "2"}


def test_what_cannot_be_renamed_is_said_and_the_others_go_on(mac: Mac) -> None:
    folder = write(mac, a__txt="1", __profile="2")
    result = propose(mac, folder, "--yes", "gone.txt", ".profile", "/", "a.txt")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "propose-names: ./gone.txt is missing or cannot be read",
        "propose-names: ./.profile is hidden, or no file to rename: left alone",
        "propose-names: / is hidden, or no file to rename: left alone",
    ]
    assert contents(folder) == {"an-answer.txt": "1", ".profile": "2"}


def test_a_person_chooses_from_the_list(mac: Mac) -> None:
    names = [f"f{i}" for i in range(11)]
    folder = write(mac, **{name: name for name in names})
    lines = [f"{i + 1}. f{i} -> an-answer{f'-{i + 1}' if i else ''}\n" for i in range(len(names))]
    (mac.folder / "choice").write_text(lines[1] + lines[10])
    result = propose(mac, folder, *names)
    assert (result.returncode, result.stdout, result.stderr) == (0, "".join(lines), "")
    assert mac.dialogs[-1] + "\n" == result.stdout
    kept = {name: name for name in names if name not in ("f1", "f10")}
    assert contents(folder) == kept | {"an-answer-2": "f1", "an-answer-11": "f10"}


def test_cancel_renames_nothing_and_is_no_error(mac: Mac) -> None:
    folder = write(mac, a__txt="1")
    (mac.folder / "choice").write_text("\n")
    assert propose(mac, folder, "a.txt").returncode == 0
    assert contents(folder) == {"a.txt": "1"}


def test_where_nobody_can_be_asked_nothing_is_renamed(mac: Mac) -> None:
    folder = write(mac, a__txt="1")
    (mac.folder / "osascript-code").write_text("1")
    result = propose(mac, folder, "a.txt")
    assert result.returncode == 2 and "--yes renames" in result.stderr
    assert contents(folder) == {"a.txt": "1"}


def test_a_file_that_appears_in_the_meantime_is_not_overwritten(mac: Mac) -> None:
    folder = write(mac, a__txt="1")
    (mac.folder / "meanwhile").write_text("printf new >an-answer.txt")
    result = propose(mac, folder, "a.txt")
    assert result.returncode == 1 and "a.txt could not be renamed" in result.stderr
    assert contents(folder) == {"a.txt": "1", "an-answer.txt": "new"}


def test_dry_run_only_shows(mac: Mac) -> None:
    folder = write(mac, a__txt="1")
    result = propose(mac, folder, "--dry-run", "a.txt")
    assert (result.returncode, result.stdout) == (0, "1. a.txt -> an-answer.txt\n")
    assert contents(folder) == {"a.txt": "1"} and not mac.dialogs


@pytest.mark.parametrize("code", [3, 127])
def test_a_failure_of_mlxgen_renames_nothing(mac: Mac, code: int) -> None:
    mac.answers("half an ans", code=code)
    folder = write(mac, a__txt="1", b__txt="2")
    assert propose(mac, folder, "--yes", "a.txt", "b.txt").returncode == code
    assert contents(folder) == {"a.txt": "1", "b.txt": "2"} and len(mac.calls) == 1


@pytest.mark.parametrize("words", [[], ["--yes"], ["--no", "a.txt"], ["--"]])
def test_usage(mac: Mac, words: list[str]) -> None:
    result = propose(mac, write(mac, a__txt="1"), *words)
    assert result.returncode == 2 and result.stderr and not mac.calls


def test_with_the_real_command_and_a_model(tmp_path: Path, tiny_model: Path) -> None:
    mac = Mac(tmp_path / "mac")
    mac.real_mlxgen(tiny_model)
    folder = write(mac, a__txt="The cat sat on the mat, 你好.", picture__pdf=b"\0\1\2\3")
    result = propose(mac, folder, "--yes", "a.txt", "picture.pdf")
    assert result.returncode == 0, result.stderr
    assert sorted(path.suffix for path in folder.iterdir()) == [".pdf", ".txt"]
    assert result.stdout.count(" -> ") + result.stderr.count("keeps its name") == 2

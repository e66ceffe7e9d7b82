"""summarize-clipboard, on a Mac of stand-ins."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from apps_mac import Mac, any_shell

LIMIT = 16000


def summarize(mac: Mac, text: str | bytes) -> CompletedProcess[str]:
    (mac.folder / "clipboard").write_bytes(text if isinstance(text, bytes) else text.encode())
    return mac.script("summarize-clipboard")


@any_shell
@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("A long story.\n\nIts end.", "A story."),
        ("Zażółć gęślą jaźń 你好 🙂", "Grüße: “你好” 🙂"),
        ("-n %s \\n $(false) `false` \"'", "-e %d \\t $HOME \"'\nsecond line"),
    ],
)
def test_the_summary_takes_the_place_of_the_text(mac: Mac, text: str, summary: str) -> None:
    mac.answers(f"\n \n{summary}\n")
    result = summarize(mac, text)
    assert (result.returncode, result.stdout, result.stderr) == (0, summary + "\n", "")
    assert mac.clipboard.decode() == summary
    assert mac.dialogs[-2:] == ["Clipboard summary", summary]
    (call,) = mac.calls
    assert call.text.decode() == text
    assert call.keys == {
        "prompt": "Summarize the following text in 3 short sentences. Answer with the summary only.",
        "max_tokens": "256",
        "sampler": "precise",
        "stats": "false",
        "+tokenizer.template_args.enable_thinking": "false",
    }


@any_shell
def test_options_come_from_the_environment(mac: Mac) -> None:
    mac.env |= {
        "MLXGEN_MODEL": "/my models/one",
        "MLXGEN_SUMMARY_LENGTH": "one sentence",
        "MLXGEN_SUMMARY_LANGUAGE": "German",
    }
    assert summarize(mac, "text").returncode == 0
    keys = mac.calls[0].keys
    assert keys["model"] == "/my models/one"
    assert keys["prompt"] == (
        "Summarize the following text in one sentence. Write in German. Answer with the summary only."
    )


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_a_clipboard_without_text_is_said(mac: Mac, text: str) -> None:
    result = summarize(mac, text)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "summarize-clipboard: The clipboard holds no text.\n"
    assert mac.dialogs[-1] == "The clipboard holds no text."
    assert mac.clipboard.decode() == text and not mac.calls


@any_shell
@pytest.mark.parametrize("code", [3, 130])
def test_a_failure_leaves_the_clipboard(mac: Mac, code: int) -> None:
    mac.answers("Half of an ans", code=code)
    result = summarize(mac, "text\n")
    assert (result.returncode, result.stdout) == (code, "")
    assert f"mlxgen ended with code {code}" in result.stderr and "as it was" in mac.dialogs[-1]
    assert mac.clipboard == b"text\n"


def test_without_mlxgen_the_clipboard_stays(mac: Mac) -> None:
    mac.command("mlxgen", "exit 127")  # what a shell says of a command that it does not find
    result = summarize(mac, "text")
    assert result.returncode == 127 and "No summary" in result.stderr
    assert mac.clipboard == b"text"


def test_an_empty_answer_leaves_the_clipboard(mac: Mac) -> None:
    mac.answers(" \n")
    result = summarize(mac, "text")
    assert (result.returncode, result.stdout) == (1, "")
    assert "no summary" in result.stderr and mac.clipboard == b"text"


@pytest.mark.parametrize("shift", range(4))
def test_a_long_text_is_cut_between_characters_and_that_is_said(mac: Mac, shift: int) -> None:
    text = "x" * shift + "🙂" * 5000
    result = summarize(mac, text)
    assert result.returncode == 0 and f"only the first {LIMIT} bytes" in result.stderr
    seen = mac.calls[0].text
    assert text.startswith(seen.decode()) and LIMIT - 4 < len(seen) <= LIMIT


def test_notifications_are_not_needed(mac: Mac) -> None:
    (mac.folder / "osascript-code").write_text("1")
    result = summarize(mac, "text")
    assert (result.returncode, result.stderr) == (0, "") and mac.clipboard == b"An answer"


def test_with_the_real_command_and_a_model(tmp_path: Path, tiny_model: Path) -> None:
    mac = Mac(tmp_path / "mac")
    mac.real_mlxgen(tiny_model)
    result = summarize(mac, "The cat sat on the mat, 你好.")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and mac.clipboard.decode() == result.stdout.rstrip("\n")

"""A conversation: from a pipe, in a terminal, and what Ctrl-C does to it."""

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import mlxgen
from mlxgen.testing.checkpoints import write_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chat(cli, tiny_checkpoint):
    def run(lines, *words):
        ran = cli("chat", f"model={tiny_checkpoint}", "max_tokens=5", "output=json", *words, stdin=lines.encode())
        return ran, [json.loads(line) for line in ran.out.splitlines()]

    return run


# -- from a pipe


def test_every_line_is_a_turn_and_the_cache_is_kept(chat):
    ran, answers = chat("Hi\n\nAnd then?\n")
    assert (ran.code, ran.err, len(answers)) == (0, "", 2)
    first, second = answers
    assert first["stats"]["cached_tokens"] == 0
    # All of the first turn; of its answer as much as reads the same again (this model speaks broken UTF-8).
    assert second["stats"]["cached_tokens"] >= first["prompt_tokens"]
    assert second["prompt_tokens"] > second["stats"]["cached_tokens"]


def test_the_cache_changes_nothing_about_the_answers(chat, tiny_checkpoint):
    _, answers = chat("Hi\nAnd then?\n")
    pipe = mlxgen.load(f"model={tiny_checkpoint}", "max_tokens=5")
    messages = []
    for said, answer in zip(["Hi", "And then?"], answers, strict=True):
        messages.append({"role": "user", "content": said})
        assert pipe.generate(messages).tokens == answer["tokens"]
        messages.append({"role": "assistant", "content": answer["text"]})


def test_the_prompt_is_the_first_turn(chat):
    texts = [answer["text"] for answer in chat("And then?\n", "prompt=Hi")[1]]
    assert texts == [answer["text"] for answer in chat("Hi\nAnd then?\n")[1]]


def test_reset_starts_anew_and_exit_ends(chat):
    ran, answers = chat("Hi\n/reset\nHi\n/exit\nnever\n")
    assert ran.code == 0 and "A new conversation." in ran.err
    assert len(answers) == 2 and answers[0]["tokens"] == answers[1]["tokens"]
    assert answers[1]["stats"]["cached_tokens"] == 0


def test_an_unknown_command_is_not_said_to_the_model(chat):
    ran, answers = chat("/foo\n/help\nwhat is /etc for?\n")
    assert len(answers) == 1
    assert ran.err.splitlines()[0].startswith("/foo is not a command. /reset starts anew")
    assert ran.err.splitlines()[1].startswith("/reset starts anew")


def test_a_turn_that_is_too_long_leaves_the_conversation_as_it_was(chat):
    ran, answers = chat(f"Hi\n{'very long ' * 300}\nAnd then?\n")
    assert ran.code == 2  # a script is told
    assert re.fullmatch(r"mlxgen: `prompt` must fit into a context of 512 tokens, but has \d+; .*\n", ran.err)
    assert [a["text"] for a in answers] == [a["text"] for a in chat("Hi\nAnd then?\n")[1]]


def test_bytes_that_are_no_utf8_end_it(cli, tiny_checkpoint):
    ran = cli("chat", f"model={tiny_checkpoint}", "max_tokens=2", stdin=b"Hi\nab\xff\n")
    assert ran.code == 2 and ran.err == "mlxgen: standard input must be UTF-8, but byte 2 is 0xff; convert it first.\n"


# -- in Python


@pytest.fixture(scope="module")
def pipe(tiny_checkpoint):
    return mlxgen.load(f"model={tiny_checkpoint}", "max_tokens=8")


@pytest.fixture
def conversation(pipe):
    return pipe.chat()


def test_a_conversation_remembers_both_sides(conversation):
    answer = conversation("Hi")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
    assert conversation.messages[1]["content"] == answer.text == str(answer)
    conversation.reset()
    assert conversation.messages == [] and conversation("Hi").tokens == answer.tokens


def test_the_beginning_that_was_given_belongs_to_the_answer(pipe):
    talk = pipe.chat(prefill="Well, ", max_tokens=3)
    assert talk("Hi").text != "" and talk.messages[1]["content"].startswith("Well, ")


def test_a_turn_that_fails_leaves_no_trace(conversation):
    conversation("Hi")
    before = list(conversation.messages)
    with pytest.raises(mlxgen.RequestError):
        conversation("long " * 600)
    assert conversation.messages == before


def test_an_answer_that_is_left_early_leaves_no_trace_but_is_no_harm(conversation):
    expected = conversation("Hi").tokens
    conversation.reset()
    stream = conversation.stream("Hi")
    next(stream)
    stream.close()
    assert conversation.messages == []
    assert conversation("Hi").tokens == expected


@pytest.mark.parametrize("after", range(1, 4))
def test_an_interrupted_answer_is_kept_as_far_as_it_came(conversation, after):
    expected = conversation("Hi").tokens
    conversation.reset()
    stream = conversation.stream("Hi")
    for _ in range(after):
        next(stream)
    last = stream.throw(KeyboardInterrupt())
    assert last.completion.finish_reason == "interrupted"
    assert last.completion.tokens == expected[:after]
    assert list(stream) == []
    assert conversation.messages[1]["content"] == last.completion.text
    assert conversation("And then?").stats.cached_tokens > 0


# -- in a terminal


class Terminal:
    """A command in a pseudo-terminal: type into it, and wait for what it shows."""

    def __init__(self, *command):
        self.screen = ""
        ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )  # fmt: skip
        os.close(theirs)
        self.fd = ours

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, pattern, timeout=20):
        """Everything up to the first place where the pattern fits; it is taken off the screen."""
        deadline = time.monotonic() + timeout
        while (found := re.search(pattern, self.screen)) is None:
            assert self._read(deadline), f"{pattern!r} is not in {self.screen!r}"
        shown, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return shown

    def end(self, timeout=20):
        """Read the rest; returns the exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return self.process.wait(timeout=20)

    def _read(self, deadline):
        """What has come, onto the screen; false when the other side has gone."""
        assert time.monotonic() < deadline, f"timeout after {self.screen!r}"
        if select.select([self.fd], [], [], 0.1)[0]:
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                return False
            if not data:
                return False
            self.screen += data.decode(errors="replace").replace("\r\n", "\n")
        return True


BEGUN = r"reading the prompt \.\.\.\r\x1b\[K.*\S"  # the remark has gone, the answer has begun


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("talkative"), max_position_embeddings=10**6)


@pytest.fixture
def terminal(talkative):
    opened = []

    def start(*words):
        command = [
            sys.executable,
            "-m",
            "mlxgen",
            "chat",
            f"model={talkative}",
            "sampler.logit_bias={1: -inf, 3: -inf}",
        ]
        opened.append(Terminal(*command, *words))
        return opened[-1]

    yield start
    for each in opened:
        each.process.kill()
        each.process.wait()
        os.close(each.fd)


def test_a_session_in_a_terminal(terminal):
    screen = terminal("max_tokens=100000", "prompt=First things first")
    assert "/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer." in screen.wait_for(
        "> First things first\n"
    )
    screen.wait_for(BEGUN)
    screen.type("\x03")  # in the middle of an endless answer
    stats = screen.wait_for(r"· interrupted")
    assert re.search(r"\d+ prompt tokens, \d+ tok/s, first \d\.\d\d s · \d+ tokens, ", stats)
    screen.wait_for("\n> ")
    screen.type("And then?\n")
    screen.wait_for(BEGUN)
    screen.type("\x03")
    assert "cached)" in screen.wait_for(r"· interrupted")
    screen.wait_for("\n> ")
    screen.type("/reset\n")
    screen.wait_for("A new conversation.")
    screen.wait_for("\n> ")
    screen.type("\x04")
    assert screen.end() == 0
    assert "Traceback" not in screen.screen


def test_ctrl_c_at_the_prompt_ends(terminal):
    screen = terminal()
    screen.wait_for("\n> ")
    time.sleep(0.3)  # until it waits for a key
    screen.type("\x03")
    assert screen.end() == 130
    assert "Traceback" not in screen.screen

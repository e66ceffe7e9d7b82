"""Text from tokens: stop strings wherever token borders fall, and nothing lost or repeated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.engine import TextAssembler
from mlxgen.errors import ConfigError


class Pieces:
    """A text stream whose token i is the i-th piece."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token):
        return self.pieces[token]

    def finish(self):
        return ""


def assemble(pieces, stop, **options):
    assembler, out = TextAssembler(Pieces(pieces), stop, **options), []
    for token in range(len(pieces)):
        out.append(assembler.push(token))
        if assembler.stopped:
            return "".join(out), token, True
    return "".join(out) + assembler.finish(), len(pieces) - 1, assembler.stopped


def test_a_stop_string_across_token_borders():
    text, last, stopped = assemble([" cat"] * 20, ["t c"])
    assert (text, stopped) == (" ca", True)
    assert last == 1  # within one token of the match


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=3), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_any_cutting_gives_the_same_text(pieces, stop):
    whole = "".join(pieces)
    starts = [whole.find(s) for s in stop if s in whole]
    text, _, stopped = assemble(pieces, stop)
    assert text == (whole[: min(starts)] if starts else whole)
    assert stopped == bool(starts)


def test_empty_stop_strings_are_ignored_and_others_refused():
    assert assemble(["a", "b"], [""]) == ("ab", 1, False)
    with pytest.raises(ConfigError, match="`stop` must be texts"):
        TextAssembler(Pieces([]), [3])


def test_hidden_reasoning_does_not_stop_the_answer():
    pieces = ["<th", "ink>Question: x</thi", "nk>ans", "wer Question: y"]
    assert assemble(pieces, ["Question:"])[0] == "<think>Question: x</think>answer "
    assert assemble(pieces, ["Question:"], stop_in_thinking=True)[0] == "<think>"

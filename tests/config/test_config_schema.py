"""From plain data to typed dataclasses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxgen.errors import ConfigError, require
from mlxgen.schema import convert, parse


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    name: str = "x"

    def __post_init__(self):
        require(self.rate > 0, "rate", "above 0", self.rate)


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    size: int
    rate_of_inner: str = ""
    kind: Literal["a", "b"] = "a"
    both: bool | Literal["auto"] = "auto"
    texts: tuple[str, ...] | str | None = ()
    items: list[Inner] = field(default_factory=list)
    path: Path | None = None
    table: Mapping[str, float] = field(default_factory=dict)
    numbers: Sequence[int] = ()
    anything: Any = None


def outer(**values):
    return parse(Outer, {"inner": {"rate": 1}, "size": 2, **values}, "run")


def refusal(**values):
    with pytest.raises(ConfigError) as error:
        outer(**values)
    return str(error.value)


def test_values_arrive_with_the_types_of_the_fields():
    got = outer(texts=["a"], items=[{"rate": 3}], path="~/x", table={1: 2}, numbers=[1, 2.0], kind="b")
    assert got.inner == Inner(rate=1.0) and isinstance(got.inner.rate, float)
    assert got.texts == ("a",) and got.items == [Inner(rate=3.0)]
    assert got.path == Path.home() / "x" and got.table == {"1": 2.0}
    assert got.numbers == (1, 2)
    assert outer(texts="a").texts == "a" and outer(texts=None).texts is None
    assert outer(both=True).both is True and outer(both="auto").both == "auto"


@pytest.mark.parametrize(
    "values, message",
    [
        ({"size": "2"}, "`run.size` must be an integer, but is '2'."),
        ({"size": True}, "`run.size` must be an integer, but is True."),
        ({"size": 2.5}, "`run.size` must be an integer, but is 2.5."),
        ({"size": float("inf")}, "`run.size` must be an integer, but is inf."),
        ({"size": float("nan")}, "`run.size` must be an integer, but is nan."),
        ({"size": None}, "`run.size` must be an integer, but is None."),
        ({"inner": {"rate": "high"}}, "`run.inner.rate` must be a number, but is 'high'."),
        ({"inner": {"rate": True}}, "`run.inner.rate` must be a number, but is True."),
        ({"inner": {"rate": 10**400}}, f"`run.inner.rate` must be a number, but is {10**400}."),
        ({"inner": {"rate": -1}}, "`run.inner.rate` must be above 0, but is -1.0."),
        ({"inner": {"rate": 1, "nmae": "y"}}, "`run.inner.nmae` is not a key. Did you mean `name`?"),
        ({"inner": {"rate": 1, "zzz": "y"}}, "`run.inner.zzz` is not a key; known here: name, rate."),
        ({"inner": {"rate": 1, "name": 5}}, "`run.inner.name` must be text, but is 5. Write 5 in quotes."),
        ({"inner": {}}, "`run.inner.rate` must be given."),
        ({"inner": 5}, "`run.inner` must be a mapping with rate, name, but is 5."),
        ({"kind": "c"}, "`run.kind` must be one of a, b, but is 'c'."),
        ({"both": "never"}, "`run.both` must be true or false or auto, but is 'never'."),
        ({"texts": 5}, "`run.texts` must be a list or text, but is 5."),
        ({"texts": ["a", 5]}, "`run.texts[1]` must be text, but is 5. Write 5 in quotes."),
        ({"items": [{"rate": 1}, {"rate": 0}]}, "`run.items[1].rate` must be above 0, but is 0.0."),
        ({"path": 5}, "`run.path` must be a path, but is 5."),
        ({"table": []}, "`run.table` must be a mapping, but is []."),
        ({"table": {"x": "y"}}, "`run.table.x` must be a number, but is 'y'."),
    ],
)
def test_every_refusal_names_path_rule_and_value(values, message):
    assert refusal(**values) == message


def test_all_missing_keys_are_named_at_once():
    with pytest.raises(ConfigError, match=r"^`inner`, `size` must be given\.$"):
        parse(Outer, {}, "")


EXACT = st.integers(-(2**53), 2**53)  # those that a float holds exactly


@given(EXACT)
def test_integers_become_floats_and_whole_floats_integers(n):
    assert convert(float, n, "x") == float(n)
    assert convert(int, float(n), "x") == n


@given(st.one_of(st.none(), st.booleans(), EXACT, st.text(), st.lists(EXACT)))
def test_a_conversion_changes_no_value_or_refuses(value):
    for kind in (int, float, str, bool, tuple[int, ...], str | None, Literal["a"], Any):
        try:
            converted = convert(kind, value, "x")
        except ConfigError as error:
            assert str(error).startswith("`x")
        else:
            assert converted == (tuple(value) if isinstance(value, list) and kind is not Any else value)

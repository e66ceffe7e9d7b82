"""YAML is read and written in one way, whoever reads it."""

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mlxgen.yaml_text import read_yaml, write_yaml

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
    # Text that one reader or another takes for a number, a date or a truth value.
    st.sampled_from(
        ["1e-5", "1_000", "0x1F", "1:30", "2024-01-01", "yes", "on", "null", "~", ".5", "1.", "=", "<<", "!x"]
    ),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
)


@pytest.mark.parametrize("text", ["1e-5", "1E5", "-2e3", "1.5e-3", "1e+5", "+1e-5"])
def test_what_looks_like_a_float_is_one(text):
    value = read_yaml(f"learning_rate: {text}")["learning_rate"]
    assert isinstance(value, float) and value == float(text)
    assert OmegaConf.create(f"learning_rate: {text}").learning_rate == value


@pytest.mark.parametrize("text, value", [("2024-01-01", "2024-01-01"), ("'1e-5'", "1e-5"), ("e5", "e5"), ("3", 3)])
def test_what_does_not_stays_what_it_is(text, value):
    assert read_yaml(text) == value and type(read_yaml(text)) is type(value)


def test_infinity_and_no_number():
    assert read_yaml(".inf") == math.inf and read_yaml("-.inf") == -math.inf and math.isnan(read_yaml(".nan"))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), TREES, max_size=4))
def test_what_is_written_reads_the_same_for_us_and_for_plain_pyyaml(data):
    text = write_yaml(data)
    for read in (read_yaml(text), yaml.safe_load(text)):
        assert read == data
        assert repr(read) == repr(data)  # 1 is not 1.0 is not True


@settings(max_examples=50, deadline=None)
@given(SCALARS.filter(lambda value: not isinstance(value, str) or "${" not in value))
def test_what_is_written_reads_the_same_for_omegaconf(value):
    assert repr(OmegaConf.to_container(OmegaConf.create(write_yaml({"x": value})))) == repr({"x": value})


def test_reading_leaves_other_readers_alone():
    assert yaml.safe_load("1e-5") == "1e-5"


@pytest.mark.parametrize("text", ["a: [1", "!!python/object/apply:os.getcwd []"])
def test_what_is_not_plain_yaml_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)

"""`_target_` builds trusted parts only, and says in one line what was wrong with one."""

import sys

import pytest

from mlxgen.build import build
from mlxgen.cache import Window
from mlxgen.errors import ConfigError

PARTS = """
from dataclasses import dataclass
from os import system
from functools import partial

alias = partial(print)

@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = 1

    def __post_init__(self):
        if self.size > 9:
            raise ValueError("size must be below 10")

class Plain:
    def __init__(self, size, *, name="x", **rest):
        self.size, self.name, self.rest = size, name, rest

def make(a, b=2, *more):
    return (a, b)
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A package of the user's own on the search path: my_parts, my_parts.broken, my_parts.needy."""
    folder = tmp_path / "my_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text(PARTS)
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "needy.py").write_text("import a_package_that_is_not_here\n")
    (folder / "angry.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_parts"
    for name in [name for name in sys.modules if name.split(".")[0] == "my_parts"]:
        del sys.modules[name]


def refusal(node, trust=()):
    with pytest.raises(ConfigError) as error:
        build(node, "cache", trust)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_part_of_our_own():
    assert build({"_target_": "mlxgen.cache.Window", "size": 8}, "cache") == Window(size=8)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.run",
        "posix.system",
        "my_parts.Part",
        "eval",
        "mlxgen",
        "mlxgenx.cache.Window",
        "mlxgen.config.os.system",
        "mlxgen.config.folders.os.system",
        "mlxgen.config.folders.os",
        "mlxgen.cache.require",
        # Functions of our own that would run what a stranger names.
        "mlxgen.build.build",
        "mlxgen.cli.main",
        "mlxgen.load",
        "mlxgen.loading.load_model",
        "mlxgen.build.importlib.import_module",
        "mlxgen.build.Any",
        "mlxgen.errors.ConfigError",
        "",
        ".",
        "..os.system",
    ],
)
def test_targets_that_a_stranger_may_not_name(target, parts):
    node = {"_target_": target, "node": {"_target_": "posix.system", "command": "true"}, "trust": ["posix"]}
    assert refusal(node).startswith("`cache")


def test_a_trusted_package_may_be_named_but_not_what_it_imports(parts):
    assert build({"_target_": "my_parts.make", "a": 1}, "x", [parts]) == (1, 2)
    assert build({"_target_": "my_parts.Part", "size": 3}, "x", [parts]).size == 3
    assert build({"_target_": "my_parts.Plain", "size": 3, "more": 4}, "x", [parts]).rest == {"more": 4}
    for target in ("my_parts.system", "my_parts.partial", "my_parts.alias", "my_parts.dataclass"):
        assert "must name a class or function of my_parts itself" in refusal({"_target_": target}, [parts])
    # Trust in one package opens nothing in mlxgen.
    assert "must name a dataclass of mlxgen" in refusal({"_target_": "mlxgen.build.build"}, [parts])


def test_what_is_not_trusted_says_how_to_trust_it(parts):
    assert refusal({"_target_": "my_parts.Part"}) == (
        "`cache._target_` must be in a trusted package (mlxgen), but is 'my_parts.Part'. "
        "If you trust it, add trust=[my_parts] to the command line."
    )


@pytest.mark.parametrize(
    "node, message",
    [
        ({"_target_": "my_parts.broken.f"}, "`cache._target_`: importing my_parts.broken failed with SyntaxError:"),
        (
            {"_target_": "my_parts.needy.f"},
            "importing my_parts.needy failed with ModuleNotFoundError: No module named 'a_package_that_is_not_here'. "
            "Install it, or set PYTHONPATH.",
        ),
        ({"_target_": "my_parts.angry.f"}, "importing my_parts.angry failed with RuntimeError: not today."),
        ({"_target_": "my_parts.Part", "size": 10}, "`cache` could not be built: ValueError: size must be below 10"),
        ({"_target_": "my_parts.Plain"}, "`cache.size` must be given."),
        ({"_target_": "my_parts.make", "c": 1}, "`cache.c` is not a key; known here: a, b."),
        ({"_target_": "my_parts.Part", "siz": 1}, "`cache.siz` is not a key. Did you mean `size`?"),
        ({"_target_": "my_parts.Prat"}, "my_parts has no 'Prat'. Did you mean `Part`?"),
        ({"_target_": 3}, "`cache` must name a part with `_target_`, but has 3."),
        ({}, "`cache` must name a part with `_target_`, but has None."),
        ({"_target_": "mlxgen.cache.Window", "size": "x"}, "`cache.size` must be an integer, but is 'x'."),
        ({"_target_": "mlxgen.cache.Window", "size": 1}, "`cache.size` must be at least 2, but is 1."),
        ({"_target_": "mlxgen.cache.Windw"}, "mlxgen.cache has no 'Windw'. Did you mean `Window`?"),
        ({"_target_": "mlxgen.no_such.Part"}, "importing mlxgen.no_such failed with ModuleNotFoundError"),
    ],
)
def test_the_cause_and_the_key_path_are_in_the_message(parts, node, message):
    assert message in refusal(node, [parts])


def test_the_original_error_stays_attached(parts):
    with pytest.raises(ConfigError) as error:
        build({"_target_": "my_parts.Part", "size": 10}, "cache", [parts])
    assert isinstance(error.value.__cause__, ValueError)

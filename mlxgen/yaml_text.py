"""Reading and writing YAML the way OmegaConf reads it: `1e-5` is a number, a date is text.

Plain PyYAML, by YAML 1.1, takes `1e-5` for text and a date for an object. What is written here is read the
same by both.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
        |\.[0-9_]+(?:[eE][-+][0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader of our own, so that nobody else's YAML is read differently."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that either reader would take for something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Line breaks of any kind survive for certain in double quotes only.
        style = '"' if len(data.splitlines()) > 1 or data != data.strip() else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Plain data. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def write_yaml(data: Any) -> str:
    """Plain data as YAML, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)

"""Reading YAML the way OmegaConf does: `1e-5` is a number. (Plain PyYAML, by YAML 1.1, takes it for text.)"""

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


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Plain data. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)

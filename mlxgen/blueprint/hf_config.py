"""Reading a checkpoint's config.json: one view of the styles in which the same facts are written.

transformers 5 writes rope as `rope_parameters`, flat or one per layer type; older files write `rope_theta` beside
`rope_scaling`, whose kind is under `rope_type` or `type`. A value of null is the same as no value.
Every key that is read is remembered, so that a key which nobody reads can be reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxgen.errors import ConfigError, did_you_mean

_MISSING = object()


def _plain(node: Any) -> Any:
    """JSON has no infinity: transformers 5 writes {"__float__": "Infinity"}."""
    if isinstance(node, Mapping):
        return float(node["__float__"]) if set(node) == {"__float__"} else {k: _plain(v) for k, v in node.items()}
    return [_plain(v) for v in node] if isinstance(node, list) else node


class HfConfig:
    """config.json as the blueprint sees it: lookups with fall-backs, and a record of what was looked up."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = _plain(raw)
        self.read: set[str] = set()

    def get(self, keys: str, default: Any = _MISSING) -> Any:
        """The first of `a|b.c|d` that has a value; raises ConfigError if none has and there is no default."""
        found = _MISSING
        for key in keys.split("|"):
            self.read.add(key.split(".")[0])
            value = self._lookup(key)
            if value is not None and found is _MISSING:
                found = value
        if found is not _MISSING:
            return found
        if default is not _MISSING:
            return default
        first = keys.split("|")[0]
        raise ConfigError(f"config.json: `{first}` must be given.{did_you_mean(first, self.raw)}")

    def _lookup(self, key: str) -> Any:
        node: Any = self.raw
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return node

    def rope(
        self,
        layer_type: str,
        local_theta_key: str | None,
        default_theta: float,
        default: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Rope settings of one layer type: `theta`, `kind`, and the kind's own parameters.

        `local_theta_key` names the old-style key that gives the layer type a base frequency of its own, else
        `default_theta`; the old style never scales those layers. `default`: settings for a file that has none.
        """
        self.read |= {"rope_parameters", "rope_scaling", "rope_theta"}
        if default and not {"rope_parameters", "rope_scaling"} & set(self.raw):
            return self._rope(default, default_theta)
        node = self.raw.get("rope_parameters") or {}
        if node and all(isinstance(v, Mapping) or v is None for v in node.values()):
            node = node.get(layer_type) or {}
            return self._rope(node, node.get("rope_theta", default_theta))
        if node:
            theta = node.get("rope_theta", self.raw.get("rope_theta", default_theta))
            return self._rope(node, theta)
        if local_theta_key is not None:
            return self._rope({}, self.get(local_theta_key, default_theta))
        theta = self.raw.get("rope_theta")
        return self._rope(self.raw.get("rope_scaling") or {}, default_theta if theta is None else theta)

    def _rope(self, node: Mapping[str, Any], theta: Any) -> dict[str, Any]:
        if not isinstance(node, Mapping):
            raise ConfigError(f"config.json: `rope_scaling` must be a mapping, but is {node!r}.")
        rest = {k: v for k, v in node.items() if k not in ("rope_theta", "rope_type", "type")}
        kind = node.get("rope_type") or node.get("type") or "default"
        # These two stand beside the rope settings in some files, inside them in others.
        self.read |= {"original_max_position_embeddings", "partial_rotary_factor", "max_position_embeddings"}
        if self.raw.get("original_max_position_embeddings") is not None:
            rest["original_max_position_embeddings"] = self.raw["original_max_position_embeddings"]
        if rest.get("partial_rotary_factor") is None:
            rest["partial_rotary_factor"] = self.raw.get("partial_rotary_factor")
        context = self.get("max_position_embeddings|max_seq_len|n_positions", None)
        return {"kind": kind, "theta": theta, "context": context, **rest}

"""task=architectures: the model families that are supported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from mlxgen.blueprint import supported
from mlxgen.blueprint.blueprint import read_file
from mlxgen.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architectures:
    """One line a family: the `model_type`, the blueprint that serves it, what that inherits, and what it is."""

    def __call__(self, config: Config) -> int:
        folders = [folder / "architecture" for folder in config.config_dirs]
        rows = [_row(family, blueprint, folders) for family, blueprint in sorted(supported(folders).items())]
        if config.output == "json":
            print(json.dumps(rows))
            return 0
        if config.output == "jsonl":
            for row in rows:
                print(json.dumps(row))
            return 0
        widths = [max(len(row[key]) for row in rows) for key in ("family", "blueprint", "inherits")]
        for row in rows:
            cells = [
                row[key].ljust(width) for key, width in zip(("family", "blueprint", "inherits"), widths, strict=True)
            ]
            print("  ".join([*cells, row["about"]]))
        return 0


def _row(family: str, blueprint: str, folders: list[Path]) -> dict[str, str]:
    chain, about = [], ""
    name = blueprint
    while name:
        text, tree = read_file(name, folders)
        if not chain:
            first = text.splitlines()[0]
            about = first.lstrip("# ") if first.startswith("#") else ""
        chain.append(name)
        parents = [p for p in tree.get("defaults", []) if p != "_self_"]
        name = parents[0] if parents else ""
    refused = tree_refuses(blueprint, folders)
    inherits = " < ".join(chain[1:])
    return {"family": family, "blueprint": blueprint, "inherits": inherits, "about": refused or about}


def tree_refuses(blueprint: str, folders: list[Path]) -> str:
    """Why a family is refused altogether, or nothing."""
    _, tree = read_file(blueprint, folders)
    for rule in (tree.get("refuse") or {}).values():
        if rule.get("when") is True:
            return f"not supported: {rule['why']}"
    return ""

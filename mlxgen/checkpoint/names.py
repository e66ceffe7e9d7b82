"""Names of tensors: a blueprint's table of dotted parts, read forward when loading and backward when saving.

A rule `model.embed_tokens: embed_tokens` replaces whole parts of a dotted name, wherever they stand. `{e}` stands for
a number. Rules do not feed each other: each part of a name is replaced at most once, by the longest rule that fits.
"""

from __future__ import annotations

from collections.abc import Mapping

Parts = tuple[str, ...]


class NameMap:
    """A reversible table: `ours(name)` and `theirs(name)`. `aliases` are other names that are understood, not written.

    Of several rules for one of our names, the last is written: a family's own stand behind those it inherits. A null
    takes an inherited rule away.
    """

    def __init__(self, rules: Mapping[str, str | None], aliases: Mapping[str, str | None] | None = None):
        self._forward = _Table(_split({**(aliases or {}), **rules}))
        self._backward = _Table({ours: theirs for theirs, ours in _split(rules).items()})

    def ours(self, name: str) -> str:
        return self._forward.replace(name)

    def theirs(self, name: str) -> str:
        return self._backward.replace(name)


def mlx_rename(rules: Mapping[str, Mapping[str, str | None]]) -> dict[str, str | None]:
    """A blueprint's `rename`, with what mlx-lm's models call the experts, which they stack."""
    rename, aliases = rules["rename"], rules["aliases"]
    names = [theirs for theirs, ours in aliases.items() if ours == "mlp.experts" and theirs.endswith(".switch_mlp")]
    sparse = any(theirs.startswith("block_sparse_moe") for theirs in rename)
    wanted = "block_sparse_moe.switch_mlp" if sparse else "mlp.switch_mlp"
    return {**rename, wanted: "mlp.experts"} if wanted in names else dict(rename)


def _split(rules: Mapping[str, str | None]) -> dict[Parts, Parts]:
    return {tuple(theirs.split(".")): tuple(ours.split(".")) for theirs, ours in rules.items() if ours is not None}


class _Table:
    def __init__(self, rules: Mapping[Parts, Parts]):
        self._rules: dict[str, list[tuple[Parts, Parts]]] = {}
        for rule in sorted(rules.items(), key=lambda rule: -len(rule[0])):
            self._rules.setdefault(rule[0][0], []).append(rule)

    def replace(self, name: str) -> str:
        parts, out, i = tuple(name.split(".")), [], 0
        while i < len(parts):
            for pattern, replacement in self._rules.get(parts[i], ()):
                numbers = _match(pattern, parts[i : i + len(pattern)])
                if numbers is not None:
                    out += [numbers.get(part, part) for part in replacement]
                    i += len(pattern)
                    break
            else:
                out.append(parts[i])
                i += 1
        return ".".join(out)


def _match(pattern: Parts, parts: Parts) -> dict[str, str] | None:
    """The numbers at the pattern's `{...}` places, or None where the parts do not fit."""
    if len(parts) != len(pattern):
        return None
    numbers = {}
    for want, have in zip(pattern, parts, strict=True):
        if want[0] == "{" and have.isdigit():
            numbers[want] = have
        elif want != have:
            return None
    return numbers

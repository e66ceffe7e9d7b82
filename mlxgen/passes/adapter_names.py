"""How the modules of an adapter are called in files, and what becomes of those that other programs keep in one piece.

A blueprint's operations rearrange the rows of weights. The rows of a change are those of its matrix b, so they are
rearranged likewise: where q, k and v are one projection elsewhere, the three share one `a`, and each has its rows of
`b`; the other way round, the ranks add up, and `b` is made of blocks. Both are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx

from mlxgen.blueprint.text_part import text_name
from mlxgen.checkpoint.block_ops import FusedExperts
from mlxgen.checkpoint.names import NameMap, mlx_rename
from mlxgen.checkpoint.ops import Split, SwapHalves, build_ops
from mlxgen.checkpoint.recurrent_ops import ScaleRows
from mlxgen.checkpoint.tensor import Tensor, around
from mlxgen.checkpoint.value_ops import Scale
from mlxgen.errors import ModelError
from mlxgen.passes.low_rank import Factors

Layout = Literal["mlx", "peft"]
Shapes = Mapping[str, tuple[int, ...]]  # of the weights that an adapter can be put on, by path
_EXPERTS = "mlp.experts"


class AdapterNames:
    """The names of a family's modules in mlx-lm's models, or in transformers' models with PEFT."""

    def __init__(self, rules: Mapping[str, Any], layout: Layout, shapes: Shapes):
        """rules: the blueprint's `weights`."""
        rename = dict(rules["rename"])
        self._read = NameMap(rename, rules["aliases"])
        ops = build_ops(rules["ops"])
        fused = next((op for op in ops if isinstance(op, FusedExperts)), None)
        self._ops: list[Any] = [op for op in ops if isinstance(op, SwapHalves | Scale | ScaleRows | Split)]
        if layout == "mlx":  # whose experts are stacked, but apart
            self._ops = [op for op in self._ops if not (isinstance(op, Split) and op.axis)]
            rename = mlx_rename(rules)
        else:
            self._ops.append(FusedExperts(path=_EXPERTS, interleaved=fused is not None and fused.interleaved))
            rename[_EXPERTS] = _EXPERTS
        self._write = NameMap(rename)
        self._shapes = {f"{path}.weight": shape for path, shape in shapes.items()}
        # Elsewhere an adapter on a tied embedding is one on its output head, too; not so with PEFT.
        self._apart = layout == "peft" and "lm_head" not in shapes

    def ours(self, name: str) -> str:
        """The dotted path of a module, before anything is split."""
        text = text_name(f"{name}.weight")
        return self._read.ours(text or name).removesuffix(".weight")

    def read(self, theirs: Mapping[str, Factors]) -> dict[str, Factors]:
        """Changes by the names of a file -> by our paths. Raises ModelError for a shape that can't be meant."""
        out: dict[str, Factors] = {}
        for name, factors in theirs.items():
            own = self.ours(name)
            fused = own.endswith((".experts.gate_up_proj", ".experts.down_proj"))
            key = own if fused and factors.b.ndim == 3 else f"{own}.weight"
            rows = _rows(factors)
            tensors = {key: Tensor(shape=rows.shape, load=_giving(rows))}
            for op in self._ops:
                if isinstance(op, FusedExperts) and not fused:
                    continue
                tensors = op.load(tensors, self._shapes)
            for path, tensor in tensors.items():
                out[path.removesuffix(".weight")] = _with_rows(factors, tensor.load())
        return _tied(out) if self._apart else out

    def write(self, ours: Mapping[str, Factors]) -> dict[str, Factors]:
        """Changes by our paths -> by the names of a file."""
        found = dict(ours)
        if self._apart and "embed_tokens" in found:
            found["lm_head"] = found["embed_tokens"]
        for op in reversed(self._ops):
            if isinstance(op, Split):
                found = self._join(found, op.source, op.into, op)
            elif isinstance(op, FusedExperts):
                into = tuple(f"{_EXPERTS}.{name}" for name in ("gate_proj", "up_proj"))
                found = self._join(found, f"{_EXPERTS}.gate_up_proj", into, op)
            else:
                rows = op.save({f"{path}.weight": _rows(factors) for path, factors in found.items()})
                found = {path: _with_rows(factors, rows[f"{path}.weight"]) for path, factors in found.items()}
        return {self._write.theirs(f"{path}.weight").removesuffix(".weight"): f for path, f in found.items()}

    def _join(self, found: Mapping[str, Factors], whole: str, into: Sequence[str], op: Any) -> dict[str, Factors]:
        """Changes of the parts of one projection elsewhere become one change of it."""
        out = dict(found)
        stems = {around(path + ".", part)[0] for path in found for part in into if around(path + ".", part)[1]}
        for stem in sorted(stems):
            parts = [f"{stem}{part}" for part in into]
            if all(f"{part}.weight" in self._shapes for part in parts):
                group = {part: out.pop(part, None) for part in parts}
                out[f"{stem}{whole}"] = _joined(group, self._shapes, op)
        return out


def _tied(found: Mapping[str, Factors]) -> dict[str, Factors]:
    """Changes of an embedding and of the head that is tied to it, as changes of the one matrix that there is."""
    out = dict(found)
    table, head = out.get("embed_tokens"), out.pop("lm_head", None)
    if table is not None and head is None:
        out["embed_tokens"] = replace(table, use="lookup")
    elif table is None and head is not None:
        out["embed_tokens"] = replace(head, use="head")
    elif table is not None and head is not None:
        same = table.scale == head.scale and mx.array_equal(table.a, head.a) and mx.array_equal(table.b, head.b)
        if not same:
            raise ModelError("the adapter changes a tied embedding and its output head in two ways: not supported.")
    return out


def _joined(group: Mapping[str, Factors | None], shapes: Shapes, op: Any) -> Factors:
    present = [factors for factors in group.values() if factors is not None]
    if any(f.m is not None for f in present) and len(present) < len(group):
        missing = next(path for path, factors in group.items() if factors is None)
        raise ModelError(f"the adapter can't be written: {missing} is one with others there, so it needs DoRA too.")
    shared = all(f.rank == present[0].rank and mx.array_equal(f.a, present[0].a) for f in present)  # was one before
    scale, rank = present[0].scale, present[0].rank if shared else sum(f.rank for f in present)
    arrays, start = {}, 0
    for path, factors in group.items():
        rows = shapes[f"{path}.weight"][:-1]
        if factors is None:
            arrays[f"{path}.weight"] = mx.zeros((*rows, rank))
            continue
        b = factors.b if factors.scale == scale else factors.b * (factors.scale / scale)
        if not shared:
            b = mx.pad(b, [*[(0, 0)] * (b.ndim - 1), (start, rank - start - factors.rank)])
        arrays[f"{path}.weight"] = _rows(replace(factors, b=b))
        start += factors.rank
    (rows,) = op.save(arrays).values()
    a = present[0].a if shared else mx.concatenate([f.a for f in present], axis=-2)
    return _with_rows(replace(present[0], a=a), rows)


def _rows(factors: Factors) -> mx.array:
    """b, and m as one more column: all that goes by rows."""
    if factors.m is None:
        return factors.b
    return mx.concatenate([factors.b, factors.m[..., None].astype(factors.b.dtype)], axis=-1)


def _with_rows(factors: Factors, rows: mx.array) -> Factors:
    if factors.m is None:
        return replace(factors, b=rows)
    return replace(factors, b=rows[..., :-1], m=rows[..., -1])


def _giving(array: mx.array) -> Any:
    return lambda: array

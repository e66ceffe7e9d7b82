"""What a computation holds at once, found without running it: its graph is recorded, and its buffers are counted.

MLX's loop of evaluation is followed: an operation takes a new buffer for its output, or that of an input that nobody
else needs; what it reads is let go once it has run. As the host is ahead of the device, that is some operations later,
so a step holds more than its arrays alone would.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

# Kernels that may wait for the device: MLX stops the host beyond 10 tasks of 10 kernels each (mlx/transforms.cpp,
# mlx/backend/cpu/encoder.h). On Metal a task is a command buffer; nobody has measured there.
_AHEAD = 110
_VIEWS = frozenset(
    ("AsStrided", "Broadcast", "BroadcastAxes", "CustomTransforms", "Depends", "ExpandDims", "Flatten", "Slice")
) | {"Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"}
_STRIDED = frozenset(("AsStrided", "Broadcast", "BroadcastAxes", "Slice", "Split", "Transpose"))
# All others may write where they read.
_NEVER_IN_PLACE = frozenset(
    ("Arange", "ArgPartition", "ArgReduce", "ArgSort", "BlockMaskedMM", "Concatenate", "Convolution", "Full", "Gather")
) | {"GatherAxis", "GatherMM", "GatherQMM", "Matmul", "Pad", "Partition", "Quantize", "QuantizedMatmul", "RandomBits"}


@dataclass(eq=False)
class _Buffer:
    nbytes: int
    users: int = 0  # arrays in it, and kernels that have yet to run


@dataclass(eq=False)
class _Array:
    buffer: _Buffer
    contiguous: bool = True


@dataclass
class _Ledger:
    """Bytes in use, and the most there ever were."""

    now: int = 0
    peak: int = 0
    waiting: deque[tuple[int, list[_Buffer]]] = field(default_factory=deque)  # (kernel, what it lets go)
    kernels: int = 0

    def new(self, nbytes: int) -> _Buffer:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        return _Buffer(nbytes)

    def release(self, buffer: _Buffer) -> None:
        buffer.users -= 1
        if not buffer.users:
            self.now -= buffer.nbytes

    def hold(self, buffers: list[_Buffer], kernels: int) -> None:
        """Until a kernel that comes now has run."""
        for buffer in buffers:
            buffer.users += 1
        self.kernels += kernels
        self.waiting.append((self.kernels, buffers))
        while self.waiting and self.waiting[0][0] <= self.kernels - _AHEAD:
            for buffer in self.waiting.popleft()[1]:
                self.release(buffer)


def peak_bytes(function: Callable[..., Any], *inputs: mx.array) -> int:
    """The most bytes that `function(*inputs)` holds at once; the inputs themselves do not count."""
    events: list[dict[str, Any]] = []
    mx.export_function(events.append, function, *inputs)
    operations = [event for event in events if event["type"] == "primitive"]
    outputs = next(event["outputs"] for event in events if event["type"] == "outputs")
    left = Counter(name for op in operations for name, *_ in op["inputs"])
    left.update(name for name, *_ in outputs)
    arrays: dict[str, _Array] = {}
    ledger = _Ledger()
    for op in operations:
        _run(op, arrays, left, ledger)
    return ledger.peak


def _run(op: dict[str, Any], arrays: dict[str, _Array], left: Counter[str], ledger: _Ledger) -> None:
    names = [name for name, *_ in op["inputs"]]
    inputs = [arrays[name] for name in names if name in arrays]
    for name in names:
        left[name] -= 1
    view = _is_view(op, arrays)
    for number, (name, shape, dtype) in enumerate(op["outputs"]):
        if view:
            source = arrays.get(names[0])
            buffer = source.buffer if source is not None else _Buffer(0, 1)
        else:
            nbytes = math.prod(shape) * dtype.size
            given = None if number or op["name"] in _NEVER_IN_PLACE else _donated(names, nbytes, arrays, left)
            buffer = given or ledger.new(nbytes)
        arrays[name] = _Array(buffer, contiguous=not (view and op["name"] in _STRIDED))
        buffer.users += 1
        if not left[name]:  # nobody reads this output
            ledger.release(arrays.pop(name).buffer)
    produced = {arrays[name].buffer for name, *_ in op["outputs"] if name in arrays}
    ledger.hold([b for b in {a.buffer for a in inputs} if b not in produced], 1 if view else 2)
    for name in set(names):
        if not left[name] and name in arrays:
            ledger.release(arrays.pop(name).buffer)


def _is_view(op: dict[str, Any], arrays: dict[str, _Array]) -> bool:
    """Reshaping copies what is not contiguous."""
    if op["name"] == "Reshape":
        source = arrays.get(op["inputs"][0][0])
        return source is None or source.contiguous
    return op["name"] in _VIEWS


def _donated(names: Sequence[str], nbytes: int, arrays: dict[str, _Array], left: Counter[str]) -> _Buffer | None:
    for name in names:
        array = arrays.get(name)
        free = array is not None and not left[name] and array.contiguous and array.buffer.users == 1
        if free and array.buffer.nbytes == nbytes:
            return array.buffer
    return None

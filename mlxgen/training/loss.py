"""Cross-entropy of the next token, in chunks of positions, so that its memory does not grow with the vocabulary.

Logits are the largest arrays of a training step: [B * L, V]. Here they exist for one chunk of positions at a time, and
never for a position that is not learned. Each chunk's gradient is computed together with its loss, as a loss is
a number and its gradient is only scaled by what comes from above (arXiv:2410.10989 section 3.2).

Shapes: B rows, L positions, N learned positions of a batch, C positions of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxgen.training.batch import Batch
from mlxgen.training.forward import PLAIN, Forward

# Logits of a chunk: 8 MB in float32, of which a few are in flight at once. With less, the products of large
# vocabularies get too few rows to be fast.
_CHUNK_ELEMENTS = 1 << 21

Loss = Callable[[Any, Batch, Forward], mx.array]
"""(decoder, batch, forward) -> the sum over the batch's learned tokens of weight * loss, a float32 scalar."""


def next_token_loss(decoder: Any, batch: Batch, forward: Forward = PLAIN) -> mx.array:
    """Sum of weight * cross-entropy over the batch, with a gradient."""
    return _sum(decoder, batch, forward, learned_loss)


def evaluation_loss(decoder: Any, batch: Batch, forward: Forward = PLAIN) -> mx.array:
    """The same sum without a gradient."""
    return _sum(decoder, batch, forward, _forward)


def total_weight(batch: Batch) -> float:
    """What the losses of a batch are divided by: its number of learned tokens, where each weighs 1."""
    return float(np.asarray(batch.weights, dtype=np.float64).sum())


def _sum(decoder: Any, batch: Batch, forward: Forward, reduce: Callable[..., mx.array]) -> mx.array:
    hidden = forward(decoder, batch)
    rows = mx.array(np.flatnonzero(np.asarray(batch.weights)))
    if rows.size == 0:
        return mx.zeros(())
    learned = [array.reshape(-1, *array.shape[2:])[rows] for array in (hidden, batch.targets, batch.weights)]
    return reduce(decoder, *learned)


def _forward(decoder: Any, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """hidden [N, H], targets [N], weights [N] -> scalar."""
    total = mx.zeros(())
    for part in _chunks(hidden.shape[0], decoder.spec.vocab_size):
        h = _after(hidden[part], [total])  # one chunk after the other, or all would be held at once
        total = total + _loss_of(decoder.logits(h[None])[0], targets[part], weights[part])
    return total


def learned_loss(decoder: Any, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Like `_forward`; autograd finds the gradients of `hidden` and of what is trained of the head."""
    names, head = _head_parameters(decoder)

    def logits(h: mx.array, head: Sequence[mx.array]) -> mx.array:
        _update(decoder, names, head)
        return decoder.logits(h[None])[0]

    def chunk(h: mx.array, head: Sequence[mx.array], targets: mx.array, weights: mx.array) -> mx.array:
        return _loss_of(logits(h, head), targets, weights)

    @mx.custom_function
    def total(hidden: mx.array, head: list[mx.array]) -> tuple[mx.array, ...]:
        loss, head_grads, hidden_grads = mx.zeros(()), [mx.zeros_like(p) for p in head], []
        for part in _chunks(hidden.shape[0], decoder.spec.vocab_size):
            h = _after(hidden[part], [loss, *head_grads, *hidden_grads[-1:]])
            part_loss, (dh, dp) = mx.value_and_grad(chunk, argnums=(0, 1))(h, head, targets[part], weights[part])
            loss, head_grads = loss + part_loss, [a + b for a, b in zip(head_grads, dp, strict=True)]
            hidden_grads.append(dh)
        return (loss, mx.concatenate(hidden_grads), *head_grads)

    @total.vjp
    def total_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        scale = cotangents[0]
        return (outputs[1] * scale.astype(outputs[1].dtype), [g * scale.astype(g.dtype) for g in outputs[2:]])

    outputs: Any = total(hidden, head)
    _update(decoder, names, head)
    return outputs[0]


@mx.custom_function
def _chunk_loss(logits: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
    """logits [C, V] -> (weighted sum of cross-entropies, its gradient [C, V]): softmax minus one-hot."""
    rows = mx.arange(targets.shape[0])
    z = logits.astype(mx.float32)
    losses = mx.logsumexp(z, axis=-1) - z[rows, targets]
    gradient = mx.softmax(z, axis=-1) * weights[:, None]
    return (losses * weights).sum(), gradient.at[rows, targets].add(-weights).astype(logits.dtype)


@_chunk_loss.vjp
def _chunk_loss_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    """What comes from above is 1: the chunk's loss itself is differentiated."""
    return outputs[1], mx.zeros(primals[1].shape), mx.zeros(primals[2].shape)


def _loss_of(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    outputs: Any = _chunk_loss(logits, targets, weights)
    return outputs[0]


def _after(array: mx.array, others: list[mx.array]) -> mx.array:
    """The array, not to be used before the others are there."""
    (same,) = mx.depends([array], others)
    return same


def _chunks(rows: int, vocab_size: int) -> list[slice]:
    size = max(_CHUNK_ELEMENTS // vocab_size, 1)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _head_parameters(decoder: Any) -> tuple[list[str], list[mx.array]]:
    """Names and arrays of what is trained of the modules that make logits."""
    modules = ("embed_tokens", "lm_head") if decoder.spec.tie_head else ("lm_head",)
    trained: list[Any] = []
    for name in modules:
        if isinstance(module := decoder.get(name), nn.Module):
            trained += tree_flatten({name: module.trainable_parameters()})
    return [name for name, _ in trained], [array for _, array in trained]


def _update(decoder: Any, names: Sequence[str], arrays: Sequence[mx.array]) -> None:
    if names:
        decoder.update(tree_unflatten(list(zip(names, arrays, strict=True))))

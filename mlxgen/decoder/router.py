"""The router of a mixture of experts: which experts see a token, and with what weight.

Shapes: T tokens, E experts, k = top_k. Scores are float32, whatever the model computes in.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import GroupSpec, RouterSpec


class Router(nn.Module):
    """Scores every expert for every token; the best `top_k` are chosen."""

    def __init__(self, spec: RouterSpec, num_experts: int, top_k: int, hidden_size: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size, num_experts, bias=spec.bias)
        if spec.select_bias:
            self.select_bias = mx.zeros((num_experts,))
        self.spec = spec
        self.top_k = top_k

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, hidden] -> (experts [T, k], weights [T, k])."""
        spec = self.spec
        logits = self.proj(x).astype(mx.float32)
        if spec.score == "sparsemixer":
            return sparsemixer(logits, self.top_k, spec.jitter)
        if spec.softcap is not None:
            logits = mx.tanh(logits / spec.softcap) * spec.softcap
        scores = mx.sigmoid(logits) if spec.score == "sigmoid" else mx.softmax(logits, axis=-1)
        ranks = scores + self.select_bias if spec.select_bias else scores
        if spec.groups is not None:
            ranks = within_best_groups(ranks, spec.groups)
        # A choice has no gradient; what learns are the weights.
        experts = mx.argpartition(mx.stop_gradient(-ranks), self.top_k - 1, axis=-1)[:, : self.top_k]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        if spec.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + spec.epsilon)
        return experts, weights * spec.scale if spec.scale != 1.0 else weights


def within_best_groups(ranks: mx.array, groups: GroupSpec) -> mx.array:
    """ranks [T, E] with -inf outside the best groups (DeepSeek-V2 and V3)."""
    T, E = ranks.shape
    dropped = groups.count - groups.keep
    if not dropped:
        return ranks
    grouped = ranks.reshape(T, groups.count, -1)
    if groups.by == "max":
        scores = grouped.max(axis=-1)
    else:
        scores = mx.topk(grouped, min(2, grouped.shape[-1]), axis=-1).sum(axis=-1)
    worst = mx.argpartition(mx.stop_gradient(scores), dropped - 1, axis=-1)[:, :dropped]
    grouped = mx.put_along_axis(grouped, worst[..., None], mx.array(-mx.inf, ranks.dtype), axis=1)
    return grouped.reshape(T, E)


def sparsemixer(logits: mx.array, top_k: int, jitter: float) -> tuple[mx.array, mx.array]:
    """Phi-3.5-MoE's choice: one expert after the other, each weighted among those not far below it.

    Reference: transformers models/phimoe, at inference.
    """
    experts, weights = [], []
    left = logits
    for _ in range(top_k):
        best = left.max(axis=-1, keepdims=True)
        far = (best - logits) / mx.maximum(mx.abs(logits), best) > 2 * jitter
        near = mx.softmax(mx.where(far, -mx.inf, left), axis=-1)
        chosen = mx.argmax(mx.stop_gradient(left), axis=-1, keepdims=True)
        experts.append(chosen)
        weights.append(mx.take_along_axis(near, chosen, axis=-1))
        left = mx.put_along_axis(left, chosen, mx.array(-mx.inf), axis=-1)
    return mx.concatenate(experts, axis=-1), mx.concatenate(weights, axis=-1)

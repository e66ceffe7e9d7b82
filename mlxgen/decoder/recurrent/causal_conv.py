"""Causal convolution of each channel by itself.

Shapes: B batch, L new tokens, C channels, K width.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class CausalConv(nn.Module):
    """y_t = bias + sum over k of weight[:, k] * x_(t - K + 1 + k); weight [C, K]."""

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__()
        self.weight = mx.zeros((channels, width))
        if bias:
            self.bias = mx.zeros((channels,))
        self.width = width

    def __call__(self, x: mx.array, tail: mx.array | None) -> tuple[mx.array, mx.array]:
        """x [B, L, C] after `tail`, the last K - 1 inputs before (None at the beginning) -> (y [B, L, C], new tail)."""
        B, L, C = x.shape
        K = self.width
        if tail is None:
            tail = mx.zeros((B, K - 1, C), x.dtype)
        # Summed in float32, so that a chunk and a single token round alike.
        window, weight = mx.concatenate([tail, x], axis=1).astype(mx.float32), self.weight.T
        if L == 1:
            y = (window * weight).sum(axis=1, keepdims=True)
        else:
            y = window[:, :L] * weight[0]
            for k in range(1, K):
                y = y + window[:, k : k + L] * weight[k]
        if "bias" in self:
            y = y + self.bias
        return y.astype(x.dtype), self._tail(tail, x)

    def _tail(self, tail: mx.array, x: mx.array) -> mx.array:
        """The last K - 1 inputs. Of a long input they are gathered, as a slice would hold the memory of all of it."""
        L, kept = x.shape[1], self.width - 1
        if kept > L:
            return mx.concatenate([tail[:, L:], x], axis=1)
        return mx.take(x, mx.arange(L - kept, L), axis=1)

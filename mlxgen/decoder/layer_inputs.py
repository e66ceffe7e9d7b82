"""Per-layer inputs (Gemma 3n, Gemma 4): besides the stream, each layer reads a small vector of its own for each token.

Shapes: B batch, L tokens, T = B * L rows, N layers, P width of a layer's input.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from mlxgen.blueprint.spec import LayerInputSpec, LayerInputsSpec
from mlxgen.decoder.activation import build_activation
from mlxgen.decoder.norm import build_norm


class LayerInputs(nn.Module):
    """What all layers read: from a table with a row for each token, and from the token's embedding."""

    def __init__(self, spec: LayerInputsSpec, num_layers: int, hidden_size: int):
        super().__init__()
        self.spec, self.num_layers = spec, num_layers
        self.table = nn.Embedding(spec.vocab_size, num_layers * spec.width)
        self.projection = nn.Linear(hidden_size, num_layers * spec.width, bias=False)
        self.norm = build_norm(spec.norm, spec.width)

    def __call__(self, tokens: mx.array, x: mx.array) -> list[mx.array]:
        """tokens [B, L] and their embeddings x [T, hidden] -> N times [T, P]."""
        rows, width = x.shape[0], self.spec.width
        tokens = mx.where(tokens < self.spec.vocab_size, tokens, 0)  # the table may lack the last ones
        from_table = self.table(tokens).reshape(rows, self.num_layers, width) * math.sqrt(width)
        projected = (self.projection(x) * x.shape[1] ** -0.5).reshape(rows, self.num_layers, width)
        inputs = (self.norm(projected) + from_table) * math.sqrt(0.5)
        return [inputs[:, i] for i in range(self.num_layers)]


class LayerInput(nn.Module):
    """What one layer makes of its input: norm(W (act(G x) * input))."""

    def __init__(self, spec: LayerInputSpec, hidden_size: int):
        super().__init__()
        self.gate = nn.Linear(hidden_size, spec.width, bias=False)
        self.projection = nn.Linear(spec.width, hidden_size, bias=False)
        self.norm = build_norm(spec.norm, hidden_size)
        self.activation = build_activation(spec.activation)

    def __call__(self, x: mx.array, layer_input: mx.array) -> mx.array:
        """x [T, hidden], layer_input [T, P] -> [T, hidden], to be added to the stream."""
        return self.norm(self.projection(self.activation(self.gate(x)) * layer_input))

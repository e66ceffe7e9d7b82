"""A feed-forward block of which most activations are zero (Gemma 3n; reference: transformers models/gemma3n)."""

from __future__ import annotations

from statistics import NormalDist

import mlx.core as mx

from mlxgen.blueprint.special import SparseMlpSpec
from mlxgen.decoder.mlp import MLP


class SparseMLP(MLP):
    """Of the gate, only what exceeds a cut-off counts: in a normal distribution, a share of 1 - sparsity would."""

    def __init__(self, spec: SparseMlpSpec, hidden_size: int):
        super().__init__(spec, hidden_size)
        activation, deviations = self.activation, NormalDist().inv_cdf(spec.sparsity)

        def sparse(gate: mx.array) -> mx.array:
            cutoff = gate.mean(axis=-1, keepdims=True) + gate.std(axis=-1, keepdims=True) * deviations
            return activation(mx.maximum(gate - cutoff, 0))

        self.activation = sparse

"""Every architecture computes what its authors' code computes."""

import json

import mlx.core as mx
import numpy as np
import parity_cases as parity
import pytest

import mlxgen
from mlxgen.cache import Full
from mlxgen.engine import TokenSequence, prefill

# A correct float32 computation lands near 1e-6 of the largest logit; a wrong detail is orders above 1e-3.
TOLERANCE = 1e-3
# Where the best two logits are closer than this, float32 rounding may choose either.
MARGIN = 1e-3
# Prompt chunks that no window or block of a case divides.
CHUNK = 7


@pytest.fixture(scope="module", params=parity.NAMES)
def case(request, tmp_path_factory):
    return request.param, parity.write_checkpoint(request.param, tmp_path_factory.mktemp("case"))


@pytest.mark.parametrize("style", parity.STYLES)
def test_logits_and_greedy_decoding_equal_the_reference(case, style):
    name, folder = case
    (folder / "config.json").write_text(json.dumps(parity.config(name, style)))
    decoder, want = mlxgen.load_model(folder), parity.golden(name)
    logits = np.array(decoder(mx.array(want["tokens"])[None]))[0]
    error = np.abs(logits - want["logits"]).max() / np.abs(want["logits"]).max()
    assert error < TOLERANCE

    if "greedy" in want:  # else the reference can't decode this one
        sure = int(np.argmax(np.append(want["greedy_margin"] < MARGIN, True)))
        assert greedy(decoder, want["tokens"][:20].tolist(), 16)[:sure] == want["greedy"][:sure].tolist()


def greedy(decoder, prompt, count):
    """Cached decoding. A sequence that outgrows its rope's regime is computed anew, as the engine does."""
    sequence = TokenSequence(lambda: Full()(decoder.spec))
    tokens, logits = list(prompt), prefill(decoder, sequence, prompt, CHUNK)
    for _ in range(count):
        tokens.append(mx.argmax(logits).item())
        if sequence.caches[0].offset == decoder.recompute_at:
            sequence.reset()
        logits = prefill(decoder, sequence, tokens, CHUNK)
    return tokens[len(prompt) :]

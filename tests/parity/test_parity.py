"""Every architecture computes what its authors' code computes."""

import mlx.core as mx
import numpy as np
import parity_cases as parity
import pytest

import mlxgen

# A correct float32 computation lands near 1e-6 of the largest logit; a wrong detail is orders above 1e-3.
TOLERANCE = 1e-3
# Where the best two logits are closer than this, float32 rounding may choose either.
MARGIN = 1e-3


@pytest.fixture(scope="module", params=parity.NAMES)
def case(request):
    return request.param


@pytest.mark.parametrize("style", parity.STYLES)
def test_logits_and_greedy_decoding_equal_the_reference(case, style, tmp_path):
    folder = parity.write_checkpoint(case, tmp_path, style)
    want = parity.golden(case)
    decoder = mlxgen.load_model(folder)
    logits = np.array(decoder(mx.array(want["tokens"])[None]))[0]
    error = np.abs(logits - want["logits"]).max() / np.abs(want["logits"]).max()
    assert error < TOLERANCE

    if "greedy" not in want:  # the reference can't decode this one
        return
    pipeline = mlxgen.load(f"model={folder}", "tokenizer=none", "sampler=greedy", "prefill_chunk=7")
    pipeline._eos_ids = frozenset()  # the reference decoded without an end
    got = pipeline.generate(want["tokens"][:20].tolist(), max_tokens=16).tokens
    sure = int(np.argmax(np.append(want["greedy_margin"] < MARGIN, True)))
    assert got[:sure] == want["greedy"][:sure].tolist()

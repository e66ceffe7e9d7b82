"""Log-probabilities of the model's own distribution."""

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.sampler import Sampler, logprobs, sample


def numpy_log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("size", [3, 298, 5000])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_values_are_those_of_the_raw_distribution(size, dtype):
    logits = mx.array(np.random.default_rng(size).normal(size=(4, size)).astype(np.float32) * 4).astype(dtype)
    tokens = mx.array([0, 1, 2, size - 1])
    expected = numpy_log_softmax(np.array(logits.astype(mx.float32)))
    got = logprobs(logits, tokens, top=3)
    np.testing.assert_allclose(got.chosen, expected[np.arange(4), tokens.tolist()], atol=2e-5)
    order = np.argsort(-np.array(logits.astype(mx.float32)), axis=-1, kind="stable")[:, :3]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top, np.take_along_axis(expected, order, axis=-1), atol=2e-5)


def test_they_sum_to_one_and_are_not_above_zero():
    logits = mx.array([[30.0, -5.0, 2.0, 2.0], [0, 0, 0, 0]])
    got = logprobs(logits, mx.array([0, 3]), top=4)
    np.testing.assert_allclose(np.exp(got.top).sum(axis=-1), 1, rtol=1e-6)
    assert np.array(got.top).max() <= 0 and np.array(got.chosen).max() <= 0
    assert got.top_ids.tolist() == [[0, 2, 3, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("top, shape", [(0, (1, 0)), (1, (1, 1)), (99, (1, 4))])
def test_how_many(top, shape):
    got = logprobs(mx.array([[1.0, 2, 3, 4]]), mx.array([2]), top=top)
    assert got.top.shape == got.top_ids.shape == shape
    assert got.chosen.shape == (1,)


def test_penalties_and_bias_do_not_show():
    logits = mx.array([[2.0, 1.0, 0.0]])
    sampler = Sampler.from_config({"repetition_penalty": 5, "logit_bias": {2: 50}})
    tokens, _ = sample(logits, [sampler], [sampler.start([0])])
    got = logprobs(logits, tokens, top=2)
    assert tokens.tolist() == [2] and got.top_ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(got.chosen, numpy_log_softmax(np.array([[2.0, 1, 0]]))[0, 2:], rtol=1e-5)

"""Slow and plain NumPy versions of the stages, one row at a time: what they keep, or the new logits."""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxgen.sampler import Sampler, Stage, process, sample


def softmax(logits):
    x = np.exp(logits - logits.max())
    return x / x.sum()


def by_probability(logits):
    """Token ids, the most likely first, of equals the lowest first."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def top_k(logits, k):
    return {i for i in by_probability(logits)[:k] if logits[i] > -np.inf}


def fewest(order, probabilities, share):
    """The first tokens of `order` until their probabilities sum to the share, up to float32 rounding."""
    kept, total = set(), 0.0
    for token in order:
        if kept and total >= share * (1 - 1e-6):
            break
        kept.add(token)
        total += probabilities[token]
    return kept


def top_p(logits, p):
    return fewest(by_probability(logits), softmax(logits), p)


def distance_to_entropy(logits):
    """Probabilities, and how far each token's surprise is from the expected one."""
    probabilities = softmax(logits)
    surprise = np.array([-math.log(x) if x > 0 else math.inf for x in probabilities])
    entropy = sum(x * s for x, s in zip(probabilities, surprise, strict=True) if x > 0)
    return probabilities, np.abs(surprise - entropy)


def min_p(logits, p):
    probabilities = softmax(logits)
    return {i for i, x in enumerate(probabilities) if x >= p * probabilities.max()}


def top_n_sigma(logits, n):
    there = logits[logits > -np.inf]
    return {i for i, x in enumerate(logits) if x >= logits.max() - n * there.std()}


def xtc(logits, threshold):
    probabilities = softmax(logits)
    top = [x for x in probabilities if x >= threshold and x > 0]
    return {i for i, x in enumerate(probabilities) if x > 0 and not (top and x > min(top))}


def dynamic_temperature(logits, temperature, span, exponent):
    probabilities = softmax(logits)
    left = [x for x in probabilities if x > 0]
    if len(left) < 2:
        return logits
    entropy = -sum(x * math.log(x) for x in left) / math.log(len(left))
    low, high = max(temperature - span, 1e-5), temperature + span
    return logits / (low + (high - low) * entropy**exponent)


def repetition_penalty(logits, tokens, penalty, window):
    out = logits.copy()
    for token in set(tokens[-window:] if window else tokens):
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


def dry(logits, tokens, multiplier, base, allowed_length, window, breakers):
    """Following its author's description, token by token."""
    out = logits.copy()
    tokens = tokens[-window:] if window else tokens
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        follower, length = tokens[end + 1], 0
        while length < 50 and length <= end:
            newest = tokens[-1 - length]
            if newest in breakers or tokens[end - length] != newest:
                break
            length += 1
        if follower not in breakers:
            longest[follower] = max(longest.get(follower, 0), length)
    for token, length in longest.items():
        if length >= allowed_length:
            out[token] -= multiplier * base ** (length - allowed_length)
    return out


def surprise_bits(logits, token):
    return -math.log2(softmax(logits)[token])


# ---- how the tests call the real thing


def started(config, prompt=(), answer=(), seed=0, **kwargs):
    """A sampler and its state after an answer was generated."""
    sampler = Sampler.from_config({"temperature": 1.0, **config}, **kwargs)
    state = sampler.start(prompt, seed=seed)
    for token in answer:
        state = state.push(token)
    return sampler, state


def processed(logits, config, prompt=(), answer=(), seed=0, **kwargs):
    """One row of logits through the chain."""
    sampler, state = started(config, prompt, answer, seed, **kwargs)
    row = mx.array(np.asarray(logits, dtype=np.float32))[None]
    return np.array(process(row, [sampler], [state])[0])


def kept(logits, config, **kwargs):
    """The token ids that survive the chain."""
    return set(np.flatnonzero(processed(logits, config, **kwargs) > -np.inf).tolist())


def draws(logits, config, count, seed=0):
    """`count` tokens from one row of logits: the steps 0.. of one request, in one batch."""
    sampler = Sampler.from_config({"temperature": 1.0, **config})
    states = [sampler.start(seed=seed)]
    while len(states) < count:
        states.append(states[-1].push(0))
    rows = mx.broadcast_to(mx.array(np.asarray(logits, dtype=np.float32)), (count, len(logits)))
    return np.array(sample(rows, [sampler] * count, states)[0])


@dataclass(frozen=True, kw_only=True)
class Only(Stage):
    """A stage from outside of mlxgen: keeps one token."""

    token: int = 0

    def __call__(self, logits, context):
        return mx.where(mx.arange(logits.shape[-1]) == self.token, logits, -mx.inf)

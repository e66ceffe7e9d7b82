"""Rows that decode together compute what each computes alone, whoever joins and leaves around them."""

import random

import mlx.core as mx
import pytest

from mlxgen.cache import Full, Quantized, Window
from mlxgen.cache.merge import merge
from mlxgen.cache.rows import Rows
from mlxgen.engine.batch import Batch
from mlxgen.engine.prefill import prefill
from mlxgen.engine.sequence import TokenSequence
from mlxgen.testing.models import tiny_decoder

FAMILIES = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 8},
    "deepseek_v3": dict(
        q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=2, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, n_group=1, topk_group=1,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"], conv_L_cache=3, head_dim=32),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, head_dim=32),
}  # fmt: skip
POLICIES = [
    Full(), Window(size=9, sinks=2), Window(size=6, sinks=0),
    Quantized(group_size=32, start=0), Quantized(group_size=32, start=6),
]  # fmt: skip
ROWS = 4
# Float32 sums in another order; a value near the border of a quantization step may fall to its other side.
ATOL, ATOL_QUANTIZED = 1e-4, 5e-2


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_decoder(request.param, **FAMILIES[request.param])


def alone(model, policy, prompt, forced):
    sequence = TokenSequence(lambda: policy(model.spec))
    logits = [prefill(model, sequence, prompt, 5)]
    logits += [model(mx.array([[token]]), sequence.caches)[:, -1] for token in forced]
    return mx.concatenate(logits)


def together(model, policies, prompts, forced, starts):
    """Row r joins at step starts[r] and leaves when its tokens are used up."""
    sequences = [TokenSequence(lambda p=p: p(model.spec)) for p in policies]
    batch, active, step = Batch(merge, Rows), [], 0
    logits = [[] for _ in prompts]
    while any(len(got) <= len(tokens) for got, tokens in zip(logits, forced, strict=True)):
        wanted = [r for r in range(ROWS) if starts[r] <= step and len(logits[r]) <= len(forced[r])]
        for r in wanted:
            if not logits[r]:
                logits[r].append(prefill(model, sequences[r], prompts[r], 5))
        wanted = [r for r in wanted if len(logits[r]) <= len(forced[r])]
        if wanted != active:
            batch.change([sequences[r] for r in wanted])
            active = wanted
        if active:
            rows = batch.step(model, mx.array([forced[r][len(logits[r]) - 1] for r in active]))
            for i, r in enumerate(active):
                logits[r].append(rows[i : i + 1])
        step += 1
    return [mx.concatenate(got) for got in logits]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mixed", [False, True], ids=["one policy", "mixed policies"])
def test_batched_equals_alone(model, mixed, seed, monkeypatch):
    monkeypatch.setattr("mlxgen.cache.layer_cache.WindowCache.slack", 3)
    monkeypatch.setattr("mlxgen.cache.slots.STEP", 4)
    rnd = random.Random(seed)
    usable = POLICIES if model.spec.layers[-1].mixer is not None else POLICIES[:1]
    policies = rnd.choices(usable, k=ROWS) if mixed else [usable[seed % len(usable)]] * ROWS
    prompts = [[rnd.randrange(298) for _ in range(rnd.choice([1, 2, 3, 7, 13, 20]))] for _ in range(ROWS)]
    forced = [[rnd.randrange(298) for _ in range(rnd.randint(3, 14))] for _ in range(ROWS)]
    starts = [rnd.randint(0, 6) for _ in range(ROWS)]
    got = together(model, policies, prompts, forced, starts)
    for r in range(ROWS):
        want = alone(model, policies[r], prompts[r], forced[r])
        atol = ATOL_QUANTIZED if isinstance(policies[r], Quantized) else ATOL
        assert mx.abs(got[r] - want).max() < atol, (r, policies[r])


def test_the_kept_caches_of_a_row_go_on_alone(model):
    """A row that has been in a batch is as good as one that never was."""
    policy, prompt = Window(size=9, sinks=2), [5, 6, 7, 8]
    sequences = [TokenSequence(lambda: policy(model.spec)) for _ in range(3)]
    for sequence, extra in zip(sequences, ([], [1, 2, 3], [4]), strict=True):
        prefill(model, sequence, prompt + extra, 5)
    batch = Batch(merge, Rows)
    batch.change(sequences)
    for token in range(20, 32):
        batch.step(model, mx.array([token] * 3))
    batch.change([])
    want = alone(model, policy, prompt, [*range(20, 32), 40])[-1]
    got = model(mx.array([[40]]), sequences[0].caches)[0, -1]
    assert mx.abs(got - want).max() < ATOL

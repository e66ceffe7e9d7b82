"""What the tests of the engine share: random requests, models and policies of every kind, each request by itself."""

import mlx.core as mx

from mlxgen.cache import Full, Quantized, Rows, Window, merge
from mlxgen.engine import Engine, Parts, Request, TokenSequence
from mlxgen.sampler import Sampler, logprobs, sample
from mlxgen.testing.models import tiny_decoder

PARTS = Parts(sample=sample, logprobs=logprobs, merge=merge, rows=Rows)
GREEDY = Sampler.from_config({"temperature": 0})
STAGES = {  # every stage of the sampler, with values that matter
    "logit_bias": [{5: 3.0, 7: -4.0}],
    "repetition_penalty": [1.3, {"penalty": 1.5, "window": 5}],
    "frequency_penalty": [0.5],
    "presence_penalty": [0.3],
    "dry": [{"multiplier": 0.8, "allowed_length": 1}],
    "top_n_sigma": [1.5],
    "top_k": [3, 20],
    "typical_p": [0.8],
    "top_p": [0.6, 0.9],
    "min_p": [0.05],
    "xtc": [{"probability": 0.5, "threshold": 0.05}],
    "dynamic_temperature": [{"range": 0.4}],
    "temperature": [0.8, 1.2],
    "mirostat": [3.0],
}
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
POLICIES = [Full(), Window(size=9, sinks=2), Window(size=6, sinks=0), Quantized(group_size=32, start=6)]
STRIDE = 4


def family(name):
    return tiny_decoder(name, **FAMILIES[name])


def new_sequence(model, policy, stride=STRIDE):
    return TokenSequence(lambda: policy(model.spec), kind=policy, stride=stride)


def random_tokens(rnd, count):
    return tuple(rnd.randrange(298) for _ in range(count))


def random_sampler(rnd):
    """Greedy or seeded, with any stages that go together."""
    names = rnd.sample(sorted(STAGES), rnd.choice([0, 1, 2, 4]))
    values = {name: rnd.choice(STAGES[name]) for name in names}
    values = {**values, "temperature": 0} if rnd.random() < 0.3 else {"temperature": 1.0, **values}
    return Sampler.from_config({**values, "seed": rnd.randrange(-(2**40), 2**40)}, vocab_size=298)


def random_request(rnd, **changes):
    options = dict(
        prompt=random_tokens(rnd, rnd.choice([1, 2, 5, 11, 30])),
        sampler=random_sampler(rnd),
        max_tokens=rnd.randint(1, 10),
        eos_ids=frozenset(rnd.sample(range(298), 12)),
        prefill_chunk=rnd.choice([1, 3, 4, 7, 512]),
        priority=rnd.choice([0, 0, 1]),
        top_logprobs=rnd.choice([-1, -1, 2]),
    )
    return Request(**{**options, **changes})


def finish(engine):
    while engine.step():
        pass


def alone(model, request, policy):
    """The request by itself, computed from nothing."""
    engine = Engine(model, PARTS)
    generation = engine.submit(request, TokenSequence(lambda: policy(model.spec)))
    finish(engine)
    return generation


def contents(sequence):
    """What a sequence holds, as plain numbers."""
    marks = [c for mark in sequence.marks.values() for c in mark if c is not None]
    return [mx.array(array).tolist() for cache in [*sequence.caches, *marks] for array in cache.state]

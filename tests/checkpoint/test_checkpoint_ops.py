"""Load-time operations: what saving makes of loaded tensors is the checkpoint again."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.checkpoint.ops import build_ops
from mlxgen.checkpoint.tensor import Tensor
from mlxgen.errors import ConfigError, WeightsError

few = settings(max_examples=15, deadline=None)
small = st.integers(1, 4)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def lazy(array, quantization=None):
    return Tensor(shape=tuple(array.shape), load=lambda: array, quantization=quantization)


def numbers(*shape):
    """Different everywhere, and exact in float32."""
    return mx.arange(int(np.prod(shape)), dtype=mx.float32).reshape(shape)


def loaded(node, arrays, shapes, quantization=None):
    """What an operation makes of `arrays`: name -> array. Every tensor has the shape that it said it would."""
    (op,) = build_ops({"it": node})
    tensors = op.load({n: lazy(a, quantization if n.endswith("weight") else None) for n, a in arrays.items()}, shapes)
    result = {name: tensor.load() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert result[name].shape == tensor.shape, name
    return result


def assert_comes_back(node, arrays, shapes):
    (op,) = build_ops({"it": node})
    saved = op.save(loaded(node, arrays, shapes))
    assert sorted(saved) == sorted(arrays)
    for name, array in arrays.items():
        assert saved[name].shape == array.shape, name
        assert mx.array_equal(saved[name].astype(array.dtype), array), name


def split_node(**more):
    return {"op": "split", "source": "self_attn.qkv_proj", "into": list(QKV), **more}


@given(groups=small, heads=small, head_dim=small, width=small)
@few
def test_rows_of_a_fused_projection_go_to_their_heads(groups, heads, head_dim, width):
    """Rows are [group: queries of its heads, a key, a value]; the oracle walks through them one by one."""
    rows = groups * (heads + 2) * head_dim
    stem = "layers.0.self_attn.qkv_proj"
    arrays = {f"{stem}.weight": numbers(rows, width), f"{stem}.bias": numbers(rows)}
    sizes = [groups * heads * head_dim, groups * head_dim, groups * head_dim]
    shapes = {f"layers.0.{part}.weight": (size, width) for part, size in zip(QKV, sizes, strict=True)}
    want = {part: [] for part in QKV}
    row = 0
    for _ in range(groups):
        for part, count in zip(QKV, (heads, 1, 1), strict=True):
            want[part] += range(row, row + count * head_dim)
            row += count * head_dim
    got = loaded(split_node(groups=groups), arrays, shapes)
    for part in QKV:
        assert got[f"layers.0.{part}.bias"].tolist() == want[part]
        assert got[f"layers.0.{part}.weight"][:, 0].tolist() == [r * width for r in want[part]]
    assert_comes_back(split_node(groups=groups), arrays, shapes)


@given(experts=small, width=small, hidden=small)
@few
def test_fused_experts_are_split_behind_the_axis_of_the_experts(experts, width, hidden):
    into = ["mlp.experts.gate_proj", "mlp.experts.up_proj"]
    node = {"op": "split", "source": "mlp.experts.gate_up_proj", "into": into, "axis": 1}
    arrays = {"layers.3.mlp.experts.gate_up_proj.weight": numbers(experts, 2 * width, hidden)}
    shapes = {f"layers.3.mlp.experts.{half}_proj.weight": (experts, width, hidden) for half in ("gate", "up")}
    got = loaded(node, arrays, shapes)
    assert mx.array_equal(got["layers.3.mlp.experts.up_proj.weight"], numbers(experts, 2 * width, hidden)[:, width:])
    assert_comes_back(node, arrays, shapes)


def test_a_quantized_trio_is_split_without_loss():
    weight = mx.random.normal((4 * 3 * 8, 64), key=mx.random.key(0))
    packed = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, 32, 4), strict=True))
    arrays = {f"layers.0.self_attn.qkv_proj.{suffix}": array for suffix, array in packed.items()}
    shapes = {f"layers.0.{part}.weight": (32, 64) for part in QKV}
    settings = {"group_size": 32, "bits": 4, "mode": "affine"}
    got = loaded(split_node(groups=4), arrays, shapes, settings)
    whole = mx.dequantize(*packed.values(), 32, 4).reshape(4, 3, 8, 64)
    for i, part in enumerate(QKV):
        trio = [got[f"layers.0.{part}.{suffix}"] for suffix in packed]
        assert mx.array_equal(mx.dequantize(*trio, 32, 4), whole[:, i].reshape(32, 64))


def test_a_part_may_have_the_name_of_the_whole():
    into = ["self_attn.q_proj", "self_attn.gate_proj"]
    node = {"op": "split", "source": "self_attn.q_proj", "into": into, "groups": 2}
    shapes = {f"layers.0.{part}.weight": (4, 3) for part in into}
    assert_comes_back(node, {"layers.0.self_attn.q_proj.weight": numbers(8, 3)}, shapes)


def test_a_projection_of_another_size_is_named():
    arrays = {"layers.0.self_attn.qkv_proj.weight": numbers(7, 2)}
    shapes = {f"layers.0.{part}.weight": (2, 2) for part in QKV}
    with pytest.raises(WeightsError, match=r"qkv_proj.weight must have 2 \+ 2 \+ 2 rows, but has 7"):
        loaded(split_node(), arrays, shapes)


@given(rows=st.integers(1, 5), columns=st.integers(1, 5))
@few
def test_transposed_weights_come_back(rows, columns):
    node = {"op": "transpose", "modules": ["mlp.up_proj"]}
    arrays = {"layers.0.mlp.up_proj.weight": numbers(columns, rows), "layers.0.mlp.up_proj.bias": numbers(rows)}
    assert_comes_back(node, arrays, {"layers.0.mlp.up_proj.weight": (rows, columns)})


def test_weights_that_are_turned_already_are_left_alone():
    node = {"op": "transpose", "modules": ["mlp.up_proj", "self_attn.o_proj"]}
    arrays = {"layers.0.mlp.up_proj.weight": numbers(5, 3), "layers.0.self_attn.o_proj.weight": numbers(3, 3)}
    got = loaded(node, arrays, {name: array.shape for name, array in arrays.items()})
    assert all(mx.array_equal(got[name], array) for name, array in arrays.items())


@given(heads=small, half=small, width=small)
@few
def test_halves_of_heads_are_swapped(heads, half, width):
    node = {"op": "swap_halves", "modules": ["self_attn.q_proj"], "size": 2 * half}
    arrays = {"layers.0.self_attn.q_proj.weight": numbers(2 * heads * half, width)}
    got = loaded(node, arrays, {})["layers.0.self_attn.q_proj.weight"]
    want = numbers(2 * heads * half, width).reshape(heads, 2, half, width)
    assert mx.array_equal(got.reshape(heads, 2, half, width)[:, 0], want[:, 1])
    assert_comes_back(node, arrays, {})


@given(count=small, rows=small, modules=st.booleans())
@few
def test_stacked_tensors_come_back(count, rows, modules):
    if modules:
        node = {"op": "stack", "path": "mlp.experts", "modules": ["up_proj", "down_proj"]}
        names = [f"layers.0.mlp.experts.{{}}.{m}_proj.weight" for m in ("up", "down")]
    else:
        node = {"op": "stack", "path": "self_attn.q_norm"}
        names = ["layers.0.self_attn.q_norm.{}.weight"]
    arrays = {name.format(i): numbers(rows) + i for name in names for i in range(count)}
    got = loaded(node, arrays, {})
    assert {array.shape for array in got.values()} == {(count, rows)}
    assert_comes_back(node, arrays, {})


@given(dims=small)
@few
def test_offsets_come_back(dims):
    node = {"op": "offset", "modules": ["final_norm"], "add": 1.0}
    arrays = {"final_norm.weight": numbers(dims), "final_norm.bias": numbers(dims), "lm_head.weight": numbers(2, dims)}
    got = loaded(node, arrays, {})
    assert got["final_norm.weight"].tolist() == [i + 1.0 for i in range(dims)]
    assert mx.array_equal(got["final_norm.bias"], arrays["final_norm.bias"])
    assert_comes_back(node, arrays, {})


@given(experts=small, width=small, hidden=small)
@few
def test_experts_below_each_other_come_back(experts, width, hidden):
    node = {"op": "flat_experts", "path": "mlp.experts"}
    stem = "layers.0.mlp.experts."
    arrays = {f"{stem}{m}_proj": numbers(experts * width, hidden) for m in ("gate", "up", "down")}
    shapes = {f"{stem}{m}_proj.weight": (experts, width, hidden) for m in ("gate", "up")}
    shapes[f"{stem}down_proj.weight"] = (experts, hidden, width)
    got = loaded(node, arrays, shapes)
    assert {name: array.shape for name, array in got.items()} == shapes
    last = numbers(experts * width, hidden)[-width:]  # of the last expert
    assert mx.array_equal(got[f"{stem}down_proj.weight"][-1], last.T)
    assert_comes_back(node, arrays, shapes)


@given(
    experts=small, width=small, hidden=small, transposed=st.booleans(), interleaved=st.booleans(), bias=st.booleans()
)
@few
def test_gate_and_up_in_one_tensor_come_back(experts, width, hidden, transposed, interleaved, bias):
    node = {"op": "fused_experts", "path": "mlp.experts", "transposed": transposed, "interleaved": interleaved}
    shape = (experts, hidden, 2 * width) if transposed else (experts, 2 * width, hidden)
    down = (experts, width, hidden) if transposed else (experts, hidden, width)
    arrays = {"layers.0.mlp.experts.gate_up_proj": numbers(*shape), "layers.0.mlp.experts.down_proj": numbers(*down)}
    if bias:
        arrays["layers.0.mlp.experts.gate_up_proj_bias"] = numbers(experts, 2 * width)
        arrays["layers.0.mlp.experts.down_proj_bias"] = numbers(experts, hidden)
    assert_comes_back(node, arrays, {})


@given(heads=small, nope=small, values=small, latent=small)
@few
def test_the_joint_projection_of_latent_attention_comes_back(heads, nope, values, latent):
    arrays = {"layers.0.self_attn.kv_b_proj.weight": numbers(heads * (nope + values), latent)}
    shapes = {
        "layers.0.self_attn.embed_q.weight": (heads, latent, nope),
        "layers.0.self_attn.unembed_out.weight": (heads, values, latent),
    }
    assert_comes_back({"op": "split_latent"}, arrays, shapes)


@given(quarter=small, columns=small, seed=st.integers(0, 99), divided=st.booleans())
@few
def test_ternary_weights_come_back(quarter, columns, seed, divided):
    rng = np.random.default_rng(seed)
    signs = rng.integers(-1, 2, (4 * quarter, columns))
    signs[0, 0] = 1  # all zeros would say nothing of the scale
    packed = np.zeros((quarter, columns), np.uint8)
    for row in range(4 * quarter):
        packed[row % quarter] |= (signs[row] + 1).astype(np.uint8) << (2 * (row // quarter))
    arrays = {"layers.0.mlp.up_proj.weight": mx.array(packed), "layers.0.mlp.up_proj.weight_scale": mx.array([0.25])}
    shapes = {"layers.0.mlp.up_proj.weight": signs.shape}
    node = {"op": "ternary", "modules": ["mlp.up_proj"], "divided": divided}
    got = loaded(node, arrays, shapes)
    assert got["layers.0.mlp.up_proj.weight"].tolist() == (signs * (4.0 if divided else 0.25)).tolist()
    assert_comes_back(node, arrays, shapes)


def test_weights_that_are_not_ternary_are_not_stored_as_such():
    (op,) = build_ops({"it": {"op": "ternary", "modules": ["mlp.up_proj"]}})
    with pytest.raises(WeightsError, match="must hold -1, 0 and 1 times one scale"):
        op.save({"layers.0.mlp.up_proj.weight": numbers(4, 2)})


def test_an_unknown_operation_is_named_and_null_takes_one_away():
    assert build_ops({"it": None}) == []
    with pytest.raises(ConfigError, match=r"`weights.ops.it.op` must be one of split, .*, but is 'spilt'"):
        build_ops({"it": {"op": "spilt"}})


def test_quantized_and_plain_parts_do_not_become_one():
    (op,) = build_ops({"it": split_node()})
    arrays = {f"layers.0.{part}.weight": numbers(32, 64) for part in QKV}
    names = [f"layers.0.{QKV[0]}.{name}" for name in ("weight", "scales", "biases")]
    arrays |= dict(zip(names, mx.quantize(mx.zeros((32, 64))), strict=True))
    with pytest.raises(WeightsError, match="some are quantized and some are not"):
        op.save(arrays)

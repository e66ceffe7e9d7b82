"""Load-time operations of recurrent mixers: both ways, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.checkpoint.recurrent_ops import FixedDecay, Join, Move, ScaleRows, UnitAxes
from mlxgen.checkpoint.tensor import Tensor
from mlxgen.errors import WeightsError


def tensors(**arrays):
    return {n.replace("__", "."): Tensor(shape=a.shape, load=lambda a=a: mx.array(a)) for n, a in arrays.items()}


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def loaded(op, given, shapes=None):
    return {name: np.array(t.load()) for name, t in op.load(given, shapes or {}).items()}


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 1), (3, 4)], ids=str)
def test_a_convolution_is_read_wherever_its_axis_of_one_stands_and_written_in_the_middle(shape):
    op = UnitAxes(tensors=("conv1d.weight",), axes=(1,))
    got = loaded(op, tensors(a__conv1d__weight=numbers(*shape)), {"a.conv1d.weight": (3, 4)})
    np.testing.assert_array_equal(got["a.conv1d.weight"], numbers(3, 4))
    assert op.save({"a.conv1d.weight": mx.array(numbers(3, 4))})["a.conv1d.weight"].shape == (3, 1, 4)


def test_a_convolution_of_another_size_is_left_for_the_check_of_shapes():
    op = UnitAxes(tensors=("conv1d.weight",), axes=(1,))
    got = op.load(tensors(a__conv1d__weight=numbers(3, 1, 5)), {"a.conv1d.weight": (3, 4)})
    assert got["a.conv1d.weight"].shape == (3, 1, 5)


def test_converted_checkpoints_that_lost_something_are_refused():
    op = UnitAxes(tensors=("conv1d.weight",), axes=(1,), refuse_turned="lack a multiplier")
    shapes = {"a.conv1d.weight": (3, 4)}
    op.load(tensors(a__conv1d__weight=numbers(3, 1, 4)), shapes)
    with pytest.raises(WeightsError, match="lack a multiplier; use the original"):
        op.load(tensors(a__conv1d__weight=numbers(3, 4, 1)), shapes)


def test_joined_rows_come_apart_again():
    op = Join(parts=("q", "k"), into="qk", rows=(2, 3))
    given = {"a.q.weight": numbers(2, 4), "a.k.weight": numbers(3, 4), "a.other": numbers(2)}
    got = loaded(op, tensors(**{name.replace(".", "__"): a for name, a in given.items()}))
    assert got["a.qk.weight"].shape == (5, 4)
    back = op.save({name: mx.array(a) for name, a in got.items()})
    assert all((np.array(back[name]) == a).all() for name, a in given.items()) and len(back) == 3
    with pytest.raises(WeightsError, match=r"a\.k\.weight is missing"):
        op.load(tensors(a__q__weight=numbers(2, 4)), {})


def test_a_module_moves_in_layers_that_have_it_elsewhere_and_takes_its_scales_along():
    op = Move(module="x", to="y")
    given = tensors(l__0__x__weight=numbers(2), l__1__x__weight=numbers(2), l__1__x__scales=numbers(2))
    got = op.load(given, {"l.0.x.weight": (2,), "l.1.y.weight": (2,)})
    assert sorted(got) == ["l.0.x.weight", "l.1.y.scales", "l.1.y.weight"]
    back = op.save({name: mx.array(numbers(2)) for name in got})
    assert sorted(back) == sorted(given)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_multiplied_by_their_own_factor(packed):
    op = ScaleRows(module="in_proj", rows=(1, 2), by=(2.0, 0.5))
    name = "a.in_proj.scales" if packed else "a.in_proj.weight"
    given = {name: numbers(3, 2)} | ({"a.in_proj.weight": numbers(3, 1)} if packed else {})
    got = loaded(op, {n: Tensor(shape=a.shape, load=lambda a=a: mx.array(a)) for n, a in given.items()})
    np.testing.assert_array_equal(got[name], numbers(3, 2) * np.array([[2.0], [0.5], [0.5]]))
    if packed:
        np.testing.assert_array_equal(got["a.in_proj.weight"], numbers(3, 1))
    back = op.save({n: mx.array(a) for n, a in got.items()})
    np.testing.assert_array_equal(np.array(back[name]), given[name])


def test_stored_decays_must_be_those_of_the_architecture():
    op = FixedDecay(tensor="slope_rate", layers=3)
    # Layer 1 of 3: half of 1/4, 1/16, 1/64, 1/256.
    right = (np.array([0.25, 0.0625, 0.015625, 0.00390625], np.float32) * 0.50001).reshape(4, 1, 1)
    assert list(op.load(tensors(layers__1__slope_rate=right, other=numbers(1)), {})) == ["other"]
    with pytest.raises(WeightsError, match=r"layers\.1\.slope_rate must hold the decays"):
        op.load(tensors(layers__1__slope_rate=right * 1.1), {})

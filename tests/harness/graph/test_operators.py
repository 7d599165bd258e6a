"""What an operator does besides computing: communicate, write, share storage, draw random numbers, read data."""

from __future__ import annotations

import operator

import pytest
import torch

from bitproof.harness.graph import operators
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.fixture
def sketch() -> Sketch:
    return Sketch()


def test_an_operators_name_leaves_its_overload_out(sketch: Sketch) -> None:
    x = sketch.placeholder("x", 8, 8)
    assert operators.operator_name(sketch.call(aten.mm.default, x, x)) == "mm"
    assert operators.operator_name(sketch.call(operator.mul, sketch.call(aten.sym_size.int, x, 0), 2)) == "mul"


def test_a_collective_names_its_group_and_its_wait_is_none(sketch: Sketch) -> None:
    x = sketch.placeholder("x", 8)
    reduced = sketch.call(c10d.all_reduce.default, x, "sum", "TP")
    waited = sketch.call(c10d.wait_tensor.default, reduced)
    assert operators.is_collective(reduced) and not operators.is_wait(reduced)
    assert operators.is_wait(waited) and not operators.is_collective(waited)
    assert operators.group_name(reduced) == "TP"
    assert not operators.is_collective(sketch.call(aten.sin.default, x))


def test_a_collective_that_is_not_functional_is_one_too(sketch: Sketch) -> None:
    node = sketch.graph.call_function(torch.ops.c10d.allreduce_.default, ())
    assert operators.is_collective(node)


def test_written_arguments_are_derived_from_the_schema_in_lists_too(sketch: Sketch) -> None:
    x, y = sketch.placeholder("x", 8), sketch.placeholder("y", 8)
    assert operators.written_arguments(sketch.call(aten.add_.Tensor, x, y)) == [x]
    assert operators.written_arguments(sketch.call(aten.add.Tensor, x, y)) == []
    assert operators.written_arguments(sketch.call(aten._foreach_add_.Scalar, [x, y], 1)) == [x, y]
    assert operators.written_arguments(sketch.call(aten.view.default, x, [8])) == []
    assert operators.written_arguments(sketch.call(aten.mul.out, x, y, out=y)) == [y]


def test_random_operators_are_known(sketch: Sketch) -> None:
    x = sketch.placeholder("x", 8)
    assert operators.is_random(sketch.call(aten.bernoulli_.float, x, 0.5))
    assert operators.is_random(sketch.call(aten.rand.default, [8]))
    assert not operators.is_random(sketch.call(aten.zeros.default, [8]))


def test_operators_whose_sizes_depend_on_data_are_known() -> None:
    assert operators.reads_data(aten._local_scalar_dense.default)
    assert operators.reads_data(aten.nonzero.default)
    assert not operators.reads_data(aten.mm.default)
    assert not operators.reads_data(operator.mul)


def test_writes_and_random_draws_are_effects_and_computing_is_none(sketch: Sketch) -> None:
    x = sketch.placeholder("x", 8)
    assert operators.has_effects(sketch.call(aten.add_.Tensor, x, 1))
    assert operators.has_effects(sketch.call(aten.rand.default, [8]))
    assert not operators.has_effects(sketch.call(aten.sin.default, x))
    assert not operators.has_effects(sketch.call(c10d.all_reduce.default, x, "sum", "TP"))


def test_attention_draws_random_numbers_only_where_it_drops_something(sketch: Sketch) -> None:
    q = sketch.placeholder("q", 2, 2, 4, 4)
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not operators.is_random(sketch.call(attend, q, q, q))
    assert not operators.is_random(sketch.call(attend, q, q, q, 0.0, True))
    dropping = sketch.graph.call_function(attend, (q, q, q, 0.5))
    assert operators.is_random(dropping)
    assert operators.is_random(sketch.call(aten.bernoulli.default, q))


def test_the_wait_for_one_of_several_tensors_is_for_the_collective_of_them_all() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2, 4)
    launch = sketch.call(c10d.all_gather_into_tensor_coalesced.default, [x, x], 2, "fsdp")
    second = sketch.call(operator.getitem, launch, 1)
    assert operators.launch_of(sketch.call(c10d.wait_tensor.default, second)) is launch

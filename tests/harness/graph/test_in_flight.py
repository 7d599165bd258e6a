"""What races with a collective, beside its nearest neighbour that does not."""

from __future__ import annotations

import operator

import pytest
import torch

from harness.graph.in_flight import races
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def gathered(sketch: Sketch):
    x = sketch.placeholder("x", 2)
    return x, sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp")


def test_what_is_waited_for_may_be_read_and_what_was_sent_written() -> None:
    sketch = Sketch()
    x, launch = gathered(sketch)
    shown = sketch.call(aten.view.default, launch, [4])  # computes nothing
    sketch.call(c10d.wait_tensor.default, launch)
    module = sketch.finish(sketch.call(aten.neg.default, shown), sketch.call(aten.add_.Tensor, x, 1))
    assert races(module) == []


@pytest.mark.parametrize("through_view", [False, True])
def test_a_read_before_the_wait_is_a_race(through_view: bool) -> None:
    sketch = Sketch()
    _, launch = gathered(sketch)
    read = sketch.call(aten.view.default, launch, [4]) if through_view else launch
    early = sketch.call(aten.neg.default, read)
    module = sketch.finish(early, sketch.call(c10d.wait_tensor.default, launch))
    assert races(module) == ["`neg` reads what `all_gather_into_tensor` brings, before anything waits for it"]


def test_a_result_that_is_never_waited_for_is_a_race_and_one_that_nobody_reads_is_none() -> None:
    sketch = Sketch()
    x, launch = gathered(sketch)
    assert races(sketch.finish(x)) == []
    sketch = Sketch()
    x, launch = gathered(sketch)
    assert races(sketch.finish(launch)) == [
        "the step's result reads what `all_gather_into_tensor` brings, before anything waits for it"
    ]


def test_a_write_to_what_is_sent_is_a_race_until_the_wait() -> None:
    sketch = Sketch()
    x, launch = gathered(sketch)
    write = sketch.call(aten.add_.Tensor, sketch.call(aten.view.default, x, [2]), 1)
    module = sketch.finish(write, sketch.call(c10d.wait_tensor.default, launch))
    assert races(module) == ["`add_` writes what `all_gather_into_tensor` sends, before anything waits for it"]


def test_each_result_of_a_collective_of_several_tensors_has_a_wait_of_its_own() -> None:
    sketch = Sketch()
    x, y = sketch.placeholder("x", 2), sketch.placeholder("y", 2)
    launch = sketch.call(c10d.all_gather_into_tensor_coalesced.default, [x, y], 2, "fsdp")
    first, second = sketch.call(operator.getitem, launch, 0), sketch.call(operator.getitem, launch, 1)
    waits = [sketch.call(c10d.wait_tensor.default, first)]
    found = races(sketch.finish(*waits, sketch.call(aten.neg.default, second)))
    assert found == ["`neg` reads what `all_gather_into_tensor_coalesced` brings, before anything waits for it"]


def test_of_many_races_the_first_are_told_and_the_others_counted() -> None:
    sketch = Sketch()
    _, launch = gathered(sketch)
    found = races(sketch.finish(*(sketch.call(aten.neg.default, launch) for _ in range(5))))
    assert (len(found), found[-1]) == (4, "and 2 more")

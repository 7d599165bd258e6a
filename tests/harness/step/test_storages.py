"""Which values of a graph share a storage, and which calls write it."""

from __future__ import annotations

import operator

import torch

from bitproof.harness.step.storages import Storages
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def test_views_writes_and_items_share_their_owners_storage_and_copies_do_not() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    view = sketch.call(aten.view.default, x, [2, 4])
    item = sketch.call(operator.getitem, sketch.call(aten.split.Tensor, view, 1), 0)
    written = sketch.call(aten.add_.Tensor, item, 1)
    copy = sketch.call(aten.clone.default, written)
    owners = Storages(sketch.graph.nodes).owners
    assert [owners[node] for node in (x, view, item, written)] == [x] * 4
    assert owners[copy] is copy


def test_a_wait_and_an_unsafe_view_share_storage_although_their_schemas_do_not_say_so() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 8)
    launch = sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp")
    waited = sketch.call(c10d.wait_tensor.default, launch)
    view = sketch.call(aten._unsafe_view.default, waited, [4, 4])
    owners = Storages(sketch.graph.nodes).owners
    assert [owners[node] for node in (launch, waited, view)] == [launch] * 3


def test_writers_of_a_storage_write_any_value_in_it_in_the_graphs_order() -> None:
    sketch = Sketch()
    x, y = sketch.placeholder("x", 8), sketch.placeholder("y", 8)
    both = sketch.call(aten._foreach_add_.Scalar, [x, y], 1)
    half = sketch.call(aten.slice.Tensor, x, 0, 0, 4)
    later = sketch.call(aten.mul_.Tensor, half, 2)
    copy = sketch.call(aten.clone.default, x)
    storages = Storages(sketch.graph.nodes)
    assert storages.writers == {x: [both, later], y: [both]}
    assert storages.is_view(half) and storages.is_view(later) and not storages.is_view(copy)
    assert storages.of([half, later, copy]) == {x, copy}

"""All-gathers of parameters that share a process group with other collectives get one of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from bitproof.harness.errors import PassError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.graph.passes.isolate_gathers import isolate_gathers
from tests.harness.graph.graphs import Sketch, listing

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
BOTH = ((0, 1),)


def gathering(*, reduces: bool = True) -> tuple[GraphModule, PassContext]:
    """A parameter is cast and gathered, and so is what comes of it; a gradient is reduced, all over "fsdp"."""
    sketch = Sketch()
    w = sketch.placeholder("w", 4)
    cast = sketch.call(aten._to_copy.default, w, dtype=torch.bfloat16)
    gathered = sketch.call(c10d.all_gather_into_tensor.default, cast, 2, "fsdp")
    activation = sketch.call(aten.sin.default, gathered)
    grad = sketch.call(c10d.all_gather_into_tensor.default, activation, 2, "fsdp") if reduces else gathered
    module = sketch.finish(sketch.call(aten.sum.default, grad), grad)
    return module, sketch.context()


def isolated(module: GraphModule, context: PassContext, **groups: Group) -> tuple[list[str], PassContext]:
    context = replace(context, groups=GroupTable(dict(groups)))
    assert isolate_gathers(module, context) is module
    return [line for line in listing(module) if "all_gather" in line and "fsdp" in line], context


def test_a_parameters_gather_leaves_a_shared_object_and_an_activations_stays() -> None:
    lines, context = isolated(*gathering(), fsdp=Group("world", BOTH))
    assert lines == [
        "all_gather_into_tensor = all_gather_into_tensor(_to_copy, 2, fsdp.gathers)",
        "all_gather_into_tensor_1 = all_gather_into_tensor(sin, 2, fsdp)",
    ]
    assert context.groups.made() == {"fsdp.gathers": Group("fsdp.gathers", BOTH)}
    assert context.facts == {"fsdp.gathers": 1}


def test_an_object_that_carries_nothing_but_parameters_gathers_stays() -> None:
    module, context = gathering(reduces=False)
    before = listing(module)
    _, context = isolated(module, context, fsdp=Group("fsdp", BOTH))
    assert listing(module) == before
    assert not context.groups.made() and not context.facts


def test_one_object_with_two_rank_sets_is_refused_and_left_as_it_was() -> None:
    sketch = Sketch()
    w = sketch.placeholder("w", 4)
    first = sketch.call(c10d.all_gather_into_tensor.default, w, 2, "fsdp")
    second = sketch.call(c10d.all_reduce.default, first, "sum", "tp")
    module = sketch.finish(second, second)
    before = listing(module)
    with pytest.raises(PassError, match="one process group is reported with two rank sets"):
        isolated(module, sketch.context(), fsdp=Group("world", ((0, 1), (2, 3))), tp=Group("world", ((0, 2), (1, 3))))
    assert listing(module) == before

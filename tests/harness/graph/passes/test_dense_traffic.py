"""Gathers and reductions of parameters leave the all-to-alls of experts, and stay in order within their groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from bitproof.harness.case import Parallelism
from bitproof.harness.errors import PassError
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.group_objects import collectives_by_object
from bitproof.harness.graph.groups import Group, GroupTable
from bitproof.harness.graph.passes.dense_traffic import dense_traffic
from bitproof.reference.parallel.mesh import Mesh
from tests.harness.graph.graphs import Sketch, bits, listing, verify
from tests.ranks import on_ranks

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
N, BOTH = 4, ((0, 1),)
GROUPS = {name: Group(name, BOTH) for name in ("ep", "fsdp", "efsdp", "reduce")}
DENSE, EXPERTS = "layers.0.attention", "layers.0.moe.experts"


def gather(sketch: Sketch, x: Node, group: str = "fsdp") -> Node:
    return sketch.call(c10d.all_gather_into_tensor.default, x, 2, group, at=None)


def reduce(sketch: Sketch, x: Node, group: str = "reduce") -> Node:
    return sketch.call(c10d.reduce_scatter_tensor.default, x, "sum", 2, group, at=None, backward=True)


def wait(sketch: Sketch, launch: Node) -> Node:
    return sketch.call(c10d.wait_tensor.default, launch, at=None)


def exchange(sketch: Sketch, x: Node) -> Node:
    rows = int(x.meta["val"].shape[0]) // 2
    return sketch.call(c10d.all_to_all_single.default, x, [rows] * 2, [rows] * 2, "ep", at=EXPERTS)


def product(sketch: Sketch, x: Node, weight: Node, at: str = DENSE) -> Node:
    found = sketch.call(aten.mm.default, x, weight, at=at)
    if at == EXPERTS:
        found.meta["origin"] = found.meta["origin"]._replace(part="compute")
    return found


def moved(module: GraphModule, context: PassContext, **groups: Group) -> tuple[str, dict[str, Any]]:
    """The graph's lines after the pass, without arguments, and the pass's facts."""
    context = replace(context, groups=GroupTable(GROUPS | groups))
    before = orders(module, context)
    assert dense_traffic(module, context) is module
    verify(module)
    assert orders(module, context) == before
    return lines(module), context.facts


def lines(module: GraphModule) -> str:
    return " ".join(line.split(" = ")[0] for line in listing(module)[:-1])


def orders(module: GraphModule, context: PassContext) -> list[list[str]]:
    return sorted([node.name for node in each] for each in collectives_by_object(module.graph, context.groups))


def experts_weight_read_between_exchanges() -> tuple[Sketch, GraphModule]:
    """Attention, rows sent to experts, and their product with a weight that is gathered meanwhile."""
    sketch = Sketch()
    w, x = sketch.placeholder("w", N // 2, N), sketch.placeholder("x", N, N)
    queries = product(sketch, x, x)
    sent = exchange(sketch, sketch.call(aten.sin.default, queries, at=DENSE))
    cast = sketch.call(aten._to_copy.default, w, dtype=torch.float32, at=None)
    launch = gather(sketch, cast)
    rows, weight = wait(sketch, sent), wait(sketch, launch)
    back = exchange(sketch, product(sketch, rows, weight, EXPERTS))
    total = sketch.call(aten.sum.default, wait(sketch, back), at="")
    return sketch, sketch.finish(total, cast)


def test_a_gather_beside_an_all_to_all_starts_with_the_dense_region_before_it_and_ends_with_it() -> None:
    sketch, module = experts_weight_read_between_exchanges()
    assert lines(module) == (
        "mm sin all_to_all_single _to_copy all_gather_into_tensor wait_tensor wait_tensor_1 mm_1 all_to_all_single_1 "
        "wait_tensor_2 sum_1"
    )
    found, facts = moved(module, sketch.context())
    assert found == (
        "_to_copy all_gather_into_tensor mm sin wait_tensor_1 all_to_all_single wait_tensor mm_1 all_to_all_single_1 "
        "wait_tensor_2 sum_1"
    )
    assert facts == {
        "all_to_alls": 2,
        "dense_regions": 2,
        "moved": 1,
        "beside_all_to_alls": {"before": 1, "after": 0},
    }


def test_a_second_time_nothing_moves() -> None:
    sketch, module = experts_weight_read_between_exchanges()
    first, _ = moved(module, sketch.context())
    second, facts = moved(module, sketch.context())
    assert second == first and facts["moved"] == 0


def two_layers(group: str = "reduce", *, dense: bool = True) -> tuple[Sketch, GraphModule]:
    """Backward: a gradient is reduced beside an all-to-all; then a dense product, another all-to-all, and the end."""
    sketch = Sketch()
    w, x = sketch.placeholder("w", N // 2, N), sketch.placeholder("x", N, N)
    sent = exchange(sketch, x)
    gradient = sketch.call(aten.neg.default, x, at=EXPERTS, backward=True)
    launch = reduce(sketch, gradient, group)
    rows, reduced = wait(sketch, sent), wait(sketch, launch)
    grad = sketch.call(aten.cos.default, reduced, at=None, backward=True)
    after = product(sketch, rows, x) if dense else sketch.call(aten.sin.default, rows, at=DENSE)
    arrived = wait(sketch, exchange(sketch, after))
    total = sketch.call(aten.sum.default, arrived, at="")
    del w
    return sketch, sketch.finish(total, grad)


def test_a_reduction_beside_an_all_to_all_waits_for_the_next_dense_region_and_so_does_what_reads_it() -> None:
    sketch, module = two_layers()
    assert lines(module) == (
        "all_to_all_single neg reduce_scatter_tensor wait_tensor wait_tensor_1 cos mm all_to_all_single_1 "
        "wait_tensor_2 sum_1"
    )
    found, facts = moved(module, sketch.context())
    assert found == (
        "all_to_all_single neg wait_tensor reduce_scatter_tensor mm wait_tensor_1 cos all_to_all_single_1 "
        "wait_tensor_2 sum_1"
    )
    assert facts["moved"] == 1 and facts["beside_all_to_alls"] == {"before": 1, "after": 0}


def test_without_compute_between_all_to_alls_a_reduction_waits_until_the_last_has_arrived() -> None:
    sketch, module = two_layers(dense=False)
    found, facts = moved(module, sketch.context())
    assert found == (
        "all_to_all_single neg wait_tensor sin all_to_all_single_1 wait_tensor_2 reduce_scatter_tensor sum_1 "
        "wait_tensor_1 cos"
    )
    assert facts["dense_regions"] == 1 and facts["beside_all_to_alls"]["after"] == 0


@pytest.mark.ranks
def test_the_new_places_change_no_bit_on_real_ranks() -> None:
    programs = []
    for make in (experts_weight_read_between_exchanges, lambda: two_layers("fsdp")):
        (sketch, after), (_, before) = make(), make()
        moved(after, sketch.context())
        assert lines(before) != lines(after)
        programs.append((before, after))

    def body(mesh: Mesh) -> bool:
        generator = torch.Generator().manual_seed(mesh.rank)
        inputs = [torch.randn(N // 2, N, generator=generator), torch.randn(N, N, generator=generator)]
        return all(
            torch.equal(bits(x), bits(y))
            for before, after in programs
            for x, y in zip(before(*inputs), after(*inputs), strict=True)
        )

    assert on_ranks(Parallelism(world_size=2, ep=2), body) == [True, True]


def test_what_shares_its_object_with_a_later_all_to_all_keeps_its_place_in_the_order() -> None:
    sketch, module = two_layers(dense=False)
    before = listing(module)
    _, facts = moved(module, sketch.context(), reduce=Group("ep", BOTH))
    assert listing(module) == before
    assert facts["moved"] == 0 and facts["beside_all_to_alls"] == {"before": 1, "after": 1}


def test_a_gather_stays_behind_the_launch_before_it_in_its_object() -> None:
    """The all-to-all is launched before the gather, by the same object."""
    sketch, module = experts_weight_read_between_exchanges()
    before = listing(module)
    _, facts = moved(module, sketch.context(), fsdp=Group("ep", BOTH))
    assert listing(module) == before and facts["moved"] == 0


@pytest.mark.parametrize("groups", [("fsdp", "fsdp"), ("fsdp", "efsdp")])
def test_gathers_keep_their_order(groups: tuple[str, str]) -> None:
    sketch = Sketch()
    ws = [sketch.placeholder(name, N // 2, N) for name in ("w", "v")]
    x = sketch.placeholder("x", N, N)
    sent = exchange(sketch, product(sketch, x, x))
    launches = [gather(sketch, w, group) for w, group in zip(ws, groups, strict=True)]
    rows = wait(sketch, sent)
    for launch in launches:
        rows = product(sketch, rows, wait(sketch, launch), EXPERTS)
    grads = [sketch.call(aten.neg.default, w, at=None, backward=True) for w in ws]
    module = sketch.finish(sketch.call(aten.sum.default, rows, at=""), *grads)
    found, facts = moved(module, sketch.context())
    assert found.startswith(
        "all_gather_into_tensor all_gather_into_tensor_1 mm wait_tensor_1 wait_tensor_2 all_to_all_single"
    )
    assert facts["moved"] == 2


def test_a_gather_of_an_activation_and_a_reduction_in_forward_are_no_parameters_traffic() -> None:
    """As ranks of a tensor group do with a divided sequence."""
    sketch = Sketch()
    w, x = sketch.placeholder("w", N // 2, N), sketch.placeholder("x", N // 2, N)
    sent = exchange(sketch, product(sketch, sketch.placeholder("y", N, N), wait(sketch, gather(sketch, w))))
    whole = wait(sketch, gather(sketch, x))
    parts = wait(sketch, sketch.call(c10d.reduce_scatter_tensor.default, whole, "sum", 2, "efsdp", at=DENSE))
    rows = wait(sketch, sent)
    loss = sketch.call(aten.sum.default, product(sketch, rows, sketch.call(aten.t.default, parts, at=DENSE)), at="")
    module = sketch.finish(loss, sketch.call(aten.neg.default, w, at=None, backward=True))
    before = listing(module)
    _, facts = moved(module, sketch.context())
    assert listing(module) == before and facts["beside_all_to_alls"] == {"before": 0, "after": 0}


def test_no_collective_moves_to_the_other_half_of_a_partitioned_graph() -> None:
    sketch, module = experts_weight_read_between_exchanges()
    half = "forward"
    for node in module.graph.nodes:
        if node.op == "call_function":
            half = "backward" if node.name == "all_to_all_single" else half
            node.meta["half"] = half
    before = listing(module)
    _, facts = moved(module, sketch.context())
    assert listing(module) == before and facts["moved"] == 0


def test_a_graph_without_an_all_to_all_of_experts_is_refused_and_left_as_it_was() -> None:
    sketch = Sketch()
    w, x = sketch.placeholder("w", N // 2, N), sketch.placeholder("x", N, N)
    module = sketch.finish(sketch.call(aten.sum.default, product(sketch, x, wait(sketch, gather(sketch, w))), at=""))
    before = listing(module)
    with pytest.raises(PassError) as refused:
        dense_traffic(module, replace(sketch.context(), groups=GroupTable(GROUPS)))
    assert refused.value.finds_nothing and listing(module) == before
    assert str(refused.value) == (
        "PassError: there is no all-to-all that other traffic could be kept away from\n"
        '  expected: experts on more than one rank, whose all-to-alls the model annotates {"EP": "dispatch"} or '
        '{"EP": "combine"}\n'
        "  found: all-to-alls of dispatch and combine in the graph: 0\n"
        "  fix: leave out dense_traffic"
    )


def test_an_all_to_all_that_is_read_without_a_wait_is_refused() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", N, N)
    module = sketch.finish(sketch.call(aten.sum.default, exchange(sketch, x), at=""))
    with pytest.raises(PassError, match="cannot determine when the all-to-all `all_to_all_single` must have arrived"):
        dense_traffic(module, replace(sketch.context(), groups=GroupTable(GROUPS)))

"""The order that the overlap pass gives, what it leaves alone, and what it refuses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from bitproof.harness.case import Chunking, Parallelism, Pipeline
from bitproof.harness.errors import PassError
from bitproof.harness.graph.analysis.dependencies import dependencies
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.passes.overlap import find_places, overlap, schedule
from bitproof.harness.graph.passes.overlap.costs import Cost, CostLine, CostModel, node_costs
from bitproof.harness.graph.passes.overlap.timeline import simulate
from bitproof.harness.graph.staged.cuts import Cuts
from bitproof.reference.parallel.mesh import Mesh
from tests.harness.graph.graphs import Sketch, bits, calls, listing, verify
from tests.ranks import on_ranks

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

LAYER = "layers.0"


def line(fixed: float, per_unit: float = 0.0) -> CostLine:
    return CostLine(fixed, per_unit, points=1, r2=1.0, median_relative_error=0.0)


SIMPLE = {
    "view": line(0),
    "host_sync": line(0),
    "memory": line(1),
    "all_to_all_single/2": line(3),
    "all_gather_into_tensor/2": line(3),
    "launch all_to_all_single/2": line(0),
    "launch all_gather_into_tensor/2": line(0),
}
"""Every operator takes 1, every collective 3."""


@pytest.fixture
def context_of(tmp_path: Path) -> Callable[..., PassContext]:
    """The context of a sketch whose layers are chunked, with the simple costs, changed as told."""

    def make(sketch: Sketch, modules: str = "layers.*", **changed: CostLine) -> PassContext:
        path = tmp_path / "costs.json"
        CostModel({"machine": "by hand"}, SIMPLE | changed).save(path)
        return replace(sketch.context(modules), pipeline=Pipeline(overlap=True, overlap_costs=str(path)))

    return make


def chunk_call(sketch: Sketch, chunk: int | None, target: Any, *args: Any, **kwargs: Any) -> Node:
    node = sketch.call(target, *args, at=kwargs.pop("at", LAYER), **kwargs)
    if chunk is not None:
        node.meta["chunk"] = chunk
    return node


def all_to_all(sketch: Sketch, chunk: int | None, x: Node, received: Any = (1, 1), **kwargs: Any) -> tuple[Node, Node]:
    launch = chunk_call(sketch, chunk, c10d.all_to_all_single.default, x, [*received], [1, 1], "ep", **kwargs)
    return launch, chunk_call(sketch, chunk, c10d.wait_tensor.default, launch, **kwargs)


def forward_of_two_chunks(sketch: Sketch) -> GraphModule:
    """Each chunk: sin, an all-to-all of counts, host syncs, one of rows, neg; and cos, which needs none of that."""
    xs = [sketch.placeholder(name, 2, 4) for name in ("x", "y")]
    count = sketch.placeholder("count", 2, dtype=torch.int64)
    ends = []
    for chunk, x in enumerate(xs):
        rows = chunk_call(sketch, chunk, aten.sin.default, x)
        _, counts = all_to_all(sketch, chunk, count)
        parts = [chunk_call(sketch, chunk, aten.select.int, counts, 0, i) for i in (0, 1)]
        received = [chunk_call(sketch, chunk, aten._local_scalar_dense.default, part) for part in parts]
        _, arrived = all_to_all(sketch, chunk, rows, received)
        ends.append(chunk_call(sketch, chunk, aten.neg.default, arrived))
        ends.append(chunk_call(sketch, chunk, aten.cos.default, x))
    return sketch.finish(*ends)


def backward_of_two_chunks(sketch: Sketch) -> GraphModule:
    """Each chunk: a weight's gradient (mul) and its collective, then exp, an all-to-all and neg."""
    gradients = [sketch.placeholder(name, 2, 4) for name in ("g", "h")]
    ends = []
    for chunk, gradient in enumerate(gradients):
        weight = chunk_call(sketch, chunk, aten.mul.Tensor, gradient, gradient, backward=True)
        reduce = chunk_call(sketch, chunk, c10d.all_gather_into_tensor.default, weight, 2, "fsdp", backward=True)
        ends.append(chunk_call(sketch, chunk, c10d.wait_tensor.default, reduce, backward=True))
        rows = chunk_call(sketch, chunk, aten.exp.default, gradient, backward=True)
        _, arrived = all_to_all(sketch, chunk, rows, backward=True)
        ends.append(chunk_call(sketch, chunk, aten.neg.default, arrived, backward=True))
    return sketch.finish(*ends)


GRAPHS = [forward_of_two_chunks, backward_of_two_chunks]


def order(module: GraphModule) -> str:
    """The nodes' names without placeholders and output, in order."""
    return " ".join(text.split(" =")[0] for text in listing(module)[:-1])


def seconds(timeline: dict[str, Any], direction: str) -> tuple[float, ...]:
    """Of one direction in the facts: all-to-alls in flight, blocked at their waits, hidden."""
    of = timeline[direction]
    return of["all_to_all_seconds"], of["blocked_seconds"], of["hidden_seconds"]


def test_in_forward_what_needs_no_all_to_all_runs_while_one_is_in_flight(context_of) -> None:
    sketch = Sketch()
    module, context = forward_of_two_chunks(sketch), context_of(sketch)
    assert order(module) == (
        "sin all_to_all_single wait_tensor select select_1 _local_scalar_dense _local_scalar_dense_1 "
        "all_to_all_single_1 wait_tensor_1 neg cos "
        "sin_1 all_to_all_single_2 wait_tensor_2 select_2 select_3 _local_scalar_dense_2 _local_scalar_dense_3 "
        "all_to_all_single_3 wait_tensor_3 neg_1 cos_1"
    )
    module = overlap(module, context)
    verify(module)
    assert order(module) == (
        "all_to_all_single all_to_all_single_2 sin cos sin_1 "
        "wait_tensor select select_1 _local_scalar_dense _local_scalar_dense_1 all_to_all_single_1 cos_1 "
        "wait_tensor_2 select_2 select_3 _local_scalar_dense_2 _local_scalar_dense_3 all_to_all_single_3 "
        "wait_tensor_1 neg wait_tensor_3 neg_1"
    )
    before, after = context.facts.pop("before"), context.facts.pop("after")
    assert context.facts == {
        **{"all_to_alls": 4, "in_chunks": 4, "in_flight": 4, "reordered": True},
        **{"costs": "costs.json", "fitted_on": {"machine": "by hand"}},
    }
    assert (before["step_seconds"], after["step_seconds"]) == (18.0, 13.0)
    assert seconds(before, "forward") == (12.0, 12.0, 0.0)
    assert seconds(after, "forward") == (12.0, 7.0, 5.0)
    assert after["forward"]["hidden_fraction"] == 0.416667
    assert seconds(after, "backward") == (0.0, 0.0, 0.0)


def test_in_backward_an_all_to_all_is_launched_before_the_weight_gradients(context_of) -> None:
    sketch = Sketch()
    module, context = backward_of_two_chunks(sketch), context_of(sketch)
    assert order(module) == (
        "mul all_gather_into_tensor wait_tensor exp all_to_all_single wait_tensor_1 neg "
        "mul_1 all_gather_into_tensor_1 wait_tensor_2 exp_1 all_to_all_single_1 wait_tensor_3 neg_1"
    )
    module = overlap(module, context)
    verify(module)
    assert order(module) == (
        "exp all_to_all_single mul all_gather_into_tensor exp_1 all_to_all_single_1 mul_1 "
        "wait_tensor_1 neg wait_tensor all_gather_into_tensor_1 wait_tensor_2 wait_tensor_3 neg_1"
    )
    before, after = context.facts["before"], context.facts["after"]
    assert (before["step_seconds"], after["step_seconds"]) == (18.0, 9.0)
    assert seconds(before, "backward") == (6.0, 6.0, 0.0)
    # Nothing waits for an all-to-all any more, but for 2 of 6 the rank stands at the weights' waits.
    assert seconds(after, "backward") == (6.0, 0.0, 4.0)


def test_without_a_model_every_all_to_all_is_taken_to_outlast_what_may_hide_it(context_of) -> None:
    sketch = Sketch()
    module = forward_of_two_chunks(sketch)
    for node in module.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            with sketch.mode:
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    context = replace(context_of(sketch), pipeline=Pipeline(overlap=True))
    module = overlap(module, context)
    assert order(module) == (
        "all_to_all_single all_to_all_single_2 sin cos sin_1 cos_1 "
        "wait_tensor select select_1 _local_scalar_dense _local_scalar_dense_1 all_to_all_single_1 "
        "wait_tensor_2 select_2 select_3 _local_scalar_dense_2 _local_scalar_dense_3 all_to_all_single_3 "
        "wait_tensor_1 neg wait_tensor_3 neg_1"
    )
    reported = {"all_to_alls": 4, "in_chunks": 4, "in_flight": 3, "reordered": True}
    assert context.facts == reported | {"costs": None}


@pytest.mark.ranks
def test_the_order_changes_no_bit_on_real_ranks(context_of) -> None:
    programs = []
    for make in GRAPHS:
        first, second = Sketch(), Sketch()
        before, after = make(first), overlap(make(second), context_of(second))
        assert order(before) != order(after)
        programs.append((before, after))

    def body(mesh: Mesh) -> bool:
        generator = torch.Generator().manual_seed(mesh.rank)
        tensors = [torch.randn(2, 4, generator=generator) for _ in range(2)]
        inputs = [[*tensors, torch.ones(2, dtype=torch.int64)], tensors]
        return all(
            torch.equal(bits(x), bits(y))
            for (before, after), arguments in zip(programs, inputs, strict=True)
            for x, y in zip(before(*arguments), after(*arguments), strict=True)
        )

    assert on_ranks(Parallelism(world_size=2, ep=2), body) == [True, True]


def test_a_graph_that_gets_no_shorter_stays_as_it_is(context_of) -> None:
    sketch = Sketch()
    module = forward_of_two_chunks(sketch)
    context = context_of(sketch, **{"all_to_all_single/2": line(0)})
    before = listing(module)
    assert listing(overlap(module, context)) == before
    assert context.facts["before"] == context.facts["after"]
    assert context.facts["after"]["forward"]["hidden_fraction"] == 0.0
    assert (context.facts["in_flight"], context.facts["reordered"]) == (0, False)


def test_of_all_to_alls_in_chunks_and_outside_of_them_the_report_shows_how_many_are_in_flight(context_of) -> None:
    sketch = Sketch()
    ends = []
    for chunk in (0, 1, None):
        x = sketch.placeholder(f"x{chunk}", 2, 4)
        _, arrived = all_to_all(sketch, chunk, chunk_call(sketch, chunk, aten.sin.default, x))
        ends.append(chunk_call(sketch, chunk, aten.neg.default, arrived))
    module, context = sketch.finish(*ends), context_of(sketch)
    overlap(module, context)
    reported = {name: context.facts[name] for name in ("all_to_alls", "in_chunks", "in_flight", "reordered")}
    assert reported == {"all_to_alls": 3, "in_chunks": 2, "in_flight": 3, "reordered": True}


def test_a_graph_without_all_to_alls_is_refused_as_overlap_would_do_nothing(context_of) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2, 4)
    ends = [chunk_call(sketch, chunk, aten.sin.default, x) for chunk in (1, 0)]
    with pytest.raises(PassError) as error:
        overlap(sketch.finish(*ends), context_of(sketch, "layers.*.attention"))
    assert str(error.value) == (
        "PassError: there is no all-to-all that overlap could hide\n"
        "  expected: an expert layer's all-to-alls within the chunked modules, as with modules='layers.*.moe', which "
        'the model annotates {"EP": "dispatch"} or {"EP": "combine"}\n'
        "  found: all-to-alls of dispatch and combine in the graph: 0; in chunks of 'layers.*.attention': 0\n"
        "  fix: chunk modules with experts on more than one rank, or leave out overlap"
    )


def layer_of_tensor_ranks(sketch: Sketch) -> GraphModule:
    """Each chunk: its part of the sequence is gathered, sin, and a reduce-scatter of the ranks' parts; neg."""
    ends = []
    for chunk, name in enumerate(("x", "y")):
        x = sketch.placeholder(name, 2, 4)
        launch = chunk_call(sketch, chunk, c10d.all_gather_into_tensor.default, x, 2, "tp")
        whole = chunk_call(sketch, chunk, c10d.wait_tensor.default, launch)
        part = chunk_call(sketch, chunk, aten.sin.default, whole)
        launch = chunk_call(sketch, chunk, c10d.reduce_scatter_tensor.default, part, "sum", 2, "tp")
        ends.append(
            chunk_call(sketch, chunk, aten.neg.default, chunk_call(sketch, chunk, c10d.wait_tensor.default, launch))
        )
    return sketch.finish(*ends)


def of_tensor_ranks(context: PassContext, **settings: bool) -> PassContext:
    pipeline = replace(context.pipeline, **{"overlap": False, "async_tensor": True} | settings)
    return replace(context, pipeline=pipeline, chunk_groups=frozenset({"tp", "ep"}))


REDUCING = {"reduce_scatter_tensor/2": line(3), "launch reduce_scatter_tensor/2": line(0)}


def test_a_chunks_gather_runs_during_the_other_chunks_compute_and_so_does_its_reduce_scatter(context_of) -> None:
    """Transfers of a group follow each other: 12 s in all, 3 s of them beside sin, sin_1 and neg."""
    sketch = Sketch()
    module, context = layer_of_tensor_ranks(sketch), of_tensor_ranks(context_of(sketch, **REDUCING))
    assert order(module) == (
        "all_gather_into_tensor wait_tensor sin reduce_scatter_tensor wait_tensor_1 neg "
        "all_gather_into_tensor_1 wait_tensor_2 sin_1 reduce_scatter_tensor_1 wait_tensor_3 neg_1"
    )
    module = overlap(module, context)
    verify(module)
    assert order(module) == (
        "all_gather_into_tensor all_gather_into_tensor_1 wait_tensor sin reduce_scatter_tensor "
        "wait_tensor_2 sin_1 reduce_scatter_tensor_1 wait_tensor_1 neg wait_tensor_3 neg_1"
    )
    assert context.facts["of_tensor_group"] == {
        "collectives": 4,
        "in_flight": 3,
        "hidden_fraction_before": 0.0,
        "hidden_fraction_after": 0.25,
    }
    assert context.facts["after"]["step_seconds"] < context.facts["before"]["step_seconds"]


@pytest.mark.ranks
def test_the_order_of_a_tensor_groups_collectives_changes_no_bit_on_real_ranks(context_of) -> None:
    first, second = Sketch(), Sketch()
    before = layer_of_tensor_ranks(first)
    after = overlap(layer_of_tensor_ranks(second), of_tensor_ranks(context_of(second, **REDUCING)))
    assert order(before) != order(after)

    def body(mesh: Mesh) -> bool:
        generator = torch.Generator().manual_seed(mesh.rank)
        inputs = [torch.randn(2, 4, generator=generator) for _ in range(2)]
        return all(torch.equal(bits(x), bits(y)) for x, y in zip(before(*inputs), after(*inputs), strict=True))

    assert on_ranks(Parallelism(world_size=2, ep=1, tp=2), body) == [True, True]


def test_without_the_setting_the_collectives_of_a_tensor_group_are_like_others_and_with_both_all_are_hidden(
    context_of,
) -> None:
    sketch = Sketch()
    ends = []
    for chunk, name in enumerate(("x", "y")):
        x = sketch.placeholder(name, 2, 4)
        launch = chunk_call(sketch, chunk, c10d.all_gather_into_tensor.default, x, 2, "tp")
        whole = chunk_call(sketch, chunk, aten.sin.default, chunk_call(sketch, chunk, c10d.wait_tensor.default, launch))
        _, arrived = all_to_all(sketch, chunk, whole, (2, 2))
        ends.append(chunk_call(sketch, chunk, aten.neg.default, arrived))
    module = sketch.finish(*ends)
    context = of_tensor_ranks(context_of(sketch), overlap=True)
    overlap(module, context)
    assert context.facts["all_to_alls"] == 2 and context.facts["of_tensor_group"]["collectives"] == 2
    context = of_tensor_ranks(context_of(sketch), overlap=True, async_tensor=False)
    overlap(module, context)
    assert context.facts["all_to_alls"] == 2 and "of_tensor_group" not in context.facts


@pytest.mark.parametrize("reason", ["no chunks", "no collective", "another group"])
def test_a_graph_without_a_chunks_collective_of_a_tensor_group_is_refused(context_of, reason: str) -> None:
    sketch = Sketch()
    module = layer_of_tensor_ranks(sketch)
    context = of_tensor_ranks(context_of(sketch, **REDUCING))
    if reason == "another group":
        context = replace(context, chunk_groups=frozenset({"ep"}))
    elif reason == "no chunks":
        context = replace(context, chunking=None)
        for node in module.graph.nodes:
            node.meta.pop("chunk", None)
    else:
        sketch = Sketch()
        x = sketch.placeholder("x", 2, 4)
        module = sketch.finish(*(chunk_call(sketch, chunk, aten.sin.default, x) for chunk in (0, 1)))
    before = listing(module)
    with pytest.raises(PassError) as refused:
        overlap(module, context)
    assert refused.value.finds_nothing and listing(module) == before
    found = "chunks of nothing, as the case has no chunking" if reason == "no chunks" else "chunks of 'layers.*': 0"
    assert str(refused.value) == (
        "PassError: there is no collective of a tensor group that async_tensor could hide\n"
        "  expected: layers that a tensor group splits within the chunked modules, as with tp=2 and "
        "modules='layers.*'\n"
        f"  found: collectives of a tensor group in {found}\n"
        "  fix: chunk modules that are split over tensor ranks, or leave out async_tensor"
    )


def test_a_collective_of_a_tensor_group_that_is_read_without_its_wait_is_refused(context_of) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2, 4)
    launch = chunk_call(sketch, 0, c10d.all_gather_into_tensor.default, x, 2, "tp")
    module = sketch.finish(chunk_call(sketch, 0, aten.sin.default, launch))
    with pytest.raises(PassError, match="when the collective `all_gather_into_tensor` must have arrived"):
        overlap(module, of_tensor_ranks(context_of(sketch)))


def test_a_stage_may_lack_one_of_both_and_not_all(context_of) -> None:
    sketch = Sketch()
    context = of_tensor_ranks(context_of(sketch, **REDUCING), overlap=True)
    with pytest.raises(PassError, match="no all-to-all that overlap could hide"):
        overlap(layer_of_tensor_ranks(sketch), context)
    staged = replace(context, cuts=Cuts(num_stages=2, num_layers=2))
    sketch = Sketch()
    overlap(layer_of_tensor_ranks(sketch), replace(staged, chunk_symbol=sketch.symbol))
    sketch = Sketch()
    x = sketch.placeholder("x", 2, 4)
    with pytest.raises(PassError, match="no all-to-all that overlap could hide"):
        overlap(sketch.finish(sketch.call(aten.sin.default, x)), replace(staged, chunk_symbol=sketch.symbol))


@pytest.mark.parametrize("marked", [True, False])
def test_a_graph_whose_all_to_alls_run_in_no_chunks_is_refused(context_of, marked: bool) -> None:
    sketch = Sketch()
    module = forward_of_two_chunks(sketch)
    context = context_of(sketch)
    if marked:
        context = replace(context, chunking=None)
    else:
        for node in module.graph.nodes:
            node.meta.pop("chunk", None)
    found = "nothing, as the case has no chunking" if marked else "'layers.*': 0"
    with pytest.raises(PassError, match=f"in the graph: 4; in chunks of {re.escape(found)}\n"):
        overlap(module, context)


def test_an_all_to_all_that_no_part_of_a_mixture_launches_is_not_hidden(context_of) -> None:
    sketch = Sketch()
    module = forward_of_two_chunks(sketch)
    for node in calls(module, "all_to_all_single"):
        node.meta["origin"] = node.meta["origin"]._replace(part="compute")
    with pytest.raises(PassError, match=r"in the graph: 0; in chunks of 'layers\.\*': 0"):
        overlap(module, context_of(sketch))


def test_sizes_of_what_is_in_flight_may_be_read_but_not_its_data(context_of) -> None:
    def module(reader: Any, *arguments: Any) -> tuple[GraphModule, PassContext]:
        sketch = Sketch()
        x = sketch.placeholder("x", 2, 4)
        launch, arrived = all_to_all(sketch, 0, x)
        read = chunk_call(sketch, 0, reader, launch, *arguments)
        return sketch.finish(arrived, read), context_of(sketch)

    overlap(*module(aten.sym_size.int, 0))
    with pytest.raises(PassError) as error:
        overlap(*module(aten.neg.default))
    assert str(error.value) == (
        "PassError: cannot determine when the all-to-all `all_to_all_single` must have arrived\n"
        "  expected: one wait, and no other reader but of its size\n"
        "  found: waits: 1; other readers: neg\n"
        "  came from: layers.0 (forward, dispatch)"
    )


def test_an_all_to_all_that_nothing_waits_for_is_refused(context_of) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2, 4)
    launch, _ = all_to_all(sketch, 0, x)
    chunk_call(sketch, 0, c10d.wait_tensor.default, launch)
    module = sketch.finish(next(iter(launch.users)))
    with pytest.raises(PassError) as error:
        overlap(module, context_of(sketch))
    assert str(error.value) == (
        "PassError: cannot determine when the all-to-all `all_to_all_single` must have arrived\n"
        "  expected: one wait, and no other reader but of its size\n"
        "  found: waits: 2; other readers: none\n"
        "  came from: layers.0 (forward, dispatch)"
    )


def test_a_write_to_what_is_being_sent_stays_behind_the_wait(context_of) -> None:
    sketch = Sketch()
    x, y = sketch.placeholder("x", 2, 4), sketch.placeholder("y", 2, 4)
    _, arrived = all_to_all(sketch, 0, x)
    first = chunk_call(sketch, 0, aten.neg.default, arrived)
    write = chunk_call(sketch, 1, aten.add_.Tensor, x, 1)
    second = chunk_call(sketch, 1, aten.sin.default, y)
    module = overlap(sketch.finish(first, write, second), context_of(sketch))
    assert order(module) == "all_to_all_single sin wait_tensor neg add_"


def test_a_wait_goes_back_to_its_first_reader_in_case_the_model_is_wrong(context_of) -> None:
    sketch = Sketch()
    x, late = sketch.placeholder("x", 2, 4), sketch.placeholder("y", 2, 4)
    _, arrived = all_to_all(sketch, 0, x)
    for _ in range(5):
        late = chunk_call(sketch, 1, aten.cos.default, late)
    module = overlap(sketch.finish(chunk_call(sketch, 1, aten.add.Tensor, arrived, late)), context_of(sketch))
    # The model has it arrive after three cosines.
    assert order(module) == "all_to_all_single cos cos_1 cos_2 cos_3 cos_4 wait_tensor add"


# -- regions and windows ----------------------------------------------------------------------------


def test_what_is_written_once_belongs_to_the_chunk_whose_nodes_follow_it() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2, 4)

    def add(chunk: int | None, at: str | None = LAYER, backward: bool = False) -> Node:
        return chunk_call(sketch, chunk, aten.neg.default, x, at=at, backward=backward)

    kinds = [
        (None, "embedding"), (0, LAYER), (1, LAYER), (None, LAYER), (0, None), (1, LAYER), (None, LAYER), (1, LAYER),
        (None, LAYER), (0, "layers.1.a"), (1, "layers.1.b"), (None, "norm"),
    ]  # fmt: skip
    nodes = [add(*kind) for kind in kinds] + [add(0, "layers.1", True)]
    module = sketch.finish(*nodes)
    places = find_places(list(module.graph.nodes), Chunking(dim="batch", modules="layers.*"))
    assert [places[node][:2] for node in nodes] == [
        (0, 2), (1, 0), (1, 1), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0),
    ]  # fmt: skip


def random_graph(choose: random.Random) -> tuple[Sketch, GraphModule]:
    """Several layers of calls on random earlier values: all-to-alls, other collectives, writes, random draws."""
    sketch = Sketch()
    buffers = [sketch.placeholder(f"buffer{i}", 2, 4) for i in range(2)]
    values = [sketch.placeholder("x", 2, 4), *buffers]
    ends: list[Node] = []
    for layer in range(4):
        for _ in range(15):
            chunk, at = choose.choice([0, 0, 1, 1, None]), f"layers.{layer}"
            x, y = choose.choice(values), choose.choice(values[-6:])
            kind = choose.randrange(7)
            if kind == 0:
                values.append(all_to_all(sketch, chunk, x, at=at)[1])
            elif kind == 1:
                launch = chunk_call(sketch, chunk, c10d.all_to_all_single.default, x, [1, 1], [1, 1], "ep", at=at)
                later = chunk_call(sketch, chunk, aten.neg.default, y, at=at)
                values += [later, chunk_call(sketch, chunk, c10d.wait_tensor.default, launch, at=at)]
            elif kind == 2:
                launch = chunk_call(sketch, chunk, c10d.all_gather_into_tensor.default, x, 1, "fsdp", at=at)
                values.append(chunk_call(sketch, chunk, c10d.wait_tensor.default, launch, at=at))
            elif kind == 3:
                ends.append(chunk_call(sketch, chunk, aten.add_.Tensor, choose.choice(buffers), y, at=at))
            elif kind == 4:
                values.append(chunk_call(sketch, chunk, aten.bernoulli.default, x, at=at))
            else:
                values.append(chunk_call(sketch, chunk, aten.add.Tensor, x, y, at=at))
    return sketch, sketch.finish(*values[-3:], *ends)


@pytest.mark.parametrize("seed", range(20))
def test_any_graph_keeps_its_dependencies_and_its_window(seed: int, context_of) -> None:
    choose = random.Random(seed)
    sketch, module = random_graph(choose)
    costs = {kind: line(choose.uniform(0.1, 3)) for kind in SIMPLE}
    context = context_of(sketch, **costs)
    nodes = list(module.graph.nodes)
    needed, places = dependencies(module.graph), find_places(nodes, context.chunking)
    shorter = simulate(nodes, node_costs(module.graph, CostModel.load(Path(context.pipeline.overlap_costs)))).time

    overlap(module, context)
    reordered = list(module.graph.nodes)
    position = {node: index for index, node in enumerate(reordered)}
    assert set(reordered) == set(nodes)
    assert all(position[earlier] < position[node] for node in nodes for earlier in needed[node])
    oldest_left = len(nodes)
    for node in reversed(reordered):  # whatever comes after a node is of its own region, the one before, or later
        if node.op != "call_function" or "wait_tensor" in node.name:  # a wait may go back to its first reader
            continue
        oldest_left = min(oldest_left, places[node].region)
        assert places[node].region <= oldest_left + 1
    assert context.facts["after"]["step_seconds"] <= round(shorter, 9)

    sketch, module = random_graph(random.Random(seed))
    overlap(module, context)
    assert [node.name for node in module.graph.nodes] == [node.name for node in reordered]


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_is_in_topological_order_by_itself(seed: int) -> None:
    _, module = random_graph(random.Random(seed))
    nodes = list(module.graph.nodes)
    before = dependencies(module.graph)
    after = {node: [later for later in nodes if node in before[later]] for node in nodes}
    places = find_places(nodes, Chunking(dim="batch", modules="layers.*"))
    costs = {node: Cost(1.0, 2.0 if "_to_all" in node.name else 0.0) for node in nodes}
    scheduled = schedule(nodes, before, after, places, costs, {node for node in nodes if "_to_all" in node.name})
    position = {node: index for index, node in enumerate(scheduled)}
    assert len(position) == len(nodes)
    assert all(position[earlier] < position[node] for node in nodes for earlier in before[node])

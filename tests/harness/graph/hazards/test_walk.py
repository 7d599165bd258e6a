"""What races with a collective or a copy, beside its nearest neighbour that does not."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx import Graph, GraphModule, Node, Tracer, symbolic_trace

from bitproof.harness.graph.hazards import MOST_SHOWN, find_hazards, hazard_lines
from bitproof.harness.graph.offload_operators import OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD
from tests.harness.graph.graphs import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def races(module: GraphModule) -> list[str]:
    """How calls meet in one memory, in the graph's order, each way once."""
    hazards, deadlocks = find_hazards(module)
    assert not deadlocks
    return list(dict.fromkeys(hazard.does + hazard.second.where for hazard in hazards))


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


def test_a_launch_without_a_wait_is_a_race_if_its_result_is_read_or_its_operand_outlives_the_step() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 2)
    own = sketch.call(aten.neg.default, x)
    sketch.call(c10d.all_gather_into_tensor.default, own, 2, "fsdp")
    assert races(sketch.finish(x)) == []
    sketch = Sketch()
    x, launch = gathered(sketch)
    assert races(sketch.finish(sketch.call(aten.neg.default, x))) == [
        "the step ends while `all_gather_into_tensor` sends memory that its caller may write"
    ]
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


def test_of_many_races_the_first_are_reported_and_the_others_counted() -> None:
    sketch = Sketch()
    _, launch = gathered(sketch)
    found = hazard_lines(sketch.finish(*(sketch.call(aten.neg.default, launch) for _ in range(5))))
    assert (len(found), found[-1]) == (MOST_SHOWN + 1, "and 2 more")


# -- copies to host memory and back ------------------------------------------------------------------


def offloaded(sketch: Sketch, name: str = "p"):
    """A value of the graph's own, and the launch of its copy to host memory."""
    x = sketch.call(aten.neg.default, sketch.placeholder(name, 2))
    return x, sketch.call(OFFLOAD, x)


def there_and_back(sketch: Sketch, *without: Any, name: str = "p"):
    """A value, its copy in host memory and the one that came back; `without` are waits that are left out."""
    x, host = offloaded(sketch, name)
    host = host if WAIT_OFFLOAD in without else sketch.call(WAIT_OFFLOAD, host, x)
    back = sketch.call(RELOAD, host, "cpu")
    return x, host, back if WAIT_RELOAD in without else sketch.call(WAIT_RELOAD, back)


def test_a_value_that_goes_to_host_memory_and_comes_back_through_both_waits_is_no_race() -> None:
    sketch = Sketch()
    _, _, back = there_and_back(sketch)
    assert races(sketch.finish(sketch.call(aten.exp.default, back))) == []


@pytest.mark.parametrize(
    ("without", "reported"),
    [
        ([WAIT_RELOAD], ["`exp` reads what `reload` brings, before anything waits for it"]),
        ([WAIT_OFFLOAD], ["`reload` reads what `offload` brings, before anything waits for it"]),
    ],
    ids=["of the reload", "of the offload, the reload's kept"],
)
def test_a_copy_that_is_read_without_its_wait_is_a_race(without: list[Any], reported: list[str]) -> None:
    sketch = Sketch()
    _, _, back = there_and_back(sketch, *without)
    assert races(sketch.finish(sketch.call(aten.exp.default, back))) == reported


def test_of_several_copies_the_one_is_named_whose_wait_is_left_out_or_is_a_wait_for_another() -> None:
    sketch = Sketch()
    _, _, first = there_and_back(sketch)
    _, _, second = there_and_back(sketch, WAIT_RELOAD, name="q")
    sketch.call(WAIT_RELOAD, first)
    found = races(sketch.finish(sketch.call(aten.add.Tensor, first, second)))
    assert found == ["`add` reads what `reload_1` brings, before anything waits for it"]


@pytest.mark.parametrize("wait", [c10d.wait_tensor.default, WAIT_RELOAD], ids=["of a collective", "of a reload"])
def test_a_wait_of_another_kind_ends_no_copy(wait: Any) -> None:
    sketch = Sketch()
    x, host = offloaded(sketch)
    host = sketch.call(wait, host)
    found = races(sketch.finish(sketch.call(aten.exp.default, host), x))
    assert found == ["`exp` reads what `offload` brings, before anything waits for it"]


def test_a_wait_behind_the_first_reader_comes_too_late_and_its_later_readers_are_right() -> None:
    sketch = Sketch()
    _, _, back = there_and_back(sketch, WAIT_RELOAD)
    early = sketch.call(aten.exp.default, back)
    late = sketch.call(aten.neg.default, sketch.call(WAIT_RELOAD, back))
    assert races(sketch.finish(early, late)) == ["`exp` reads what `reload` brings, before anything waits for it"]


@pytest.mark.parametrize("through_view", [False, True])
def test_what_an_offload_copies_may_be_read_and_not_written_until_its_wait(through_view: bool) -> None:
    def step(write: bool, late: bool) -> list[str]:
        sketch = Sketch()
        x, host = offloaded(sketch)
        waited = sketch.call(WAIT_OFFLOAD, host, x) if late else None
        target = sketch.call(aten.view.default, x, [2, 1]) if through_view else x
        other = sketch.call(aten.mul_.Tensor, target, 2) if write else sketch.call(aten.mul.Tensor, target, 2)
        waited = waited or sketch.call(WAIT_OFFLOAD, host, x)
        return races(sketch.finish(waited, other))

    assert step(write=False, late=False) == step(write=True, late=True) == []
    assert step(write=True, late=False) == ["`mul_` writes what `offload` copies, before anything waits for it"]


def test_what_a_reload_copies_and_where_it_arrives_may_not_be_written_until_its_wait() -> None:
    for at_source in (True, False):
        sketch = Sketch()
        _, host, back = there_and_back(sketch, WAIT_RELOAD)
        sketch.call(aten.zero_.default, host if at_source else back)
        text = "copies" if at_source else "brings"
        found = races(sketch.finish(sketch.call(WAIT_RELOAD, back)))
        assert found == [f"`zero_` writes what `reload` {text}, before anything waits for it"]


def test_what_an_offload_copies_must_be_kept_until_its_wait_be_it_by_a_view_and_what_a_reload_copies_need_not() -> None:
    freed = "`wait_offload` waits for `offload`, which copies what is not kept until then"
    for keeps in ("itself", "a view", "the graph's input", "nothing"):
        sketch = Sketch()
        x, host = offloaded(sketch)
        if keeps == "the graph's input":
            x = sketch.placeholder("q", 2)
            host = sketch.call(OFFLOAD, x)
        view = sketch.call(aten.view.default, x, [2, 1])
        other = sketch.call(aten.exp.default, sketch.placeholder("other", 2))
        held = {"itself": x, "a view": view}.get(keeps, other)
        graph = sketch.finish(sketch.call(WAIT_OFFLOAD, host, held))
        assert races(graph) == ([freed] if keeps == "nothing" else [])
        use = "a use of that memory at `wait_offload` or later"
        assert {hazard.missing for hazard in find_hazards(graph)[0]} == ({use} if keeps == "nothing" else set())


def test_memory_that_is_let_go_by_size_while_it_is_copied_is_a_race() -> None:
    sketch = Sketch()
    x, host = offloaded(sketch)
    sketch.call(torch.ops.inductor.resize_storage_bytes_.default, x, 0)
    found = races(sketch.finish(sketch.call(WAIT_OFFLOAD, host, x)))
    assert found == ["`resize_storage_bytes_` writes what `offload` copies, before anything waits for it"]


def test_what_is_in_flight_is_followed_into_its_parts() -> None:
    sketch = Sketch()
    _, _, back = there_and_back(sketch, WAIT_RELOAD)
    half = sketch.call(operator.getitem, sketch.call(aten.split.Tensor, back, 1), 1)
    early = sketch.call(aten.exp.default, half)
    found = races(sketch.finish(early, sketch.call(WAIT_RELOAD, back)))
    assert found == ["`exp` reads what `reload` brings, before anything waits for it"]


def test_one_of_several_results_may_be_written_while_another_is_copied_and_parts_of_one_tensor_may_not() -> None:
    for target, reported in ((aten.max.dim, []), (aten.split.Tensor, ["`add_` writes what `offload` copies"])):
        sketch = Sketch()
        pair = sketch.call(target, sketch.placeholder("x", 2, 2), 1)
        first, second = sketch.call(operator.getitem, pair, 0), sketch.call(operator.getitem, pair, 1)
        host = sketch.call(OFFLOAD, first)
        sketch.call(aten.add_.Tensor, second, 1)
        found = races(sketch.finish(sketch.call(WAIT_OFFLOAD, host, first)))
        assert found == [f"{line}, before anything waits for it" for line in reported]


def test_a_copy_that_the_graph_returns_in_flight_is_a_race_also_as_a_view() -> None:
    sketch = Sketch()
    _, _, back = there_and_back(sketch, WAIT_RELOAD)
    found = races(sketch.finish(sketch.call(aten.view.default, back, [2, 1])))
    assert found == ["the step's result reads what `reload` brings, before anything waits for it"]


def test_to_reshape_what_is_in_flight_reads_it_where_no_view_will_do() -> None:
    for transposed in (False, True):
        sketch = Sketch()
        x = sketch.placeholder("x", 2, 3)
        launch = sketch.call(c10d.all_reduce.default, x, "sum", "fsdp")
        shown = sketch.call(aten.t.default, launch) if transposed else launch
        flat = sketch.call(aten.reshape.default, shown, [6])
        found = races(sketch.finish(sketch.call(c10d.wait_tensor.default, launch), flat))
        lines = ["`reshape` reads what `all_reduce` brings, before anything waits for it"]
        assert found == (lines if transposed else [])


def test_a_collective_in_place_brings_what_it_sends() -> None:
    for waits in (True, False):
        sketch = Sketch()
        x = sketch.call(aten.neg.default, sketch.placeholder("x", 2))
        launch = sketch.call(c10d.all_reduce_.default, x, "sum", "fsdp")
        if waits:
            sketch.call(c10d.wait_tensor.default, launch)
        found = races(sketch.finish(sketch.call(aten.exp.default, x)))
        assert found == ([] if waits else ["`exp` reads what `all_reduce_` brings, before anything waits for it"])


# -- graphs within graphs, and anybody's --------------------------------------------------------------


class Reloads(nn.Module):
    """Reloads, and waits unless it is to leave that to others; `reads` before that."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.waits = waits

    def forward(self, host):
        back = torch.ops.bitproof.reload(host, "cpu")
        return torch.ops.bitproof.wait_reload(back) if self.waits else back


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, waits: bool) -> None:
        super().__init__()
        self.inner, self.waits = inner, waits

    def forward(self, host):
        back = self.inner(host)
        if self.waits:
            back = torch.ops.bitproof.wait_reload(back)
        return back.transpose(0, 1)[0] * 2


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_a_graph_that_calls_graphs_is_followed_into_them_wherever_the_wait_is(inside: bool, outside: bool) -> None:
    inner = symbolic_trace(Reloads(inside))
    module = GraphModule(outer := Outer(inner, outside), _Leafy().trace(outer))
    lines = ["`mul` reads what `reload` brings, before anything waits for it"]
    assert races(module) == ([] if inside or outside else lines)


class _Leafy(Tracer):
    """Leaves calls of graphs as calls, as torch's partitioners do."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, GraphModule)


def test_what_a_graph_within_a_graph_reads_in_flight_is_reported_with_its_name() -> None:
    class Reads(nn.Module):
        def forward(self, x):
            return x * 2

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = symbolic_trace(Reads())

        def forward(self, host):
            back = torch.ops.bitproof.reload(host, "cpu")
            return self.inner(back) + torch.ops.bitproof.wait_reload(back)

    module = GraphModule(calls := Calls(), _Leafy().trace(calls))
    assert races(module) == ["`mul` reads what `reload` brings, before anything waits for it (nested graph inner)"]


def test_a_graph_of_methods_and_functions_is_read_by_their_names() -> None:
    def races_of(change: Any) -> list[str]:
        def step(x):
            host = torch.ops.bitproof.offload(x)
            shown = change(x)
            return torch.ops.bitproof.wait_offload(host, x), shown

        return races(symbolic_trace(step))

    harmless = [lambda x: torch.transpose(x, 0, 1)[0], lambda x: x + 1, lambda x: x.shape[0], lambda x: x.size(0)]
    for change in harmless:
        assert races_of(change) == []

    def by_function(function: Any, *given: Any) -> Any:
        return lambda x: x.tracer.create_proxy("call_function", function, (x, *given), {})

    harmful = {
        "add_": lambda x: x.view(-1).add_(1),
        "iadd": by_function(operator.iadd, 1),
        "setitem": by_function(operator.setitem, 0, 1.0),
        "relu": lambda x: torch.nn.functional.relu(x, inplace=True),
        "add": lambda x: torch.add(x, 1, out=x),
    }
    for name, change in harmful.items():
        [reported] = races_of(change)
        assert reported == f"`{name}` writes what `offload` copies, before anything waits for it"


def test_of_what_is_in_flight_the_shape_may_be_asked_and_an_index_by_a_tensor_reads() -> None:
    def step(host, index, late):
        back = torch.ops.bitproof.reload(host, "cpu")
        rows = back.size(0)
        part = back[index] if late is None else back[late]
        return torch.ops.bitproof.wait_reload(back), part.shape, rows

    assert races(symbolic_trace(lambda host, index: step(host, index, 0))) == []
    found = races(symbolic_trace(lambda host, index: step(host, index, None)))
    assert found == ["`getitem` reads what `reload` brings, before anything waits for it"]


@pytest.mark.parametrize("waits", [True, False])
def test_an_exported_program_is_read_with_the_graphs_that_it_wraps(waits: bool) -> None:
    class Step(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x.neg()
                host = torch.ops.bitproof.offload(y)
                host = torch.ops.bitproof.wait_offload(host, y) if waits else host
            return host + x

    module = torch.export.export(Step(), (torch.ones(2, requires_grad=True),)).module()
    assert isinstance(module, GraphModule)
    found = races(module)
    assert found == [] if waits else len(found) == 1 and "brings" in found[0]


# -- calls that run graphs or operators that they are given ------------------------------------------------

higher = torch.ops.higher_order


def body(*calls: Any) -> GraphModule:
    """A graph that hands its input to one call after the other."""
    graph = Graph()
    found = graph.placeholder("x")
    for target, *args in calls:
        found = graph.call_function(target, (found, *args))
    graph.output((found,))
    return GraphModule({}, graph)


WRITES, READS = body((aten.add_.Tensor, 1)), body((aten.neg.default,))
ADDS = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}


def meeting(call: Any, first: GraphModule, second: GraphModule = READS) -> list[tuple[str, str]]:
    """The hazards of a call beside a reduction of `y`, into `sum`, that is waited for later. The call's graphs are
    `first` and `second`."""
    graph = Graph()
    y = graph.call_function(aten.neg.default, (graph.placeholder("x"),))
    launch = graph.call_function(c10d.all_reduce.default, (y, "sum", "fsdp"))
    made = call(graph.call_function, graph.get_attr("first"), graph.get_attr("second"), y, launch)
    graph.output((graph.call_function(c10d.wait_tensor.default, (launch,)), made))
    root = nn.Module()
    root.add_module("first", first)
    root.add_module("second", second)
    hazards, deadlocks = find_hazards(GraphModule(root, graph))
    assert not deadlocks
    return [(str(hazard.first), str(hazard.second)) for hazard in hazards]


IN_GRAPHS = {
    "cond": lambda call, first, second, y, launch: call(higher.cond, (True, first, second, (y,))),
    "its other branch": lambda call, first, second, y, launch: call(higher.cond, (True, second, first, (y,))),
    "while_loop": lambda call, first, second, y, launch: call(higher.while_loop, (second, first, (y,), ())),
    "scan": lambda call, first, second, y, launch: call(higher.scan, (first, [y], [], [])),
    "checkpoint": lambda call, first, second, y, launch: call(
        higher.tag_activation_checkpoint, (first, y), {"use_reentrant": False}
    ),
    "a call behind another": lambda call, first, second, y, launch: call(control_deps, ((launch,), first, y)),
}


@pytest.mark.parametrize("name", IN_GRAPHS)
def test_a_graph_that_a_call_runs_may_read_what_is_sent_and_not_write_it(name: str) -> None:
    assert meeting(IN_GRAPHS[name], READS) == []
    assert meeting(IN_GRAPHS[name], WRITES) == [("all_reduce_default", "add__tensor")]


def kernel(call: Any, *unused: Any, **given: Any) -> Any:
    return call(triton_kernel_wrapper_mutation, (), ADDS | {"kwargs": given})


@pytest.mark.parametrize(
    ("call", "writes"),
    [
        (lambda call, a, b, y, launch: call(with_effects, (None, aten.add_.Tensor, y, 1)), True),
        (lambda call, a, b, y, launch: call(with_effects, (None, aten.add.Tensor, y, 1)), False),
        (lambda call, a, b, y, launch: call(higher.run_with_rng_state, (None, aten.normal_.default, y)), True),
        (lambda call, a, b, y, launch: call(higher.auto_functionalized, (aten.add_.Tensor,), {"self": y}), False),
        (lambda call, a, b, y, launch: kernel(call, x=y, n=4), True),
        (lambda call, a, b, y, launch: kernel(call, n=4), False),
    ],
    ids=["with effects", "with none", "random", "functional", "a kernel", "a kernel of numbers"],
)
def test_an_operator_that_a_call_runs_has_its_effects(call: Any, writes: bool) -> None:
    assert [first for first, _ in meeting(call, READS)] == (["all_reduce_default"] if writes else [])


def test_a_kernel_writes_what_torchs_analysis_of_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel_wrap, "get_mutated_tensors", lambda *given: ["out"])

    def run(**names: str) -> list[tuple[str, str]]:
        def call(call: Any, a: Any, b: Any, y: Node, launch: Node) -> Any:
            other = call(aten.exp.default, (y,))
            return kernel(call, **{name: {"y": y, "other": other}[which] for name, which in names.items()})

        return meeting(call, READS)

    assert run(x="y", out="other") == []
    assert run(x="other", out="y") == [("all_reduce_default", "triton_kernel_wrapper_mutation")]


def test_a_wait_in_one_branch_alone_is_none_behind_the_choice() -> None:
    waits, leaves = body((c10d.wait_tensor.default,), (aten.neg.default,)), body((aten.view.default, [-1]))

    def both(call: Any, first: Node, second: Node, y: Node, launch: Node) -> Any:
        return call(aten.neg.default, (call(higher.cond, (True, first, second, (launch,))), launch)[1:])

    def found(first: GraphModule, second: GraphModule) -> list[str]:
        return [second for _, second in meeting(both, first, second) if second.startswith("neg")]

    assert found(waits, waits) == []
    assert found(waits, leaves) == found(leaves, waits) == found(leaves, leaves) == ["neg_default_1"]


def test_dropout_that_is_off_shows_what_it_was_given() -> None:
    for trains, reported in (
        (False, ["`add_` writes what `all_reduce` sends, before anything waits for it"]),
        (True, []),
    ):
        sketch = Sketch()
        x = sketch.call(aten.neg.default, sketch.placeholder("x", 2))
        shown = sketch.call(aten.dropout.default, x, 0.5, trains)
        launch = sketch.call(c10d.all_reduce.default, x, "sum", "fsdp")
        sketch.call(aten.add_.Tensor, shown, 1)
        assert races(sketch.finish(sketch.call(c10d.wait_tensor.default, launch))) == reported

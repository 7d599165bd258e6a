"""More than forty hazards, each planted into a graph that has none: found, with the two calls that nothing orders.

The graphs are small ones by hand, a foreign one of torch's stream operators, and the traced step of moe_seq.
"""

from __future__ import annotations

import copy
import importlib
import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from bitproof.harness.graph import operators
from bitproof.harness.graph.hazards import find_hazards, find_queue_entries, hazard_lines
from bitproof.harness.graph.offload_operators import OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD
from bitproof.harness.operators.crossings import find_deadlocks
from bitproof.harness.systems.graph_program import GraphProgram
from tests.harness.graph.graphs import Sketch

importlib.import_module("torch._functorch._activation_offloading.offload_ops")
importlib.import_module("torch._dynamo.variables.streams")

aten, c10d, streams, ao = (getattr(torch.ops, name) for name in ("aten", "_c10d_functional", "streams", "ao"))
WAIT = c10d.wait_tensor.default
GROUPS = {"fsdp": ((0, 1), (2, 3)), "ep": ((0, 2), (1, 3))}

Graph = tuple[GraphModule, dict[str, Node]]
Plant = Callable[[GraphModule, dict[str, Node]], tuple[str, str]]


def pairs(module: GraphModule) -> set[tuple[str, str]]:
    """The earlier and the later call of each hazard."""
    return {(str(hazard.first), str(hazard.second)) for hazard in find_hazards(module, GROUPS)[0]}


def drop(node: Node) -> None:
    """Take a wait away: its readers read what it was handed."""
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def insert(before: Node, target: Any, *args: Any) -> Node:
    with before.graph.inserting_before(before):
        return before.graph.call_function(target, args)


# -- a step by hand: collectives of two groups, an activation that goes to host memory and back ----------


def step() -> Graph:
    sketch = Sketch()
    x, w = sketch.placeholder("x", 4, 2), sketch.placeholder("w", 2)
    kept = sketch.call(aten.exp.default, x)
    gather = sketch.call(c10d.all_gather_into_tensor.default, w, 2, "fsdp")
    gathered = sketch.call(WAIT, gather)
    sent = sketch.call(aten.mul.Tensor, x, 2)
    exchange = sketch.call(c10d.all_to_all_single.default, sent, [2, 2], [2, 2], "ep")
    beside = sketch.call(aten.sin.default, kept)
    received = sketch.call(WAIT, exchange)
    offload = sketch.call(OFFLOAD, kept)
    other = sketch.call(aten.cos.default, received)
    host = sketch.call(WAIT_OFFLOAD, offload, kept)
    reload = sketch.call(RELOAD, host, "cpu")
    between = sketch.call(aten.neg.default, other)
    back = sketch.call(WAIT_RELOAD, reload)
    used = sketch.call(aten.mul.Tensor, back, between)
    reduce = sketch.call(c10d.reduce_scatter_tensor.default, used, "sum", 2, "fsdp")
    grad = sketch.call(WAIT, reduce)
    end = sketch.call(aten.tanh.default, gathered)
    module = sketch.finish(beside, grad, end)
    known = dict(
        x=x, w=w, kept=kept, gather=gather, gathered=gathered, sent=sent, exchange=exchange, beside=beside,
        received=received, offload=offload, other=other, host=host, reload=reload, between=between, back=back,
        used=used, reduce=reduce, grad=grad, end=end,
    )  # fmt: skip
    return module, {name: next(n for n in module.graph.nodes if n.name == node.name) for name, node in known.items()}


def late(wait: str, after: str) -> Plant:
    """A wait that comes behind a reader of what it waits for."""

    def plant(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
        at[after].replace_input_with(at[wait], at[wait].args[0])
        at[after].append(at[wait])
        return at[wait].args[0].name, at[after].name

    return plant


def without(wait: str, reader: str) -> Plant:
    def plant(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
        launch = at[wait].args[0]
        drop(at[wait])
        return launch.name, reader if reader == "output" else at[reader].name

    return plant


def write(launch: str, memory: str, before: str, target: Any, *args: Any, view: bool = False) -> Plant:
    """Memory that a launch still reads or fills is written in place."""

    def plant(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
        seen = at[memory]
        if view:
            seen = insert(at[before], aten.slice.Tensor, seen, 0, 0, 1)
        return at[launch].name, insert(at[before], target, seen, *args).name

    return plant


def swapped(first: str, second: str, reader: str) -> Plant:
    """A wait for the wrong launch."""

    def plant(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
        launch = at[first].args[0]
        at[first].args = (at[second].args[0], *at[first].args[1:])
        at[reader].replace_input_with(at[first], launch)
        return launch.name, at[reader].name

    return plant


def other_kind(wait: str, target: Any, reader: str) -> Plant:
    def plant(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
        launch = at[wait].args[0]
        at[wait].target, at[wait].args = target, (launch, launch)[: len(target._schema.arguments)]
        return launch.name, at[reader].name

    return plant


def let_go(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    at["host"].args = (at["offload"], at["other"])
    return at["offload"].name, at["host"].name


def resized(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    return at["offload"].name, insert(at["host"], torch.ops.inductor.resize_storage_bytes_.default, at["kept"], 0).name


def read_through_view(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    view = insert(at["between"], aten.view.default, at["reload"], [8])
    return at["reload"].name, insert(at["between"], aten.exp.default, view).name


def returned(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    [output] = module.graph.find_nodes(op="output")
    output.replace_input_with(at["grad"], at["reduce"])
    module.graph.erase_node(at["grad"])
    return at["reduce"].name, "output"


def sent_again(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    """One collective's result goes into the next before its wait."""
    early = insert(at["received"], c10d.all_reduce.default, at["exchange"], "sum", "fsdp")
    return at["exchange"].name, early.name


def offloaded_early(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    """What a collective still fills is copied away."""
    return at["exchange"].name, insert(at["received"], OFFLOAD, at["exchange"]).name


def left_in_flight(launch: str, wait: str, reader: str) -> Plant:
    """What the caller keeps is still read or filled when the step ends."""

    def plant(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
        at[reader].replace_all_uses_with(at["beside"])
        for name in (reader, wait):
            module.graph.erase_node(at[name])
        return at[launch].name, "output"

    return plant


def reduced_in_place(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    """A parameter that the step leaves to a collective without a wait."""
    return insert(at["end"], c10d.all_reduce_.default, at["w"], "sum", "fsdp").name, "output"


def other_name(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    """A tensor that was given the memory of one that is being sent."""
    other = insert(at["beside"], aten.empty_like.default, at["x"])
    insert(at["beside"], aten.set_.source_Tensor, other, at["sent"])
    return at["exchange"].name, insert(at["beside"], aten.add_.Tensor, other, 1).name


def waited_twice(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    """Two waits for one reload, and none for what is read."""
    again = insert(at["back"], RELOAD, at["host"], "cpu")
    insert(at["back"], WAIT_RELOAD, at["reload"])
    at["used"].replace_input_with(at["back"], again)
    return again.name, at["used"].name


def several_at_once(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    """A foreach writes a list in which one tensor is being sent."""
    return at["exchange"].name, insert(at["beside"], aten._foreach_add_.Scalar, [at["kept"], at["sent"]], 1).name


def statistics(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    """Running statistics are written, though the operator's schema does not say so."""
    given = (at["kept"], None, None, at["w"], at["w"], True, 0.1, 1e-5)
    return at["gather"].name, insert(at["gathered"], aten.native_batch_norm.default, *given).name


def in_place_collective(module: GraphModule, at: dict[str, Node]) -> tuple[str, str]:
    return at["exchange"].name, insert(at["received"], c10d.all_reduce_.default, at["sent"], "sum", "fsdp").name


IN_STEP: dict[str, Plant] = {
    "no wait for an all-gather": without("gathered", "end"),
    "no wait for an all-to-all": without("received", "other"),
    "no wait for a reduction, read by the caller": returned,
    "no wait for an offload": without("host", "reload"),
    "no wait for a reload": without("back", "used"),
    "a wait for an all-to-all behind its reader": late("received", "other"),
    "a wait for a reload behind its reader": late("back", "used"),
    "a wait for another collective": swapped("received", "gathered", "other"),
    "a wait for a reduction before its launch's operand is there": sent_again,
    "a collective's wait for a reload": other_kind("back", WAIT, "used"),
    "a reload's wait for an offload": other_kind("host", WAIT_RELOAD, "reload"),
    "an offload's wait for a collective": other_kind("received", WAIT_OFFLOAD, "other"),
    "what an all-to-all fills is offloaded": offloaded_early,
    "what an all-to-all sends is written": write("exchange", "sent", "beside", aten.add_.Tensor, 1),
    "what an all-to-all sends is zeroed": write("exchange", "sent", "beside", aten.zero_.default),
    "a part of what an all-to-all sends is written": write(
        "exchange", "sent", "beside", aten.mul_.Tensor, 2, view=True
    ),
    "what an all-to-all fills is written": write("exchange", "exchange", "beside", aten.fill_.Scalar, 0.0),
    "what an all-to-all sends is reduced in place": in_place_collective,
    "a parameter is written while it is gathered": write("gather", "w", "gathered", aten.add_.Tensor, 1),
    "an activation is written while it is offloaded": write("offload", "kept", "host", aten.add_.Tensor, 1),
    "a view of it is written while it is offloaded": write("offload", "kept", "host", aten.neg_.default, view=True),
    "a pinned buffer is written while it is filled": write("offload", "offload", "host", aten.zero_.default),
    "a pinned buffer is written while it is copied back": write("reload", "host", "back", aten.zero_.default),
    "what a reload fills is written": write("reload", "reload", "back", aten.zero_.default),
    "an activation is let go while it is offloaded": let_go,
    "an activation is resized to nothing while it is offloaded": resized,
    "a reload is read through a view": read_through_view,
    "a parameter is still being gathered when the step ends": left_in_flight("gather", "gathered", "end"),
    "a parameter is still being reduced when the step ends": reduced_in_place,
    "what is sent is written under another name": other_name,
    "what is sent is written among others": several_at_once,
    "running statistics are written while they are gathered": statistics,
    "two waits for one reload and none for the other": waited_twice,
}


@pytest.mark.parametrize("name", IN_STEP)
def test_a_hazard_in_a_step_is_found_with_the_right_pair(name: str) -> None:
    module, at = step()
    assert find_hazards(module, GROUPS) == ([], [])
    expected = IN_STEP[name](module, at)
    module.graph.lint()
    assert expected in pairs(module)


def test_a_hazard_says_both_calls_with_module_operator_and_node_the_memory_and_what_is_missing() -> None:
    module, at = step()
    at["back"].replace_all_uses_with(at["reload"])
    module.graph.erase_node(at["back"])
    assert hazard_lines(module) == [
        "`mul_1` reads what `reload` brings, before anything waits for it: `mul_1` is aten.mul.Tensor in layers.0 "
        "(forward), `reload` is bitproof.reload.default in layers.0 (forward); memory of `reload`; missing: "
        "bitproof.wait_reload of `reload` before `mul_1`"
    ]


# -- streams and events, as a graph of torch's own names them ---------------------------------------------


def two_streams(*without: str, order: str = "event", event_of: int = 1) -> list[str]:
    """A graph of two streams and of all that it needs, less what is left out; its hazards as pairs."""
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    y = sketch.call(aten.exp.default, x)  # on stream 0
    if "first wait" not in without:
        sketch.call(streams.wait_stream.default, 1, 0)
    sketch.call(streams.fork.default, 0, 1)
    z = sketch.call(aten.sin.default, y)  # on stream 1
    if "write" in without:
        sketch.call(aten.add_.Tensor, y, 1)
    sketch.call(streams.record_event.default, 7, event_of)
    late = sketch.call(aten.cos.default, y) if order == "event too early" else None
    sketch.call(streams.join.default, 1, 0)
    if "record_stream" not in without:
        sketch.call(streams.record_stream.default, y, 1)
    if order == "freed":
        sketch.call(aten.neg.default, y)
    if "wait" not in without:
        sketch.call(streams.wait_event.default, 7, 0)
    result = late if late is not None else z
    sketch.call(streams.record_stream.default, result, 0)
    used = sketch.call(aten.mul.Tensor, result, 2)
    return [f"{hazard.first} {hazard.second}" for hazard in find_hazards(sketch.finish(used))[0]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"without": ["wait"]}, ["sin mul"]),
        ({"without": ["first wait"]}, ["exp sin"]),
        ({"event_of": 0}, ["sin mul"]),
        ({"order": "event too early"}, ["cos mul"]),
        ({"order": "freed"}, []),
        ({"order": "freed", "without": ["record_stream"]}, ["sin neg"]),
        ({"order": "freed", "without": ["write"]}, ["add_ neg"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_streams_are_ordered_by_events_and_waits_alone(given: dict[str, Any], expected: list[str]) -> None:
    assert two_streams(*given.pop("without", ()), **given) == expected


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize(("target", "does"), [(aten.add_.Tensor, "writes"), (aten.add.Tensor, "reads")])
def test_a_stream_that_uses_what_the_caller_keeps_is_joined_before_the_step_ends(
    target: Any, does: str, joins: bool
) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    y = sketch.call(aten.neg.default, x)
    sketch.call(streams.wait_stream.default, 1, 0)
    sketch.call(streams.fork.default, 0, 1)
    sketch.call(target, x, 1)
    sketch.call(streams.join.default, 1, 0)
    if joins:
        sketch.call(streams.wait_stream.default, 0, 1)
    hazards, _ = find_hazards(sketch.finish(y))
    name = target._opname
    assert [f"{h.first} {h.second}" for h in hazards] == ([] if joins else [f"{name} output"])
    assert all(h.does.startswith(f"the step ends while `{name}` {does}, on stream 1, memory") for h in hazards)
    assert {h.missing for h in hazards} <= {f"a wait, before the end of the step, for an event recorded after `{name}`"}


def test_a_transfer_of_torchs_own_lets_go_of_its_source_at_the_wait_and_not_before() -> None:
    def found(*, waits: bool, uses: bool) -> list[str]:
        sketch = Sketch()
        x = sketch.call(aten.exp.default, sketch.placeholder("x", 4))
        host = sketch.call(ao.offload.default, x)
        if waits:
            host = sketch.call(ao.wait_tensor.default, host, x)
        after = [sketch.call(aten.sin.default, x)] if uses else []
        back = sketch.call(ao.reload.default, host, torch.device("cpu"))
        back = sketch.call(ao.wait_tensor.default, back, host)
        return [f"{h.first} {h.second}" for h in find_hazards(sketch.finish(back, *after))[0]]

    assert found(waits=True, uses=False) == []
    assert found(waits=False, uses=False)[0] == "offload reload"
    assert found(waits=True, uses=True) == ["wait_tensor sin"]


Call = Callable[..., Node]
cuda, cpu = torch.device("cuda"), torch.device("cpu")


def _copied(call: Call, x: Node, *, right: bool, **options: Any) -> Node:
    host = call(aten._to_copy.default, x, at="cpu", device=cpu, **options)
    if right and options:
        call(streams.synchronize_stream.default, 0)
    return host


def _read_by_the_host(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    return call(aten.exp.default, _copied(call, x, right=right, non_blocking=True), at="cpu")


def _read_as_a_number(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    return call(aten._local_scalar_dense.default, _copied(call, x, right=right, non_blocking=True), at="cpu")


def _read_by_the_caller(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    return _copied(call, x, right=right, non_blocking=True)


def _blocking(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    return call(aten.exp.default, _copied(call, x, right=right, **({} if right else {"non_blocking": True})), at="cpu")


def _written_while_it_is_sent(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    pinned = call(aten.neg.default, buffer, at="cpu")
    there = call(aten._to_copy.default, pinned, device=cuda, non_blocking=True)
    if right:
        call(streams.synchronize_stream.default, 0)
    call(aten.add_.Tensor, pinned, 1, at="cpu")
    return there


def _reused_on_another_stream(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    call(streams.wait_stream.default, 1, 0)
    call(streams.fork.default, 0, 1)
    call(aten.copy_.default, buffer, x, True, at="cpu")
    call(streams.record_stream.default, x, 1)
    call(streams.join.default, 1, 0)
    if right:
        call(streams.wait_stream.default, 0, 1)
    call(aten.copy_.default, buffer, y, True, at="cpu")
    call(streams.wait_stream.default, 0, 1)
    call(streams.synchronize_stream.default, 0)
    return call(aten.exp.default, buffer, at="cpu")


def _zeroed_behind_a_streams_wait(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    """The wait for a reload holds up a stream; the host goes on."""
    own = call(aten.neg.default, x)
    host = call(WAIT_OFFLOAD, call(OFFLOAD, own, at="cpu"), own, at="cpu")
    back = call(WAIT_RELOAD, call(RELOAD, host, "cuda"))
    if right:
        call(streams.synchronize_device.default, 0)
    call(aten.zero_.default, host, at="cpu")
    return back


def _zeroed_behind_what_the_host_waited_for_too_early(
    call: Call, x: Node, y: Node, buffer: Node, right: bool, sync: Any = streams.synchronize_device.default
) -> Node:
    """The host waits for the stream before the stream waits for the copy."""
    own = call(aten.neg.default, x)
    host = call(WAIT_OFFLOAD, call(OFFLOAD, own, at="cpu"), own, at="cpu")
    begun = call(RELOAD, host, "cuda")
    call(sync, y if sync is aten.nonzero.default else 0)
    back = call(WAIT_RELOAD, begun)
    if right:
        call(streams.synchronize_device.default, 0)
    call(aten.zero_.default, host, at="cpu")
    return back


def _zeroed_behind_a_size_that_was_read_too_early(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    """The call itself has the host wait for its result, and is the last before the stream's wait."""
    return _zeroed_behind_what_the_host_waited_for_too_early(call, x, y, buffer, right, aten.nonzero.default)


def _written_on_another_stream(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    """No memory of the host's takes part."""
    own = call(aten.neg.default, x)
    call(streams.wait_stream.default, 1, 0)
    call(streams.fork.default, 0, 1)
    call(aten.add_.Tensor, own, 1)
    call(streams.join.default, 1, 0)
    if right:
        call(streams.wait_stream.default, 0, 1)
    call(streams.record_stream.default, own, 1)
    return call(aten.exp.default, own)


def _read_of_a_pair(call: Call, x: Node, y: Node, buffer: Node, right: bool) -> Node:
    """One of two results is the host's."""
    both = call(aten.aminmax.default, x, at="both")
    if right:
        call(streams.synchronize_stream.default, 0)
    return call(aten.exp.default, call(operator.getitem, both, 1, at="cpu"), at="cpu")


PINNED: dict[Callable[..., Node], str] = {
    _read_by_the_host: "_to_copy_default exp_default",
    _read_as_a_number: "_to_copy_default _local_scalar_dense_default",
    _read_by_the_caller: "_to_copy_default output",
    _blocking: "_to_copy_default exp_default",
    _written_while_it_is_sent: "_to_copy_default add__tensor",
    _reused_on_another_stream: "copy__default copy__default_1",
    _zeroed_behind_a_streams_wait: "reload_default zero__default",
    _zeroed_behind_what_the_host_waited_for_too_early: "reload_default zero__default",
    _zeroed_behind_a_size_that_was_read_too_early: "reload_default zero__default",
    _written_on_another_stream: "add__tensor exp_default",
    _read_of_a_pair: "aminmax_default exp_default",
}
"""Uses of pinned memory, of which each needs the host, or a stream, to wait; and the pair where it does not."""


@pytest.mark.parametrize("use", PINNED)
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_pinned_memory_is_used_again_only_once_its_copy_is_done(use: Callable[..., Node], right: bool) -> None:
    graph = torch.fx.Graph()
    on: dict[str, Any] = {"cuda": OnCuda(torch.empty(4)), "cpu": torch.empty(4)}
    on["both"] = on["cuda"], on["cpu"]

    def call(target: Any, *args: Any, at: str = "cuda", **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = on[at]
        return node

    given = [graph.placeholder(name) for name in ("x", "y", "buffer")]
    for node, at in zip(given, ("cuda", "cuda", "cpu"), strict=True):
        node.meta["val"] = on[at]
    graph.output(use(call, *given, right))
    found = [f"{h.first} {h.second}" for h in find_hazards(GraphModule({}, graph))[0]]
    assert found == [] if right else PINNED[use] in found


class OnCuda(torch.Tensor):
    """A value that says it lies on a GPU, on a machine without."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> OnCuda:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, device=torch.device("cuda"))  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


# -- groups, and the order of turns -----------------------------------------------------------------------

WRONG_GROUPS: dict[str, tuple[Callable[[dict[str, Node]], None], str]] = {
    "a group that no rank has": (lambda at: _rename(at["exchange"], "tp"), "names the group tp, which no rank has"),
    "a gather that counts other ranks": (
        lambda at: _replace(at["gather"], 1, 4),
        "counts 4 ranks in the group fsdp, which has 2",
    ),
    "an all-to-all with splits for other ranks": (
        lambda at: _replace(at["exchange"], 1, [1, 1, 1, 1]),
        "splits its rows for 4 ranks of the group ep, which has 2",
    ),
}


def _rename(node: Node, group: str) -> None:
    node.args = (*node.args[:-1], group)


def _replace(node: Node, place: int, value: Any) -> None:
    node.args = (*node.args[:place], value, *node.args[place + 1 :])


@pytest.mark.parametrize("name", WRONG_GROUPS)
def test_a_collective_that_does_not_fit_its_group_may_have_ranks_wait_for_ever(name: str) -> None:
    module, at = step()
    change, why = WRONG_GROUPS[name]
    change(at)
    [deadlock] = find_hazards(module, GROUPS)[1]
    assert why in str(deadlock) and deadlock.call in (at["gather"].name, at["exchange"].name)


@pytest.mark.parametrize(
    ("partition", "why"),
    [(((0, 1), (1, 2, 3)), "rank 1 belongs twice"), (((0, 1), (2,)), "rank 3 does not belong")],
    ids=["a rank in two instances", "a rank in none"],
)
def test_a_partition_that_is_none_is_named(partition: Any, why: str) -> None:
    _, deadlocks = find_hazards(step()[0], GROUPS | {"fsdp": partition})
    assert any(why in str(deadlock) for deadlock in deadlocks)


def test_a_collective_that_data_chooses_to_run_is_named() -> None:
    class Chooses(torch.nn.Module):
        def forward(self, flag: torch.Tensor, x: torch.Tensor) -> Any:
            def yes(x: torch.Tensor) -> torch.Tensor:
                return x.sin()

            return torch.cond(flag, yes, lambda x: x.cos(), (x,))

    module = torch.export.export(Chooses(), (torch.tensor(True), torch.ones(2))).module()
    assert isinstance(module, GraphModule) and find_hazards(module) == ([], [])
    inner = next(m for name, m in module.named_modules() if name.startswith("true_graph"))
    [sin] = [n for n in inner.graph.nodes if n.target is aten.sin.default]  # type: ignore[union-attr]
    with inner.graph.inserting_before(sin):  # type: ignore[union-attr,operator]
        launch = inner.graph.call_function(c10d.all_reduce.default, (sin.args[0], "sum", "fsdp"))  # type: ignore[union-attr,operator]
        sin.args = (inner.graph.call_function(WAIT, (launch,)),)  # type: ignore[union-attr,operator]
    hazards, [deadlock] = find_hazards(module)
    assert not hazards and "chooses it by data, which may differ between ranks" in str(deadlock)


def of_ranks(change: Callable[[int, GraphModule, dict[str, Node]], None]) -> list[str]:
    """What four ranks wait for whose graphs are the step, changed."""
    turns = {}
    for rank in range(4):
        module, at = step()
        change(rank, module, at)
        turns[rank] = find_queue_entries(module, lambda name, rank=rank: next(p for p in GROUPS[name] if rank in p))
    return [str(deadlock) for deadlock in find_deadlocks(turns)]


def test_ranks_of_one_graph_do_not_wait_for_each_other() -> None:
    assert of_ranks(lambda rank, module, at: None) == []


def test_groups_whose_launches_differ_between_ranks_cross_and_where_is_named() -> None:
    def crossing(rank: int, module: GraphModule, at: dict[str, Node]) -> None:
        if rank in (0, 3):  # their exchange comes first: 0 waits for 2, 2 for 3, 3 for 1, 1 for 0
            at["kept"].prepend(at["sent"])
            at["kept"].prepend(at["exchange"])
            at["kept"].prepend(at["received"])

    found = of_ranks(crossing)
    assert found and all("wait for each other for ever" in line for line in found)
    assert any("rank 1 waits in `wait_tensor` (_c10d_functional.all_gather_into_tensor.default" in x for x in found)


def test_a_rank_that_launches_less_or_something_else_is_named() -> None:
    def less(rank: int, module: GraphModule, at: dict[str, Node]) -> None:
        if rank == 3:
            at["end"].replace_input_with(at["gathered"], at["w"])
            module.graph.erase_node(at["gathered"])
            module.graph.erase_node(at["gather"])

    assert any("rank 2 waits in" in line and "for rank 3" in line for line in of_ranks(less))

    def other(rank: int, module: GraphModule, at: dict[str, Node]) -> None:
        if rank == 3:
            at["gather"].target, at["gather"].args = c10d.all_reduce.default, (at["w"], "sum", "fsdp")

    [found] = of_ranks(other)
    assert "rank 2 launches" in found and "rank 3 launches" in found and "in group fsdp" in found


def test_launches_of_one_group_that_a_rank_swaps_are_named_though_they_are_of_one_kind() -> None:
    def module_of(rank: int, *, sizes: tuple[int, int], swaps: bool) -> GraphModule:
        sketch = Sketch()
        x, y = (sketch.placeholder(name, size) for name, size in zip("xy", sizes, strict=True))
        first = sketch.call(c10d.all_gather_into_tensor.default, x, 2, "fsdp")
        second = sketch.call(c10d.all_gather_into_tensor.default, y, 2, "fsdp")
        if swaps and rank == 1:
            first.prepend(second)
        return sketch.finish(sketch.call(WAIT, first), sketch.call(WAIT, second))

    def found(**how: Any) -> list[str]:
        ranks_in = {"fsdp": (0, 1)}.get
        turns = {rank: find_queue_entries(module_of(rank, **how), ranks_in) for rank in range(2)}
        return [str(deadlock) for deadlock in find_deadlocks(turns)]

    for sizes in ((4, 4), (4, 8)):
        assert found(sizes=sizes, swaps=False) == []
        [line] = found(sizes=sizes, swaps=True)
        assert "rank 0 launches `all_gather_into_tensor` (" in line
        assert "where rank 1 launches `all_gather_into_tensor_1` (" in line
    assert f"of float32[{sizes[0]}] where" in line and f"of float32[{sizes[1]}], in group fsdp" in line


def test_a_launch_that_meets_one_of_another_dtype_or_group_is_named() -> None:
    def wider(rank: int, module: GraphModule, at: dict[str, Node]) -> None:
        if rank == 3:
            wide = insert(at["gather"], aten.to.dtype, at["w"], torch.float64)
            wide.meta["val"] = at["w"].meta["val"].double()
            at["gather"].replace_input_with(at["w"], wide)

    [found] = of_ranks(wider)
    assert "of float32[2]" in found and "of float64[2], in group fsdp" in found

    def elsewhere(rank: int, module: GraphModule, at: dict[str, Node]) -> None:
        if rank == 3:
            _rename(at["exchange"], "fsdp")

    assert any("for rank 3" in line for line in of_ranks(elsewhere))


def test_what_one_rank_sends_and_another_receives_is_no_turn_of_their_group() -> None:
    def sending(rank: int, module: GraphModule, at: dict[str, Node]) -> None:
        if rank < 2:  # rank 0 sends, rank 1 receives
            operator = c10d.isend.default if rank == 0 else c10d.irecv.default
            begun = insert(at["end"], operator, at["sent"], 1 - rank, 0, "fsdp")
            insert(at["end"], WAIT, begun)

    assert of_ranks(sending) == []


# -- the traced step of moe_seq ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> GraphProgram:
    from bitproof.builtin_cases import CASES
    from bitproof.harness.machine.determinism import set_determinism
    from tests.small import small
    from tests.traced import prepare_traced

    set_determinism(0)
    return prepare_traced(small(CASES["experts_seq_world2"]))


@pytest.fixture(scope="module")
def moe_seq(program: GraphProgram) -> GraphModule:
    return program.module


def test_the_traced_step_has_no_hazard_and_the_check_takes_a_twentieth_of_the_passes(program: GraphProgram) -> None:
    took = []
    for _ in range(3):
        began = time.process_time()
        assert find_hazards(program.module) == ([], [])
        took.append(time.process_time() - began)
    assert min(took) < 0.05 * sum(report.seconds for report in program.passes)


def plant_early_read(module: GraphModule, wait: Node) -> tuple[str, str]:
    launch = wait.args[0]
    early = insert(wait, aten.sum.default, launch)
    return launch.name, early.name


def plant_write(module: GraphModule, wait: Node) -> tuple[str, str]:
    launch = wait.args[0]
    return launch.name, insert(wait, aten.zero_.default, launch.args[0]).name


@pytest.mark.parametrize("plant", [plant_early_read, plant_write])
@pytest.mark.parametrize("operator", ["all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_a_hazard_in_the_traced_step_is_found(moe_seq: GraphModule, plant: Any, operator: str) -> None:
    module = copy.deepcopy(moe_seq)
    waits = [n for n in module.graph.nodes if operators.is_wait(n) and operators.operator_name(n.args[0]) == operator]
    for wait in (waits[0], waits[len(waits) // 2], waits[-1]):
        assert plant(module, wait) in pairs(module)

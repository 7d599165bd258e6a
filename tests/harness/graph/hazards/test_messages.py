"""Hazards of messages to one rank, of torch's own collectives, and of collectives with effects, beside right twins."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.torchbind import call_torchbind
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from bitproof.harness.graph.hazards import find_hazards, find_queue_entries
from bitproof.harness.operators.crossings import find_deadlocks
from tests.harness.graph.hazards.test_planted import OnCuda

aten, raw, c10d = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default

Body = Callable[["Draft"], Any]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group whose object has its name."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Draft:
    """A graph in the making: inputs x and y that the caller keeps, a group object, calls."""

    def __init__(self, *, boxed: bool = True, cuda: bool = False) -> None:
        self.graph, self.root = Graph(), nn.Module()
        self.value: Any = OnCuda(torch.empty(4)) if cuda else torch.empty(4)
        self.x, self.y = (self._known(self.graph.placeholder(name)) for name in "xy")
        if boxed:
            self.root.group = dist.group.WORLD.boxed()  # type: ignore[union-attr]
            self.group = self.graph.get_attr("group")
        else:
            self.group = self.graph.placeholder("group")

    def _known(self, node: Node) -> Node:
        node.meta["val"] = self.value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._known(self.graph.call_function(target, args, kwargs))

    def own(self) -> Node:
        return self.call(aten.exp.default, self.x)

    def part(self, node: Node, place: int) -> Node:
        return self.call(operator.getitem, node, place)

    def reduce(self, x: Node, runs_on: bool = True) -> Node:
        return self.call(raw.allreduce_.default, [x], self.group, None, None, runs_on)

    def wait(self, work: Node) -> Node:
        return self.graph.call_method("wait", (work,))

    def finish(self, *outputs: Any) -> GraphModule:
        self.graph.output(list(outputs))
        return GraphModule(self.root, self.graph)


def found(body: Body, **how: Any) -> list[str]:
    """The earlier and the later call of each hazard of a draft."""
    draft = Draft(**how)
    hazards, deadlocks = find_hazards(draft.finish(*body(draft)))
    return [f"{h.first} {h.second}" for h in hazards] + [str(each) for each in deadlocks]


# -- messages to one rank --------------------------------------------------------------------------------


def sends(d: Draft, *, waits: bool, writes: bool, through: str = "result") -> Any:
    x = d.own()
    begun = d.call(c10d.isend.default, x, 1, 0, "0")
    if waits:
        d.call(WAIT, begun if through == "result" else x)
    if writes:
        d.call(aten.add_.Tensor, x, 1)
    return (d.call(aten.neg.default, x),)


def receives(d: Draft, *, waits: bool, target: Any = aten.neg.default) -> Any:
    x = d.own()
    begun = d.call(c10d.irecv.default, x, 1, 0, "0")
    got = d.call(WAIT, begun) if waits else begun
    return (d.call(target, got, *([1] if target is aten.add_.Tensor else [])),)


def of_several(d: Draft, *awaited: int, writes: bool = False) -> Any:
    """One is sent, two are received; these are waited for."""
    a, b, c = (d.own() for _ in range(3))
    begun = d.call(c10d.batch_p2p_ops.default, ["isend", "irecv", "irecv"], [1, 1, 1], [0, 1, 2], [a, b, c], "0")
    for place in awaited:
        d.call(WAIT, d.part(begun, place))
    if writes:
        d.call(aten.zero_.default, a)
    return (d.call(aten.add.Tensor, b, c),)


def kept_by_the_caller(d: Draft, *, target: Any, waits: bool) -> Any:
    begun = d.call(target, d.x, 1, 0, "0")
    if waits:
        d.call(WAIT, begun)
    return (d.call(aten.neg.default, d.y),)


def received_while_it_is_sent(d: Draft, *, waits: bool) -> Any:
    """One buffer for both directions."""
    x = d.own()
    sent = d.call(c10d.isend.default, x, 1, 0, "0")
    if waits:
        d.call(WAIT, sent)
    got = d.call(WAIT, d.call(c10d.irecv.default, x, 1, 0, "0"))
    return got, d.call(WAIT, sent)


def of_torchs_own(d: Draft, *, waits: bool, receives: bool) -> Any:
    x = d.own()
    work = d.call(raw.recv_.default if receives else raw.send.default, [x], d.group, 1, 0)
    if waits:
        d.wait(work)
    return (d.call(aten.neg.default if receives else aten.zero_.default, x),)


MESSAGES: dict[str, tuple[Body, str]] = {
    "what is sent is written": (lambda d: sends(d, waits=False, writes=True), "isend_default add__tensor"),
    "what is received is read": (lambda d: receives(d, waits=False), "irecv_default neg_default"),
    "what is received is written": (
        lambda d: receives(d, waits=False, target=aten.add_.Tensor),
        "irecv_default add__tensor",
    ),
    "of several one is not waited for": (lambda d: of_several(d, 0, 1), "batch_p2p_ops_default add_tensor"),
    "of several what is sent is written": (
        lambda d: of_several(d, 1, 2, writes=True),
        "batch_p2p_ops_default zero__default",
    ),
    "the caller's is still sent": (
        lambda d: kept_by_the_caller(d, target=c10d.isend.default, waits=False),
        "isend_default output",
    ),
    "the caller's is still received": (
        lambda d: kept_by_the_caller(d, target=c10d.irecv.default, waits=False),
        "irecv_default output",
    ),
    "one buffer for both": (lambda d: received_while_it_is_sent(d, waits=False), "isend_default irecv_default"),
    "torch's own send": (lambda d: of_torchs_own(d, waits=False, receives=False), "send_default zero__default"),
    "torch's own receive": (lambda d: of_torchs_own(d, waits=False, receives=True), "recv__default neg_default"),
}
RIGHT_MESSAGES: dict[str, Body] = {
    "written behind the wait": lambda d: sends(d, waits=True, writes=True),
    "written behind a wait for what is sent": lambda d: sends(d, waits=True, writes=True, through="source"),
    "read while it is sent": lambda d: sends(d, waits=False, writes=False),
    "received and waited for": lambda d: receives(d, waits=True),
    "of several each waited for": lambda d: of_several(d, 0, 1, 2, writes=True),
    "of several what is sent is let be": lambda d: of_several(d, 1, 2),
    "the caller's, sent": lambda d: kept_by_the_caller(d, target=c10d.isend.default, waits=True),
    "the caller's, received": lambda d: kept_by_the_caller(d, target=c10d.irecv.default, waits=True),
    "one buffer, one after the other": lambda d: received_while_it_is_sent(d, waits=True),
    "torch's own send": lambda d: of_torchs_own(d, waits=True, receives=False),
    "torch's own receive": lambda d: of_torchs_own(d, waits=True, receives=True),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_whose_buffer_is_not_left_alone_until_its_wait_is_a_hazard(name: str) -> None:
    body, expected = MESSAGES[name]
    assert expected in found(body)


@pytest.mark.parametrize("name", RIGHT_MESSAGES)
def test_a_message_whose_buffer_is_left_alone_is_none(name: str) -> None:
    assert found(RIGHT_MESSAGES[name]) == []


# -- torch's own collectives, which a Work waits for -----------------------------------------------------


def reduced(d: Draft, *, waits: bool, by: str = "method", of: str = "own", runs_on: bool = True) -> Any:
    x = d.own() if of == "own" else d.x
    both = d.reduce(x, runs_on)
    if waits and by == "method":
        d.wait(d.part(both, 1))
    if waits and by == "torchbind":
        d.call(call_torchbind, d.part(both, 1), "wait")
    return (d.call(aten.neg.default, d.y if of == "caller's" else x),)


def gathered(d: Draft, *, waits: bool, writes_input: bool = False) -> Any:
    x, into = d.own(), d.own()
    work = d.call(raw.allgather_into_tensor_coalesced_.default, [into], [x], d.group)
    if waits:
        d.wait(work)
    return (d.call(aten.add_.Tensor, x, 1) if writes_input else d.call(aten.neg.default, into),)


def exchanged(d: Draft, *, waits: bool) -> Any:
    x, into = d.own(), d.own()
    work = d.call(raw.alltoall_base_.default, into, x, d.group, [], [])
    if waits:
        d.wait(work)
    return (d.call(aten.neg.default, into),)


def scattered(d: Draft, *, waits_for: int) -> Any:
    """Two at once; the wait may be for the other."""
    x, into, y, other = (d.own() for _ in range(4))
    works = [
        d.part(d.call(raw._reduce_scatter_base_.default, target, source, d.group, None), 1)
        for target, source in ((into, x), (other, y))
    ]
    d.wait(works[waits_for])
    return (d.call(aten.neg.default, into),)


OWN: dict[str, tuple[Body, str]] = {
    "reduced, no wait": (lambda d: reduced(d, waits=False), "allreduce__default neg_default"),
    "the caller's is still reduced": (
        lambda d: reduced(d, waits=False, of="caller's"),
        "allreduce__default output",
    ),
    "told not to run on, over gloo": (
        lambda d: reduced(d, waits=False, runs_on=False),
        "allreduce__default neg_default",
    ),
    "gathered, no wait": (
        lambda d: gathered(d, waits=False),
        "allgather_into_tensor_coalesced__default neg_default",
    ),
    "what is gathered is written": (
        lambda d: gathered(d, waits=False, writes_input=True),
        "allgather_into_tensor_coalesced__default add__tensor",
    ),
    "exchanged, no wait": (lambda d: exchanged(d, waits=False), "alltoall_base__default neg_default"),
    "a wait for another": (lambda d: scattered(d, waits_for=1), "_reduce_scatter_base__default neg_default"),
}
RIGHT_OWN: dict[str, Body] = {
    "reduced": lambda d: reduced(d, waits=True),
    "reduced, its Work an object": lambda d: reduced(d, waits=True, by="torchbind"),
    "the caller's": lambda d: reduced(d, waits=True, of="caller's"),
    "gathered": lambda d: gathered(d, waits=True),
    "what is gathered is written": lambda d: gathered(d, waits=True, writes_input=True),
    "exchanged": lambda d: exchanged(d, waits=True),
    "a wait for this one": lambda d: scattered(d, waits_for=0),
}


@pytest.mark.parametrize("name", OWN)
def test_torchs_own_collective_without_its_wait_is_a_hazard(name: str) -> None:
    body, expected = OWN[name]
    assert expected in found(body)


@pytest.mark.parametrize("name", RIGHT_OWN)
def test_torchs_own_collective_with_its_wait_is_none(name: str) -> None:
    assert found(RIGHT_OWN[name]) == []


def test_forbidden_to_run_on_a_collective_on_gpus_is_waited_for_by_its_stream() -> None:
    assert found(lambda d: reduced(d, waits=False, runs_on=False), cuda=True) == []
    assert found(lambda d: reduced(d, waits=False), cuda=True) == ["allreduce__default neg_default"]


def test_a_group_without_a_known_name_is_not_passed_over() -> None:
    [line] = found(lambda d: reduced(d, waits=True), boxed=False)
    assert "runs in a process group without a known name: its order is compared with no other rank's" in line


# -- collectives with effects ----------------------------------------------------------------------------


def with_token(d: Draft, *, waits: bool, takes: str = "result", inner: Any = c10d.all_reduce.default) -> Any:
    x, token = d.own(), d.own()
    both = d.call(with_effects, token, inner, x, "sum", "0")
    result = d.part(both, 1)
    token = d.part(both, 0)
    if waits:
        both = d.call(with_effects, token, WAIT, result)
        token, result = d.part(both, 0), d.part(both, 1)
    if takes == "source":
        result = d.call(aten.zero_.default, x)
    return token, d.call(aten.neg.default, result)


def own_with_token(d: Draft, *, waits: bool) -> Any:
    x = d.own()
    three = d.call(with_effects, d.own(), raw.allreduce_.default, [x], d.group, None, None)
    if waits:
        d.wait(d.part(three, 2))
    return d.part(three, 0), d.call(aten.neg.default, x)


def sent_with_token(d: Draft, *, waits: bool) -> Any:
    x = d.own()
    both = d.call(with_effects, d.own(), c10d.isend.default, x, 1, 0, "0")
    if waits:
        d.call(WAIT, d.part(both, 1))
    return d.part(both, 0), d.call(aten.zero_.default, x)


EFFECTS: dict[str, tuple[Callable[..., Any], str]] = {
    "reduced": (with_token, "with_effects neg_default"),
    "what is reduced is written": (
        lambda d, waits: with_token(d, waits=waits, takes="source"),
        "with_effects zero__default",
    ),
    "reduced in place": (
        lambda d, waits: with_token(d, waits=waits, inner=c10d.all_reduce_.default),
        "with_effects neg_default",
    ),
    "torch's own": (own_with_token, "with_effects neg_default"),
    "sent": (sent_with_token, "with_effects zero__default"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_collective_with_effects_needs_its_wait_and_its_token_none(name: str) -> None:
    body, expected = EFFECTS[name]
    assert expected in found(lambda d: body(d, waits=False))
    assert found(lambda d: body(d, waits=True)) == []


# -- messages between ranks ------------------------------------------------------------------------------


def between(*orders: list[tuple[Any, ...]], sizes: dict[tuple[int, int], int] | None = None) -> list[str]:
    """What ranks wait for whose graphs send and receive, each message waited for at once, or in the end if "later".

    Of each rank: what it does, its peer, the tag, and the group unless it is "0"; of a batch the peers sent to and
    those received from.
    """
    turns = {}
    for rank, order in enumerate(orders):
        draft, later = Draft(boxed=False), []
        for place, (what, peer, tag, *own) in enumerate(order):
            kind, [group] = what.removesuffix(" later"), own or ["0"]
            if kind == "reduce":
                begun = draft.call(c10d.all_reduce.default, draft.own(), "sum", group)
            elif kind == "batch":
                ops = ["isend"] * len(peer) + ["irecv"] * len(tag)
                given = [draft.own() for _ in ops]
                both = draft.call(c10d.batch_p2p_ops.default, ops, [*peer, *tag], [0] * len(ops), given, group)
                later += [draft.part(both, each) for each in range(len(ops))]
                continue
            else:
                x = draft.own()
                x.meta["val"] = torch.empty((sizes or {}).get((rank, place), 4))
                begun = draft.call(getattr(c10d, kind).default, x, peer, tag, group)
            later.append(begun) if what.endswith("later") else draft.call(WAIT, begun)
        for begun in later:
            draft.call(WAIT, begun)
        module = draft.finish(draft.x)
        turns[rank] = find_queue_entries(module, lambda name: tuple(range(len(orders))), rank)
    return [str(deadlock) for deadlock in find_deadlocks(turns)]


def test_messages_that_meet_are_right() -> None:
    assert between([("isend", 1, 0), ("irecv", 1, 0)], [("irecv", 0, 0), ("isend", 0, 0)]) == []
    assert between([("isend", 1, 0)], [("irecv", 0, 0), ("isend", 2, 0)], [("irecv", 1, 0)]) == []
    assert between([("isend", 1, 0), ("reduce", 0, 0)], [("irecv", 0, 0), ("reduce", 0, 0)]) == []


@pytest.mark.parametrize(
    ("orders", "sizes", "reported"),
    [
        ([[("isend", 1, 0), ("irecv", 1, 0)], [("isend", 0, 0), ("irecv", 0, 0)]], {}, "rank 0 waits in `wait_tensor"),
        ([[("irecv", 1, 0), ("isend", 1, 0)], [("irecv", 0, 0), ("isend", 0, 0)]], {}, "rank 1 waits in `wait_tensor"),
        ([[("isend", 1, 0)], []], {}, "for rank 1, which has launched 0 in group 0, from rank 0 to rank 1"),
        ([[], [("irecv", 0, 0)]], {}, "for rank 0, which has launched 0 in group 0, from rank 0 to rank 1"),
        ([[("isend", 1, 3)], [("irecv", 0, 4)]], {}, "tag 3, float32[4] where rank 1 launches"),
        ([[("isend", 1, 0)], [("irecv", 0, 0)]], {(1, 0): 8}, "tag 0, float32[4] where rank 1 launches"),
        (
            [[("isend", 1, 0), ("isend", 1, 1)], [("irecv", 0, 1), ("irecv", 0, 0)]],
            {},
            "tag 0, float32[4] where rank 1",
        ),
        ([[("isend", 1, 0), ("reduce", 0, 0)], [("reduce", 0, 0), ("irecv", 0, 0)]], {}, "for rank 1, which has"),
        ([[("isend", 1, 0)], [("irecv", 2, 0)], [("isend", 1, 0)]], {}, "for rank 1, which has launched 0"),
    ],
    ids=[
        "both send",
        "both receive",
        "no receiver",
        "no sender",
        "tag",
        "size",
        "order",
        "a sum between",
        "other peer",
    ],
)
def test_messages_that_do_not_meet_are_named(orders: Any, sizes: Any, reported: str) -> None:
    lines = between(*orders, sizes=sizes)
    assert any(reported in line for line in lines), lines


def sent_to(peer: Any, *, is_own: bool, group: str = "0") -> list[str]:
    """What is said of a message in a group of ranks 4 and 6, of a run that has ranks 4 to 7."""
    draft = Draft()
    to = draft.y if peer is None else peer
    if is_own:
        draft.wait(draft.call(raw.send.default, [draft.own()], draft.group, to, 0))
    else:
        draft.call(WAIT, draft.call(c10d.isend.default, draft.own(), to, 0, group))
    return [str(each) for each in find_hazards(draft.finish(draft.x), {group: ((4, 6), (5, 7))})[1]]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_message_to_a_rank_that_the_graph_does_not_state_is_not_passed_over(is_own: bool) -> None:
    [line] = sent_to(None, is_own=is_own)
    assert "a message whose other rank the graph does not state: it is matched with no rank's" in line


@pytest.mark.parametrize(("is_own", "inside", "outside"), [(True, 1, 2), (False, 6, 1)])
def test_a_message_to_a_rank_outside_its_group_is_named(is_own: bool, inside: int, outside: int) -> None:
    assert sent_to(inside, is_own=is_own) == []
    [line] = sent_to(outside, is_own=is_own)
    assert f"names rank {outside} as the other end of a message, which is not in the group 0" in line


def test_torchs_own_messages_count_ranks_within_their_group() -> None:
    turns = {}
    for rank, (operator_, peer) in {4: (raw.send.default, 1), 6: (raw.recv_.default, 0)}.items():
        draft = Draft()
        draft.wait(draft.call(operator_, [draft.own()], draft.group, peer, 0))
        turns[rank] = find_queue_entries(draft.finish(draft.x), lambda name: (4, 6), rank)
    assert find_deadlocks(turns) == [] and {turn.ranks for found in turns.values() for turn in found} == {(4, 6)}
    assert all(len(found) == 2 for found in turns.values()), "a message and its wait"
    del turns[6][1], turns[6][0]
    assert len(find_deadlocks(turns)) == 2

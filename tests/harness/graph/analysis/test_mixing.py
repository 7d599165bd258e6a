"""What mixes rows along the chunked dim is refused, by dataflow; its nearest neighbour, which does not, is accepted."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from bitproof.harness.case import Chunking
from bitproof.harness.errors import ChunkError, TraceError
from bitproof.harness.graph.analysis.mixing import MixingCheck, refuse_mixing
from bitproof.reference.chunking import chunk_modules
from bitproof.reference.layers.moe import MoE, MoEConfig
from bitproof.reference.layers.router import RoutingConfig
from bitproof.reference.parallel.expert import CapacityExchange
from tests.harness.graph.graphs import (
    Applied,
    D,
    Layers,
    Sketch,
    assert_as_eager,
    batch,
    chunked,
    line_of,
    parameter,
    trace,
)

Function = Callable[[Tensor], Tensor]


def judge(module: nn.Module, dim: str = "seq", x: Tensor | None = None) -> None:
    """Raise as eager does for a module that is to be cut along `dim`."""
    check = MixingCheck(dim, ("batch", "seq").index(dim))
    x = batch() if x is None else x
    check("layers.0", module, module.forward, {next(iter(inspect.signature(module.forward).parameters)): x})


def mixes(function: Function, dim: str = "seq") -> bool:
    try:
        judge(Applied(lambda _, x: function(x)), dim)
    except ChunkError:
        return True
    return False


# Each along dim 1, the sequence, and then its neighbour along another dim.
PAIRS: dict[str, tuple[Function, Function]] = {
    "softmax": (lambda x: x.softmax(1), lambda x: x.softmax(-1)),
    "log_softmax": (lambda x: x.log_softmax(1), lambda x: x.log_softmax(-1)),
    "_safe_softmax": (lambda x: aten._safe_softmax(x, 1), lambda x: aten._safe_softmax(x, -1)),
    "cumsum": (lambda x: x.cumsum(1), lambda x: x.cumsum(2)),
    "cumprod": (lambda x: x.cumprod(1), lambda x: x.cumprod(0)),
    "cummax": (lambda x: x.cummax(1).values, lambda x: x.cummax(0).values),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), lambda x: x.logcumsumexp(2)),
    "mean": (lambda x: x - x.mean(1, keepdim=True), lambda x: x - x.mean(-1, keepdim=True)),
    "sum": (lambda x: x / x.sum(), lambda x: x / x.sum((0, 2), keepdim=True)),
    "max": (lambda x: x - x.max(1, keepdim=True).values, lambda x: x - x.max(2, keepdim=True).values),
    "amax": (lambda x: x * x.amax((0, 1)), lambda x: x * x.amax(0)),
    "var": (lambda x: x / x.var(1, keepdim=True), lambda x: x / x.var(0, keepdim=True)),
    "norm": (lambda x: x / x.norm(dim=1, keepdim=True), lambda x: x / x.norm(dim=2, keepdim=True)),
    "scores": (lambda x: x @ x.transpose(1, 2) @ x, lambda x: x @ torch.ones(D, D) @ torch.ones(D, D)),
    "contraction": (lambda x: x * (torch.ones(1, x.shape[1]) @ x), lambda x: x * (x @ torch.ones(D, 1))),
    "einsum": (
        lambda x: torch.einsum("bsd,btd,bte->bse", x, x, x),
        lambda x: torch.einsum("bsd,de->bse", x, torch.ones(D, D)),
    ),
    "linear attention": (lambda x: x @ (x.transpose(1, 2) @ x), lambda x: x @ (torch.ones(D, D) @ torch.ones(D, D))),
    "sort": (lambda x: x.sort(1).values, lambda x: x.sort(2).values),
    "topk": (lambda x: x + x.topk(1, 1).values, lambda x: x + x.topk(1, 2).values),
    "flip": (lambda x: x.flip(1), lambda x: x.flip(0)),
    "roll": (lambda x: x.roll(1, 1), lambda x: x.roll(1, 2)),
    "roll of rows": (
        lambda x: x.flatten(0, 1).roll(1, 0).view(x.shape),
        lambda x: x.flatten(0, 1).roll(1, 1).view(x.shape),
    ),
    "shift": (lambda x: x + x[:, :1], lambda x: x + x[:, :, :1]),
    "pick": (lambda x: x + x.select(1, 0).unsqueeze(1), lambda x: x + x.select(2, 0).unsqueeze(2)),
    "gather": (lambda x: x.gather(1, x.long() * 0), lambda x: x.gather(2, x.long() * 0)),
    "index": (lambda x: x[:, x[0, :, 0].long() * 0], lambda x: x[:, :, torch.arange(D)]),
    "permutation": (
        lambda x: x[:, x[0, :, 0].argsort()],
        lambda x: x[:, (p := x[0, :, 0].argsort())][:, p.argsort()],
    ),
    "places": (lambda x: x + torch.arange(x.shape[1])[:, None], lambda x: x + torch.arange(D)),
    "scrambling view": (
        lambda x: x.view(x.shape[1], x.shape[0], D).transpose(0, 1),
        lambda x: x.transpose(0, 1).transpose(0, 1),
    ),
    "flattened": (
        lambda x: x.flatten(0, 1).softmax(0).view(x.shape),
        lambda x: x.flatten(0, 1).softmax(1).view(x.shape),
    ),
    "convolution": (
        lambda x: functional.conv1d(x.transpose(1, 2), torch.ones(D, D, 3), padding=1).transpose(1, 2),
        lambda x: functional.linear(x, torch.ones(D, D)),
    ),
    "in place": (lambda x: x + torch.zeros(D).add_(x.sum((0, 1))), lambda x: torch.zeros_like(x).add_(x)),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
        lambda x: functional.scaled_dot_product_attention(
            x.transpose(0, 1)[:, None], x.transpose(0, 1)[:, None], x.transpose(0, 1)[:, None]
        )[:, 0].transpose(0, 1),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_mixes_the_sequence_is_refused_and_its_neighbour_is_not(name: str) -> None:
    mixing, apart = PAIRS[name]
    assert mixes(mixing), "accepted"
    judge(Applied(lambda _, x: apart(x)))


def test_what_mixes_the_batch_is_refused_along_batch_alone() -> None:
    def over_batch(x: Tensor) -> Tensor:
        return x - x.mean(0)

    assert mixes(over_batch, "batch") and not mixes(over_batch, "seq")


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_a_batch_norm_is_refused_by_name_in_the_graph_and_in_eager(dim: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(D)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    refusal = rf"^ChunkError: cannot chunk layers\.0 along {dim}: batch_norm `\w+` takes its statistics from several of"
    with pytest.raises(ChunkError, match=refusal):
        chunked(trace(Layers(Normed()), dim=("batch", "seq").index(dim)), "layers.*", dim)
    with pytest.raises(ChunkError, match=refusal):
        judge(Normed(), dim)


def test_a_group_norm_treats_each_sample_alone_and_mixes_its_channels() -> None:
    def normed(module: Applied, x: Tensor) -> Tensor:
        return functional.group_norm(x.transpose(1, 2), 2, module.w).transpose(1, 2)

    assert_as_eager(Layers(Applied(normed, w=parameter(D))), "layers.*")
    judge(Applied(normed, w=parameter(D)), "batch")
    assert mixes(lambda x: functional.group_norm(x.transpose(1, 2), 2), "seq")
    assert mixes(lambda x: functional.group_norm(x.transpose(0, 1), 1).transpose(0, 1), "batch")


def test_what_is_computed_of_all_rows_may_stay_inside() -> None:
    def counted(module: Applied, x: Tensor) -> Tensor:
        module.total.add_(x.detach().sum())
        return x * 2

    judge(Applied(counted, total=torch.zeros(())))


@pytest.mark.parametrize("dim", ["batch", "seq"])
@pytest.mark.parametrize("top_groups", [1, 2])
def test_a_mixture_of_experts_routes_rows_there_and_back(dim: str, top_groups: int) -> None:
    routing = RoutingConfig(num_experts=4, top_k=2, num_groups=2, top_groups=top_groups, score="sigmoid")
    moe = MoE(D, MoEConfig(routing=routing, hidden_dim=8, num_shared_experts=1))
    judge(moe.bfloat16(), dim, batch(torch.bfloat16))


class LeavingRowsSorted(MoE):
    """Does not put rows back."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        order = x_BSD.flatten(0, 1)[:, 0].argsort(stable=True)
        return x_BSD.flatten(0, 1)[order].view(x_BSD.shape)


def routed_by_parts(module: Applied, x: Tensor) -> Tensor:
    rows = x.reshape(-1, D)
    order = (rows[:, 0] > 0).long().argsort(stable=True)
    count = (rows[:, 0] > 0).sum().item()
    first, second = rows[order].split([rows.shape[0] - count, count])
    return torch.zeros_like(rows).index_put((order,), torch.cat([first * 2, second * 3])).view(x.shape)


def joined_in_another_order(module: Applied, x: Tensor) -> Tensor:
    rows = x.reshape(-1, D)
    order = (rows[:, 0] > 0).long().argsort(stable=True)
    count = (rows[:, 0] > 0).sum().item()
    first, second = rows[order].split([rows.shape[0] - count, count])
    return torch.zeros_like(rows).index_put((order,), torch.cat([second * 2, first * 3])).view(x.shape)


def test_the_parts_of_sorted_rows_may_take_ways_of_their_own_and_meet_in_order() -> None:
    judge(Applied(routed_by_parts))
    with pytest.raises(ChunkError, match=r"sort `\w+` computes an element|cat `cat` computes an element"):
        judge(Applied(joined_in_another_order))


def test_rows_that_are_not_put_back_are_refused() -> None:
    routing = RoutingConfig(num_experts=4, top_k=2, score="softmax")
    with pytest.raises(ChunkError, match=r"cannot chunk layers\.0 along batch: "):
        judge(LeavingRowsSorted(D, MoEConfig(routing=routing, hidden_dim=8, num_shared_experts=1)), "batch")


def with_capacity(kind: type[MoE] = MoE, exchange: type[CapacityExchange] = CapacityExchange) -> MoE:
    routing = RoutingConfig(num_experts=4, top_k=2, score="softmax")
    moe = kind(D, MoEConfig(routing=routing, hidden_dim=8, num_shared_experts=1, capacity=1.0))
    moe.experts.exchange = exchange(1, "ep", 1.0)
    return moe


class Undeclared(CapacityExchange):
    """A limit that nobody declares."""

    limits_rows = False


class GivingSlots(CapacityExchange):
    """Returns the slots, not the rows that it was given."""

    def combine(self, rows_PD: Tensor, slots: Any) -> Tensor:
        """What the experts returned, as it is."""
        return rows_PD


class Softened(MoE):
    """Mixes rows after its experts."""

    def _routed(self, x_TD: Tensor, routing: Any) -> Tensor:
        return super()._routed(x_TD, routing).softmax(0)


class Reversed(MoE):
    """Puts rows back in another order than they had."""

    def _routed(self, x_TD: Tensor, routing: Any) -> Tensor:
        return super()._routed(x_TD, routing).flip(0)


class MixedBefore(MoE):
    """Gives its experts rows that are mixed already."""

    def _routed(self, x_TD: Tensor, routing: Any) -> Tensor:
        return super()._routed(x_TD.softmax(0), routing)


class ByMixedWeights(MoE):
    """Scales rows by a sum over all that experts returned."""

    def _routed(self, x_TD: Tensor, routing: Any) -> Tensor:
        y_TD = super()._routed(x_TD, routing)
        return y_TD * y_TD.sum(0)


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_experts_with_a_declared_limit_of_rows_in_a_call_run_in_chunks(dim: str) -> None:
    judge(with_capacity(), dim)


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_a_limit_that_is_not_declared_is_refused_and_the_message_names_the_experts_not_the_refused_module(
    dim: str,
) -> None:
    with pytest.raises(ChunkError) as caught:
        judge(with_capacity(exchange=Undeclared), dim)
    assert "cannot chunk layers.0 along" in str(caught.value)
    assert "fix: choose modules without layers.0.experts, or chunk along the other dim if" in str(caught.value)


@pytest.mark.parametrize("kind", [Softened, Reversed, MixedBefore, ByMixedWeights])
@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_what_mixes_rows_before_or_after_a_declared_limit_is_refused(kind: type[MoE], dim: str) -> None:
    with pytest.raises(ChunkError, match=rf"cannot chunk layers\.0 along {dim}"):
        judge(with_capacity(kind), dim)


def test_a_result_with_another_number_of_rows_than_were_given_is_not_what_was_declared() -> None:
    experts = with_capacity(exchange=GivingSlots).experts
    check = MixingCheck("batch", 0)
    rows, counts = torch.randn(8, D), torch.tensor([2, 2, 2, 2])
    with pytest.raises(ChunkError):
        check("experts", experts, experts.forward, {"rows_RD": rows, "counts_E": counts})


def written_out(module: Applied, x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2)
    return scores.softmax(-1) @ (x * module.w)


def refusal_of_written_out(origin: str) -> str:
    return (
        f"ChunkError: cannot chunk layers.0 along seq: bmm `bmm` computes an element from several of them\n"
        "  expected: a module that treats the positions of the sequence independently\n"
        f"  found: bmm of ['4', 'u0', '8'], ['4', '8', 'u0'], which reaches its result `RESULT`\n"
        f"  came from: {origin}\n"
        "  fix: choose modules without layers.0, or chunk along the other dim if it does not mix that"
    )


def of_any_result(error: ChunkError) -> str:
    """A refusal in which the result, of which torch's decompositions decide what it is called, has no name."""
    return re.sub(r"its result `\w+`", "its result `RESULT`", str(error))


def test_attention_written_out_is_refused_in_the_graph_and_in_eager() -> None:
    model = Layers(Applied(written_out, w=parameter(D)))
    origin = f"layers.0 (forward), {line_of(written_out, 1)}"
    with pytest.raises(ChunkError) as graph:
        chunked(trace(model, dim=1), "layers.*", "seq")
    assert of_any_result(graph.value) == refusal_of_written_out(f"{origin}, pass chunk")
    chunk_modules(model, Chunking(dim="seq", modules="layers.*"), MixingCheck("seq", 1))
    with pytest.raises(ChunkError) as eager:
        model(batch())
    assert of_any_result(eager.value) == refusal_of_written_out(origin)


def test_attention_written_out_runs_in_chunks_of_the_batch() -> None:
    assert_as_eager(Layers(Applied(written_out, w=parameter(D))), "layers.*")
    judge(Applied(written_out, w=parameter(D)), "batch")


def test_modules_built_alike_are_judged_once_and_state_is_left_alone() -> None:
    calls = []

    def noting(module: Applied, x: Tensor) -> Tensor:
        calls.append(type(x))
        module.total.add_(1)
        return x * 2

    model = Layers(*(Applied(noting, total=torch.zeros(())) for _ in range(2)))
    chunk_modules(model, Chunking(dim="seq", modules="layers.*"), MixingCheck("seq", 1))
    model(batch())
    model(batch())
    assert len(calls) == 1 + 2 * 2 * 2
    assert [float(total) for total in model.buffers()] == [4.0, 4.0]


def test_a_module_that_cannot_be_traced_is_not_taken_for_harmless() -> None:
    with pytest.raises(TraceError, match=r"cannot determine whether layers\.0 mixes what its chunks hold apart"):
        judge(Applied(lambda _, x: x if int(x.sum()) > 3 else x * 2))


def test_on_a_torch_that_was_never_tested_that_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(
        TraceError, match=r"^TraceError: torch 2\.14\.0\+cpu is not among the tested versions .*; on it: "
    ):
        judge(Applied(lambda _, x: x if int(x.sum()) > 3 else x * 2))


# -- nested graphs ------------------------------------------------------------------------------------

aten = torch.ops.aten


def body_of(sketch: Sketch, make: Callable[[Sketch, Node], Node]) -> GraphModule:
    """A nested graph of one operand, which `make` writes."""
    outer, sketch.graph = sketch.graph, Graph()
    made = make(sketch, sketch.placeholder("y", sketch.n, 6, 8))
    sketch.graph.output((made,))
    inner = GraphModule(sketch.attributes, sketch.graph)
    sketch.graph = outer
    return inner


def wrapped(sketch: Sketch, body: GraphModule, name: str, x: Node) -> Node:
    """What `wrap` hands back of `body` for `x`."""
    reference = sketch.attribute(name, body)
    call = sketch.graph.create_node("call_function", torch.ops.higher_order.wrap, (reference, x), name="wrapped")
    call.meta |= {"val": (x.meta["val"],), "origin": reference.meta["origin"]}
    return sketch.call(operator.getitem, call, 0)


def judge_nested(*makes: Callable[[Sketch, Node], Node]) -> None:
    """Judge, along the batch, a module that calls a nested graph with the result of another."""
    sketch = Sketch()
    value = sketch.placeholder("x", sketch.n, 6, 8)
    for index, make in enumerate(makes):
        value = wrapped(sketch, body_of(sketch, make), f"body{index}", value)
    nodes = list(sketch.finish(sketch.call(aten.sum.default, value, at=""), value).graph.nodes)
    roots = {node: "layers.0" if node.op == "call_function" and node is not value.next else None for node in nodes}
    refuse_mixing(nodes, roots, sketch.symbol.symbol, "batch")


def doubled(sketch: Sketch, y: Node) -> Node:
    return sketch.call(aten.mul.Tensor, y, 2)


def summed_along(dim: int) -> Callable[[Sketch, Node], Node]:
    return lambda sketch, y: sketch.call(aten.cumsum.default, y, dim)


def test_a_nested_graph_is_followed_to_the_call_that_mixes() -> None:
    judge_nested(doubled, summed_along(1))
    with pytest.raises(ChunkError, match=r"cannot chunk layers\.0 along batch: cumsum `cumsum` computes an element"):
        judge_nested(doubled, summed_along(0))


def test_what_one_nested_graph_mixed_another_does_not_mend() -> None:
    with pytest.raises(ChunkError, match=r"cumsum `cumsum` computes an element"):
        judge_nested(summed_along(0), doubled)


def test_a_graph_nested_in_a_nested_graph_is_followed_too() -> None:
    def twice(dim: int) -> Callable[[Sketch, Node], Node]:
        return lambda sketch, y: wrapped(sketch, body_of(sketch, summed_along(dim)), "inner", y)

    judge_nested(twice(2))
    with pytest.raises(ChunkError, match=r"cumsum `cumsum` computes an element"):
        judge_nested(twice(0))


def test_rows_that_a_nested_graph_closes_over_are_not_taken_for_its_own() -> None:
    def closing_over(sketch: Sketch, y: Node) -> Node:
        hidden = sketch.attribute("hidden", torch.zeros(()))
        hidden.meta["val"] = y.meta["val"]
        return sketch.call(aten.add.Tensor, y, hidden)

    with pytest.raises(ChunkError, match=r"wrap `wrapped` computes an element"):
        judge_nested(closing_over)

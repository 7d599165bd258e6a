"""What is logged of a step: eager, chunked, backward, in place, and as a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import rebuild_tensor

from bitproof.harness.capture.digest import digest
from bitproof.harness.case import Parallelism
from bitproof.harness.graph import offload_operators
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.localize.logs.calls import Call, CallSite, calls_from_text, calls_to_text
from bitproof.harness.localize.logs.exchanges import describe_number
from bitproof.harness.localize.logs.replay import ValueSite
from bitproof.harness.systems.watched_loop import sum_of_losses
from bitproof.reference.parallel.mesh import Mesh
from tests.harness.graph.graphs import Applied, D, Layers, batch, chunked, mean_square, parameter, trace
from tests.ranks import on_ranks


class System:
    """A model that takes steps, as eager code or as its graph."""

    def __init__(self, model: nn.Module, chunk: Callable[[], int | None] = lambda: None) -> None:
        self.model = model
        self.running_chunk = chunk
        self.gradients = self.eager
        self.graph: Any = None

    def eager(self, x: Tensor) -> tuple[Tensor, ...]:
        loss = mean_square(self.model)(x)
        return torch.autograd.grad(loss, list(self.model.parameters()))

    def step(self, x: Tensor) -> None:
        for gradient in self.gradients(x):
            gradient.mul_(2)


def layers() -> Layers:
    return Layers(
        Applied(lambda m, x: (x * m.w).sin(), w=parameter(D)), Applied(lambda m, x: x @ m.v, v=parameter(D, D))
    )


def calls_of(system: System, x: Tensor) -> list[Call]:
    with logged(system) as log:
        system.step(x)
    return log.calls


def places(calls: list[Call], operator: str) -> list[CallSite]:
    return [call.place for call in calls if call.operator.partition(".")[0] == operator]


def test_forward_backward_and_update_calls_are_distinguished_and_given_to_their_modules() -> None:
    calls = calls_of(System(layers()), batch())
    assert places(calls, "sin") == [CallSite("layers.0", "forward")]
    assert places(calls, "cos") == [CallSite("layers.0", "backward")]
    assert [place for place in places(calls, "mm") if place.direction == "forward"] == [CallSite("layers.1", "forward")]
    assert {place.module for place in places(calls, "mm") if place.direction == "backward"} == {"layers.1"}
    assert places(calls, "mul_") == [CallSite(None, "update")] * 2


def test_a_call_has_the_digests_of_its_inputs_and_of_its_output_and_the_users_line() -> None:
    x = batch()
    system = System(layers())
    [call] = [call for call in calls_of(system, x) if call.operator == "sin"]
    product = x * system.model.layers[0].w
    assert (call.inputs, call.outputs) == ((digest(product),), (digest(product.sin()),))
    assert call.source is not None and call.source.startswith("localize/logs/test_call_log.py:")


def test_a_call_has_its_numbers_and_dtypes_left_out_ones_included() -> None:
    class Numbers(System):
        def step(self, x: Tensor) -> None:
            x.sum(0)
            x.to(torch.float16)

    calls = {call.operator.partition(".")[0]: dict(call.scalars) for call in calls_of(Numbers(layers()), batch())}
    assert calls["sum"] == {"dim": "[0]", "keepdim": "False"}
    assert calls["_to_copy"]["dtype"] == "torch.float16"


def test_backward_calls_belong_to_the_chunk_whose_forward_made_them() -> None:
    running: list[int | None] = [None]

    def halves(module: Any, x: Tensor) -> Tensor:
        parts = []
        for index, part in enumerate(x.split(2)):
            running[0] = index
            parts.append((part * module.w).sin())
            running[0] = None
        return torch.cat(parts)

    model = Layers(Applied(halves, w=parameter(D)))
    calls = calls_of(System(model, lambda: running[0]), batch())
    assert [place.chunk for place in places(calls, "sin")] == [0, 1]
    assert sorted(place.chunk for place in places(calls, "cos")) == [0, 1]
    assert [place.chunk for place in places(calls, "cat") if place.direction == "forward"] == [None]


def test_a_graphs_calls_are_its_nodes_at_their_origins_and_chunks() -> None:
    model, x = layers(), batch()
    joint = trace(model, x)
    system = System(model)
    system.graph = chunked(joint, "layers.0")

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(system.graph(*model.parameters(), x)[1:])

    system.gradients = gradients  # type: ignore[method-assign]
    module = system.graph
    calls = calls_of(system, x)
    assert places(calls, "sin") == [CallSite("layers.0", "forward", chunk) for chunk in (0, 1)]
    assert [call.node for call in calls if call.operator == "sin"] == ["sin_chunk0", "sin_chunk1"]
    assert places(calls, "mul_") == [CallSite(None, "update")] * 2
    assert system.graph is module, "what was replaced is put back"


def test_a_copy_to_host_memory_and_back_is_in_flight_until_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that land at their wait, as on a stream of their own: what they fill is read no earlier."""
    late: dict[int, Tensor] = {}

    def begin(source: Tensor, target: Tensor, device: torch.device) -> None:
        target.zero_()
        late[id(target)] = source.clone()

    monkeypatch.setattr(offload_operators, "begin_copy", begin)
    monkeypatch.setattr(offload_operators, "end_copy", lambda target, device: target.copy_(late.pop(id(target))))

    class Offloading(System):
        def step(self, x: Tensor) -> None:
            host = offload_operators.OFFLOAD(x)
            host = offload_operators.WAIT_OFFLOAD(host, x)
            back = offload_operators.RELOAD(host, "cpu")
            torch.sin(offload_operators.WAIT_RELOAD(back))

    x = batch()
    calls = calls_of(Offloading(layers()), x)
    copies = [call for call in calls if call.operator in ("offload", "reload")]
    assert [(call.inputs, call.outputs) for call in copies] == [((digest(x),), (digest(x),))] * 2
    assert not {call.operator for call in calls} & {"wait_offload", "wait_reload"}
    [sine] = [call for call in calls if call.operator == "sin"]
    assert sine.inputs == (digest(x),)
    assert not late


def test_a_batch_norm_that_trains_gives_running_statistics_though_its_schema_does_not_say_so() -> None:
    class Norm(System):
        def step(self, x: Tensor) -> None:
            self.model(x)
            self.seen = digest(self.model.running_mean)

    norm = nn.BatchNorm1d(4)
    for is_training in (True, False):
        system = Norm(norm.train(is_training))
        [call] = [call for call in calls_of(system, torch.randn(3, 4)) if call.operator == "native_batch_norm"]
        assert (system.seen in call.outputs) == is_training


def test_a_write_through_a_view_shows_what_it_did_to_the_other_views() -> None:
    class Writing(System):
        def step(self, x: Tensor) -> None:
            y = x + 1
            y[0].zero_()
            self.seen = digest(y)

    system = Writing(layers())
    [call] = [call for call in calls_of(system, batch()) if call.operator == "zero_"]
    assert system.seen in call.aliases
    assert system.seen not in call.outputs


def test_one_output_is_kept_as_it_was() -> None:
    system = System(layers())
    index = next(i for i, call in enumerate(calls_of(system, batch())) if call.operator == "sin")
    with logged(system, keep={ValueSite(0, index, 0)}) as log:
        system.step(batch())
    assert digest(log.kept[ValueSite(0, index, 0)]) == log.calls[index].outputs[0]


def test_uninitialized_memory_is_not_logged() -> None:
    class Wasting(System):
        def step(self, x: Tensor) -> None:
            torch.empty_like(x)
            x.new_empty(3)
            torch.empty_permuted((2, 3), (1, 0))
            torch.empty(2).resize_(4)

    assert calls_of(Wasting(layers()), batch()) == []


def test_a_tensor_that_another_process_sent_is_no_call() -> None:
    class Received(System):
        def step(self, x: Tensor) -> None:
            sent = rebuild_tensor(Tensor, x._typed_storage(), (0, x.size(), x.stride(), False))
            super().step(sent)

    model, x = layers(), batch()
    plain, received = calls_of(System(model), x), calls_of(Received(model), x)
    assert [call.operator for call in received] == [call.operator for call in plain]
    assert received[0].inputs == plain[0].inputs and not received[0].unwritten


def test_the_memory_of_a_deep_copy_is_no_value_before_it_is_filled() -> None:
    class Copying(System):
        def step(self, x: Tensor) -> None:
            super().step(copy.deepcopy(x))

    model, x = layers(), batch()
    plain, copying = calls_of(System(model), x), calls_of(Copying(model), x)
    assert "set_.source_Storage" not in {call.operator for call in copying}
    assert copying[-1].outputs == plain[-1].outputs
    assert [call.outputs for call in copying] == [call.outputs for call in calls_of(Copying(model), x)]


def test_a_log_comes_back_as_it_was_written() -> None:
    calls = calls_of(System(layers()), batch())
    assert calls_from_text(calls_to_text(calls), "log") == calls


class Loop:
    """Two microbatches by hand, as a training loop that shows nothing but its model."""

    def __init__(self) -> None:
        self.model = layers()

    def step(self, x: Tensor) -> None:
        for part in x.split(2):
            mean_square(self.model)(part).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(2)


def test_of_a_loop_that_shows_no_gradient_function_forward_backward_and_update_are_reported_by_what_runs() -> None:
    calls = calls_of(Loop(), batch())  # type: ignore[arg-type]
    assert places(calls, "sin") == [CallSite("layers.0", "forward")] * 2
    assert places(calls, "cos") == [CallSite("layers.0", "backward")] * 2
    assert places(calls, "mul_") == [CallSite(None, "update")] * 2


def in_place_collectives(mesh: Mesh) -> list[Any]:
    """What is logged of collectives that write their arguments, awaited late: operator, inputs, outputs, what to see.

    Over gloo's own group, which does part of its work where it is waited for.
    """
    x, zeros = torch.arange(4.0) + mesh.rank, torch.zeros

    class Collective(System):
        def step(self, x: Tensor) -> None:
            outs = self.outs = [zeros(8), zeros(2), zeros(4), x.clone(), [zeros(4), zeros(4)]]
            works = [
                dist.all_gather_into_tensor(outs[0], x, async_op=True),
                dist.reduce_scatter_tensor(outs[1], x, async_op=True),
                dist.all_to_all_single(outs[2], x, async_op=True),
                dist.all_reduce(outs[3], async_op=True),
                dist.all_gather(outs[4], x, async_op=True),
            ]
            for work in works:
                work.wait()

    system = Collective(layers())
    calls = [call for call in calls_of(system, x) if call.operator not in ("zeros", "clone")]
    assert all(call.collective for call in calls)
    seen = [[digest(y) for y in (out if isinstance(out, list) else [out])] for out in system.outs]
    return [[call.operator, call.inputs == (digest(x),), list(call.outputs)] for call in calls] + [seen]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # torch 2.13 renames two; all releases have these
def test_a_collective_that_writes_its_arguments_has_what_it_wrote_as_outputs() -> None:
    for answer in on_ranks(Parallelism(world_size=2, ep=1), in_place_collectives):
        *calls, seen = answer
        names = ["_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allreduce_", "allgather_"]
        assert calls == [[name, True, outputs] for name, outputs in zip(names, seen, strict=True)]


def messages(mesh: Mesh) -> list[Any]:
    """What is logged of a message with a tag: operator, tag, peers, whether its numbers have the tag."""

    class Message(System):
        def step(self, x: Tensor) -> None:
            if mesh.rank:
                dist.recv(x, 0, tag=7)
            else:
                dist.send(x, 1, tag=7)

    calls = [call for call in calls_of(Message(layers()), torch.ones(2)) if call.collective]
    return [[call.operator, call.tag, *call.peers, "tag" in dict(call.scalars)] for call in calls]


@pytest.mark.ranks
def test_a_message_has_a_tag_that_is_no_number_to_be_compared() -> None:
    sent, received = on_ranks(Parallelism(world_size=2, ep=1), messages)
    assert sent == [["send", "7", 0, 1, False]]
    assert received == [["recv_", "7", 0, 1, False]]


def test_compiled_code_stays_compiled_while_calls_are_logged() -> None:
    ran = []

    def backend(module: Any, _: Any) -> Callable[..., Any]:
        return lambda *args: (ran.append(1), module(*args))[1]

    class Compiled(System):
        def step(self, x: Tensor) -> None:
            torch.compile(torch.sin, backend=backend)(x)

    calls_of(Compiled(layers()), batch())
    assert ran == [1]


def test_a_tensor_without_a_digest_is_opaque() -> None:
    class Sparse(System):
        def step(self, x: Tensor) -> None:
            x[0].to_sparse()

    calls = calls_of(Sparse(layers()), batch())
    assert {"opaque"} == {output for call in calls for output in call.outputs if call.operator.endswith("sparse")}


class Foreign:
    """A loop whose gradients come from a graph of its own tracing, shown or not."""

    def __init__(self, *, shown: bool = False, origins: bool = False) -> None:
        self.model = layers()

        def both(x: Tensor, *parameters: Tensor) -> list[Tensor]:
            names = [name for name, _ in self.model.named_parameters()]
            loss = functional_call(self.model, dict(zip(names, parameters, strict=True)), (x,)).square().mean()
            return [loss, *torch.autograd.grad(loss, parameters)]

        own = make_fx(both)(batch(), *(p.detach().requires_grad_() for p in self.model.parameters()))
        for node in own.graph.nodes if origins else ():
            direction = "backward" if "cos" in node.name else "forward"
            node.meta["bitproof"] = {"module": "layers.0", "direction": direction, "chunk": 1, "source": "mine.py:3"}
        if shown:
            self.graph = own
        self._run = (lambda *args: self.graph(*args)) if shown else own

    def step(self, x: Tensor) -> None:
        x = x.clone()
        with torch.no_grad():
            self._run(x, *self.model.parameters())
            next(self.model.parameters()).mul_(2)


def test_the_direction_of_a_graphs_calls_that_a_system_does_not_show_is_not_known() -> None:
    calls = calls_of(Foreign(), batch())  # type: ignore[arg-type]
    assert places(calls, "clone") == [CallSite("", "forward")]
    assert places(calls, "sin") == places(calls, "cos") == places(calls, "mul_") == [CallSite(None, None)]


def test_the_nodes_of_a_shown_graph_that_say_nothing_are_named_and_their_direction_is_not_known() -> None:
    calls = calls_of(Foreign(shown=True), batch())  # type: ignore[arg-type]
    assert places(calls, "cos") == [CallSite(None, None)]
    assert [call.node for call in calls if call.operator == "cos"] == ["cos"]


def test_the_nodes_of_a_shown_graph_are_where_its_metadata_says() -> None:
    calls = calls_of(Foreign(shown=True, origins=True), batch())  # type: ignore[arg-type]
    assert places(calls, "sin") == [CallSite("layers.0", "forward", 1)]
    assert places(calls, "cos") == [CallSite("layers.0", "backward", 1)]
    assert [call.source for call in calls if call.operator == "cos"] == ["mine.py:3"]


def test_a_call_over_lists_is_logged_once_an_index_with_what_belongs_to_it() -> None:
    class Clipping(System):
        def step(self, x: Tensor) -> None:
            self.lists = [x.clone(), x + 1], torch.tensor(1.0)
            before = [digest(y) for y in self.lists[0]]
            torch._foreach_mul_(self.lists[0], self.lists[1])
            torch._foreach_mul_(self.lists[0], 3.0)
            self.seen = before, [digest(y) for y in self.lists[0]]

    system = Clipping(layers())
    with logged(system) as log:
        system.step(batch())
    (first, second), after = system.seen
    calls = [call for call in log.calls if call.operator.startswith("_foreach_mul_")]
    one = digest(system.lists[1])
    assert [call.inputs for call in calls[:2]] == [(first, one), (second, one)]
    assert [call.outputs for call in calls[2:]] == [(after[0],), (after[1],)]
    assert [call.producers for call in calls[2:]] == [(len(log.calls) - 4,), (len(log.calls) - 3,)]


def test_one_output_of_a_call_over_lists_is_kept() -> None:
    class Doubling(System):
        def step(self, x: Tensor) -> None:
            torch._foreach_mul_([x, y := x + 1], 2.0)
            self.seen = digest(y)

    system = Doubling(layers())
    x = batch()
    with logged(system, keep={ValueSite(0, 2, 0)}) as log:
        system.step(x)
    assert digest(log.kept[ValueSite(0, 2, 0)]) == system.seen


def test_where_only_outputs_are_wanted_each_one_is_found_under_the_number_that_the_log_has_for_it() -> None:
    class Many(System):
        def step(self, x: Tensor) -> None:
            super().step(x)
            torch._foreach_mul_([x, y := x + 1], 2.0)
            torch._foreach_add_([x, y], [y, x])
            torch.manual_seed(0)
            y[0].zero_().add_(torch.rand(()).item())
            torch.nn.functional.dropout(y).sum()

    def name_of(value: Tensor, logged_as: str) -> str:
        return describe_number(value.item()) if logged_as.startswith("number") else digest(value)

    system = Many(layers())
    with logged(system) as log:
        system.step(batch())
    sites = {ValueSite(0, index, at) for index, call in enumerate(log.calls) for at in range(len(call.outputs))}
    with logged(Many(layers()), sites, only_keeps=True) as kept:
        system.step(batch())
    assert len(kept.calls) == len(log.calls) > 30
    values = {site: log.calls[site.call].outputs[site.position] for site in kept.kept}
    assert {site: name_of(value, values[site]) for site, value in kept.kept.items()} == values
    assert len(values) > 30 and {call.place for call in kept.calls} == {CallSite(None, None)}


def test_what_recording_calls_is_none_of_the_systems_calls() -> None:
    class Digesting(System):
        def step(self, x: Tensor) -> None:
            digest(x.transpose(0, 1))  # not contiguous: it is copied

    assert [call.operator for call in calls_of(Digesting(layers()), batch())] == ["transpose.int"]


def test_the_sum_of_a_loops_losses_is_a_call_that_leads_to_what_gave_them() -> None:
    class Summing(System):
        def step(self, x: Tensor) -> None:
            sum_of_losses([x.mean(), x.amax()])

    calls = calls_of(Summing(layers()), batch())
    assert [call.operator for call in calls if call.operator.startswith("add_")] == ["add_.Tensor"] * 2
    last = next(call for call in reversed(calls) if call.operator == "add_.Tensor")
    assert calls[last.producers[1] or 0].inputs == calls[1].outputs


class Accumulating:
    """A loop over two micro-batches, with a loss outside of every module, clipping, and an optimizer."""

    def __init__(self) -> None:
        self.model = layers()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)

    def step(self, x: Tensor) -> None:
        total = torch.zeros(())
        for part in x.chunk(2):
            loss = self.model(part).exp().mean()
            loss.backward()
            total += loss.detach()
        for weight in self.model.parameters():
            assert weight.grad is not None
            weight.grad.div_(2)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1, foreach=False)
        self.optimizer.step()


def test_phases_of_a_loop_with_micro_batches_come_from_what_runs() -> None:
    calls = calls_of(Accumulating(), batch())  # type: ignore[arg-type]

    def phases(operator: str) -> list[tuple[str | None, int | None]]:
        return [(call.place.direction, call.micro_batch) for call in calls if call.operator.startswith(operator)]

    assert phases("sin") == [("forward", 1), ("forward", 2)]
    losses = [(call.place.direction, call.micro_batch) for call in calls if call.operator == "exp"]
    assert losses == [("forward", 1), ("forward", 2)], "the loss is outside of the model"
    assert phases("cos") == [("backward", 1), ("backward", 2)]
    assert {direction for direction, _ in phases("ones_like")} == {"backward"}
    assert {direction for direction, _ in phases("div_")} == {"update"}, "what reads gradients after backward"
    assert {direction for direction, _ in phases("linalg_vector_norm")} == {"update"}, "clipping"
    assert {direction for direction, _ in phases("add_.Tensor") if direction != "backward"} >= {"forward", "update"}


def test_another_part_of_a_storage_that_a_write_leaves_as_it_is_keeps_who_left_it() -> None:
    """As gradients do that are parts of one bucket, and are added to one by one."""

    class Parts(System):
        def step(self, x: Tensor) -> None:
            whole = x[0] * 2
            first, second = whole[:1], whole[1:]
            first.add_(1)
            second.neg()

    calls = calls_of(Parts(layers()), batch())
    [negated] = [call for call in calls if call.operator == "neg"]
    assert calls[negated.producers[0] or 0].view, "the write changed the other part, and the whole"
    [written] = [call for call in calls if call.operator.startswith("add_")]
    assert negated.inputs[0] not in written.aliases


def test_what_has_no_memory_is_not_kept_unasked() -> None:
    """As what a compiler's trace gives, or a parameter that FSDP has freed."""

    @torch.library.custom_op("bitproof_tests::freed", mutates_args=())
    def freed(x: Tensor) -> Tensor:
        y = x.clone()
        y.untyped_storage().resize_(0)
        return y

    def step() -> None:
        freed(torch.ones(4))

    with logged(step, spare=1 << 20) as log:
        step()
    assert [call.operator for call in log.calls] == ["ones", "freed"]
    assert [site.call for site in log.kept] == [0]


def test_values_are_kept_unasked_as_long_as_there_is_room_views_included() -> None:
    def step() -> None:
        x = torch.ones(4).neg()
        (x.view(2, 2) @ torch.ones(2, 2)).to_sparse()
        torch.ones(5).exp()
        torch.ones(1).tanh()

    with logged(step, spare=4 * (4 + 4 + 4 + 4 + 4 + 5 + 1)) as log:
        step()
    kept = {site: digest(value) for site, value in log.kept.items()}
    assert kept == {site: log.calls[site.call].outputs[site.position] for site in kept}
    names = [log.calls[site.call].operator for site in kept]
    assert names == ["ones", "neg", "view", "ones", "mm", "ones", "ones"]

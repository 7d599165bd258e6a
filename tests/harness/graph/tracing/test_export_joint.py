"""The exported step: its bits, its ends paired by what they are, its origins, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from bitproof.harness.errors import TraceError
from bitproof.harness.graph import operators
from bitproof.harness.graph.origin import Origin, origin_of
from bitproof.harness.graph.tracing import export_joint
from bitproof.harness.graph.tracing.export_joint import SEED_KEY, export_joint_step
from bitproof.harness.torch_compat import joint_graph
from tests.harness.graph.graphs import (
    CPU,
    SEED,
    Applied,
    Layers,
    batch,
    differing,
    parameter,
    run_eager,
    run_graph,
    verify,
)
from tests.harness.graph.joint_graphs import Counting, export


def model(order: tuple[str, ...] = ("a", "b", "scale")) -> Layers:
    return Layers(Counting(order))


def test_the_exported_step_has_the_form_and_the_bits_of_eager() -> None:
    joint = export(model())
    verify(joint.module)
    assert joint.parameter_names == [f"layers.0.{name}" for name in ("a", "b", "scale")]
    assert (joint.buffer_names, joint.num_inputs, joint.module_calls) == (
        ["layers.0.calls"],
        1,
        {"layers.0": 1, "layers": 0},
    )
    assert differing(run_eager(model(), batch()), run_graph(joint.module, joint, model(), batch())) == []


def test_a_buffer_is_written_at_the_end_and_nothing_else_in_place() -> None:
    calls = [node for node in export(model()).module.graph.nodes if node.op == "call_function"]
    assert [node for node in calls if operators.written_arguments(node)] == [calls[-1]]
    assert calls[-1].target is torch.ops.aten.copy_.default


@pytest.mark.parametrize("order", list(itertools.permutations(("a", "b", "scale"))))
def test_gradients_keep_their_parameters_in_whatever_order_these_are_registered(order: tuple[str, ...]) -> None:
    joint = export(model(order))
    assert joint.parameter_names == [f"layers.0.{name}" for name in order]
    assert differing(run_eager(model(), batch()), run_graph(joint.module, joint, model(order), batch())) == []


def with_ends_in_another_order(module: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule:
    """torch's joint graph, of which every input and output stands elsewhere, with the descriptor that it has."""
    exported = joint_graph(module, inputs)
    first, *others = exported.graph.find_nodes(op="placeholder")
    for node in others:
        first.prepend(node)
    output = exported.graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # type: ignore[arg-type]
    output.meta["desc"] = list(reversed(output.meta["desc"]))
    exported.recompile()
    return exported


def test_ends_are_paired_by_their_descriptors_and_not_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_joint, "joint_graph", with_ends_in_another_order)
    joint = export(model())
    assert differing(run_eager(model(), batch()), run_graph(joint.module, joint, model(), batch())) == []


def test_calls_know_their_module_and_direction() -> None:
    nodes = [node for node in export(model()).module.graph.nodes if node.op == "call_function"]
    sines = {str(node.target): origin_of(node) for node in nodes if str(node.target).startswith("aten.sin.")}
    assert [(origin.module, origin.direction) for origin in sines.values()] == [
        ("layers.0", "forward"),
        ("layers.0", "backward"),
    ] or [(origin.module, origin.direction) for origin in sines.values()] == [("layers.0", "backward")]
    [seed] = [node for node in nodes if node.meta.get(SEED_KEY)]
    assert origin_of(seed) == Origin(None, "backward") and seed.args[1] == 0.125


class Tied(nn.Module):
    """Two layers of one weight, of which the first stands in two places, and a buffer of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.again = self.first
        self.register_buffer("table", torch.full((8,), 3.0))
        self.register_buffer("same", self.table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.first(x).sin()).tanh()) * self.table + self.same


def test_a_tied_parameter_is_one_input_and_has_one_gradient() -> None:
    model = Layers(Tied())
    joint = export(copy.deepcopy(model))
    assert joint.parameter_names == ["layers.0.first.weight", "layers.0.last.bias"]
    assert joint.buffer_names == ["layers.0.table"]
    assert differing(run_eager(model, batch()), run_graph(joint.module, joint, model, batch())) == []


def offset_of(model: nn.Module) -> Tensor:
    [found] = model.parameters()
    return found


def test_a_parameter_whose_gradient_is_what_backward_starts_from_gets_it() -> None:
    model = Layers(Applied(lambda self, x: x, offset=parameter()))
    offset = offset_of(model)
    x = batch()
    joint = export_joint_step(model, lambda x: offset_of(model) + x.sum(), [x], gradient_seed=SEED, device=CPU)
    loss, gradient = joint.module(offset.detach(), x)
    assert torch.equal(loss, offset.detach() + x.sum()) and gradient.item() == SEED


def unused(self: Applied, x: Tensor) -> Tensor:
    return x * self.used


def writing(self: Applied, x: Tensor) -> Tensor:
    y = x.clone() * self.w
    x.zero_()
    return y


def updating(self: Applied, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.w.mul_(0.5)
    return x * self.w


def replacing(self: Applied, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return x * self.w * self.count


def writing_what_is_shared(self: Applied, x: Tensor) -> Tensor:
    self.whole.add_(1)
    return x * self.w * self.part.sum()


WHOLE = torch.ones(4)


def branching(self: Applied, x: Tensor) -> Tensor:
    return x * self.w if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (
            lambda: Layers(Applied(unused, used=parameter(8), spare=parameter(8))),
            "TraceError: the exported step has no gradient layers.0.spare\n"
            "  expected: the loss, and a gradient of every parameter\n"
            "  found: gradient layers.0.spare\n"
            "  fix: let every parameter take part in the loss, or drop it from the model",
        ),
        (
            lambda: Layers(Applied(writing, w=parameter(8))),
            "TraceError: the training step writes into its input 0\n"
            "  expected: writes into buffers alone\n"
            "  fix: write into a copy of the input",
        ),
        (
            lambda: Layers(Applied(updating, w=parameter(8))),
            "TraceError: the training step writes into its parameter layers.0.w\n"
            "  expected: writes into buffers alone\n"
            "  fix: write into a copy of the parameter",
        ),
        (
            lambda: Layers(Applied(replacing, w=parameter(8), count=torch.zeros(()))),
            "TraceError: the training step replaces the tensor of buffer layers.0.count\n"
            "  expected: buffers that are written in place, as a graph that reads and writes its inputs can\n"
            "  fix: write x.copy_(...) where the module says self.x = ...",
        ),
        (
            lambda: Layers(Applied(writing_what_is_shared, w=parameter(8), whole=WHOLE, part=WHOLE[1:3])),
            "TraceError: the training step writes into buffer layers.0.whole, whose memory layers.0.part shares\n"
            "  expected: written buffers that share no memory: the exported graph does not show such writes\n"
            "  fix: compute one from the other where the step reads it, or choose the system graph",
        ),
        (
            lambda: Layers(Applied(branching, w=parameter(8))),
            "TraceError: torch cannot export the training step as a joint graph\n"
            "  expected: a step that ahead-of-time autograd can trace\n"
            "  found: GuardOnDataDependentSymNode: ",
        ),
    ],
)
def test_what_has_no_joint_graph_is_refused(refused: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(TraceError) as error:
        export(refused())
    assert str(error.value).startswith(text)

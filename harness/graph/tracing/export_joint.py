"""Exports a training step with torch's ahead-of-time autograd, as a joint graph of forward and backward.

    trace.py       records a step's calls, including in-place writes
    this module    `aot_export_joint_with_descriptors`: no in-place writes, backward from a tangent

The result has the form of a traced graph: its inputs are parameters, buffers and the step's inputs, and its outputs are
the loss and a gradient for each parameter.

1. Make fake tensors, and wrap the model and its loss in a module, as torch exports modules.
2. Export, and record every node's origin while torch traces.
3. Identify inputs and outputs by torch's descriptors, never by position.
4. Write the graph again with two changes. A call computes the tangent (the gradient of the loss), which is an input of
   torch's graph. New values of buffers are written into the buffers; in torch's graph they are outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.case import Chunking
from bitproof.harness.errors import TraceError
from bitproof.harness.graph.origin import CALLS_KEY, META_KEY, Origin, OriginRecorder
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.graph.tracing.runtime_checks import written_checks
from bitproof.harness.graph.tracing.trace import (
    ChunkSymbol,
    JointGraph,
    LossFunction,
    complete_checks,
    find_guards,
    fixed_fake,
    keeping_state,
    open_inputs,
)
from bitproof.harness.torch_compat import Role, joint_graph, role_of, swapped_state
from bitproof.harness.torch_compile import lazily_compiled
from bitproof.harness.torch_operators import storage_key

SEED_KEY = "seed"
"""The metadata key of the call that computes the gradient of the loss, from which backward starts."""

NO_CHUNKS = sympy.Symbol("no_chunks")
"""A chunk symbol for passes that need one. It occurs in no size."""


class _Step(nn.Module):
    """A model and its loss function as a module, whose `forward` returns the loss.

    `recording` is called when torch begins to trace the graph. A tied parameter or buffer appears only under its first
    name, so that it has a single gradient.
    """

    def __init__(self, model: nn.Module, loss_function: LossFunction, recording: Callable[[], None]) -> None:
        super().__init__()
        self.model = model
        self._loss_function = loss_function
        self._recording = recording
        self._first_names = _tied(model)
        self.before_backward: Callable[[Tensor], None] = lambda loss: None

    def forward(self, *inputs: Tensor) -> Tensor:
        # torch has swapped the first names' tensors. The other names of a tied tensor must have the same one.
        now = _state_of(self.model)
        with swapped_state(self.model, {name: now[first] for name, first in self._first_names.items()}):
            # Torch first runs a module to find its writes and results.
            if get_proxy_mode() is None:
                return self._loss_function(*inputs)
            self._recording()
            with keeping_state(self.model):
                loss = self._loss_function(*inputs)
        self.before_backward(loss)
        return loss

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        # `remove_duplicate` is ignored: with every name of a tied parameter, torch would make several inputs of it.
        return super().named_parameters(prefix, recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        # As in `named_parameters`.
        return super().named_buffers(prefix, recurse)


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _tied(model: nn.Module) -> dict[str, str]:
    """Return a dict of the tied parameters and buffers: each further name -> the first name."""
    first: dict[Tensor, str] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    found = {name: first.setdefault(tensor, name) for name, tensor in every}
    return {name: owner for name, owner in found.items() if name != owner}


def export_joint_step(
    model: nn.Module,
    loss_function: LossFunction,
    inputs: Sequence[Tensor],
    *,
    gradient_seed: float,
    device: torch.device,
    chunking: Chunking | None = None,
    chunk_dim: int = 0,
) -> JointGraph:
    """Export a step: the loss `loss_function(*inputs)`, and the gradients of the parameters of `model`.

    - `loss_function`: calls `model`.
    - `gradient_seed`: the gradient of the loss.
    - `device`: the device of the graph's values, which are fake.
    - `chunking`: if the step will run in chunks, the inputs' size along `chunk_dim` is a symbol, as in
      `trace_joint_step`. Otherwise every size is fixed.

    Raises TraceError for a step that cannot be exported, and ChunkError for a higher-order operator in a module that
    `chunking` chooses.
    """
    shape_env = ShapeEnv()
    fake_mode = step_fake_mode(shape_env=shape_env)
    state = _state_of(model)
    # Parameters first, then buffers: the order of the graph's inputs.
    names = list(state)
    parameter_names = [name for name, _ in model.named_parameters()]
    fakes = {name: fixed_fake(fake_mode, x, device) for name, x in state.items()}
    chunk_symbol = ChunkSymbol(NO_CHUNKS, 1)
    if chunking is None:
        fake_inputs = tuple(fixed_fake(fake_mode, x, device) for x in inputs)
    else:
        chunk_symbol, fake_inputs = open_inputs(fake_mode, inputs, chunk_dim, device, is_cut=True)
    recorder = OriginRecorder(model)
    with ExitStack() as recordings:
        # A tracer exists only while torch traces, so `_Step` calls this.
        def record() -> None:
            recordings.enter_context(recorder.recording(cast(Any, get_proxy_mode()).tracer))
            recordings.enter_context(written_checks(shape_env, chunk_symbol.symbol))

        step = _Step(model, loss_function, record)
        step.before_backward = recorder.before_backward
        # On a single thread, since the recorder follows backward from autograd node to autograd node.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with _trace_errors(), one_thread, lazily_compiled(), swapped_state(model, fakes):
            exported = joint_graph(step, fake_inputs)
    ends = _Ends.of(exported)
    _refuse_shared_memory(ends, state)
    module = _as_step(exported, ends, parameter_names, names[len(parameter_names) :], len(inputs), gradient_seed)
    # torch gives references to nested graphs no value, but passes read a `val` of each node.
    for reference in module.graph.find_nodes(op="get_attr"):
        reference.meta["val"] = getattr(module, reference.target)
    complete_checks(module)
    guards = find_guards(module, shape_env, chunk_symbol, chunk_dim, chunking)
    return JointGraph(
        module=module,
        parameter_names=parameter_names,
        buffer_names=names[len(parameter_names) :],
        num_inputs=len(inputs),
        chunk_symbol=chunk_symbol,
        guards=guards,
        module_calls={name: recorder.num_calls[name] for name, _ in model.named_modules() if name},
    )


class _Ends:
    """The inputs and outputs of a joint graph, by their role in the step.

    A role is a kind and a name, such as the gradient of the parameter `layers.0.w`.
    """

    def __init__(self, inputs: dict[Role, Node], outputs: dict[Role, Node | None]) -> None:
        self.inputs = inputs
        self.outputs = outputs

    @staticmethod
    def of(module: GraphModule) -> _Ends:
        output = module.graph.output_node()
        values: Any = output.args[0]
        inputs = {_role(node.meta["desc"]): node for node in module.graph.find_nodes(op="placeholder")}
        outputs = {
            _role(descriptor): value
            for value, descriptor in zip(values, output.meta["desc"], strict=True)
            if descriptor is not None
        }
        return _Ends(inputs, outputs)

    def input(self, role: Role) -> Node | None:
        # Missing if the step does not read it, such as an unused buffer.
        return self.inputs.get(role)

    def output(self, role: Role) -> Node:
        found = self.outputs.get(role)
        if found is None:
            raise TraceError(
                f"the exported step has no {role.kind} {role.of}",
                expected="the loss, and a gradient of every parameter",
                found=", ".join(sorted(f"{kind} {of}" for (kind, of), value in self.outputs.items() if value is None))
                or "no output that torch's descriptors call so",
                fix="let every parameter take part in the loss, or drop it from the model",
            )
        return found


def _role(descriptor: Any) -> Role:
    role = role_of(descriptor)
    if role.kind == "other":
        raise TraceError(
            "the exported step has an input or output of an unknown kind",
            expected="parameters, buffers, inputs, the loss, gradients, written buffers",
            found=role.of,
        )
    return Role(role.kind, role.of.removeprefix("model."))


def _as_step(
    exported: GraphModule,
    ends: _Ends,
    parameter_names: list[str],
    buffer_names: list[str],
    num_inputs: int,
    gradient_seed: float,
) -> GraphModule:
    graph = Graph()
    env: dict[Node, Node] = {}
    for role in _signature(parameter_names, buffer_names, num_inputs):
        if (source := ends.input(role)) is None:
            raise TraceError(f"the exported step has no {role.kind} {role.of}")
        node = env[source] = graph.placeholder(source.name)
        node.meta["val"] = source.meta["val"]
    writes = [
        # Checked before anything is written: only buffers may get new values.
        (_written_buffer(ends, role), value)
        for role, value in ends.outputs.items()
        if role.kind == "written" and value is not None
    ]
    loss, tangent = ends.output(Role("output", "0")), ends.input(Role("tangent", "0"))
    for node in exported.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        # The call that makes the tangent reads the loss, so it is written only before the tangent's first reader.
        if tangent in node.all_input_nodes and tangent not in env:
            assert tangent is not None
            env[tangent] = _seed(graph, env[loss], tangent, gradient_seed)
        env[node] = graph.node_copy(node, env.__getitem__)
    # A parameter that is added to the loss has the tangent itself as its gradient.
    if tangent in ends.outputs.values() and tangent not in env:
        assert tangent is not None
        env[tangent] = _seed(graph, env[loss], tangent, gradient_seed)
    # At the end, as torch's graph has new values of buffers instead of writes: all readers see the old values.
    for buffer, value in writes:
        write_back(graph, env[buffer], env[value])
    gradients = [env[ends.output(Role("gradient", name))] for name in parameter_names]
    graph.output([env[loss], *gradients])
    return GraphModule(exported, graph)


def _written_buffer(ends: _Ends, role: Role) -> Node:
    if (found := ends.input(Role("buffer", role.of))) is not None:
        return found
    kind: Literal["parameter", "input"] = "parameter" if ends.input(Role("parameter", role.of)) else "input"
    raise TraceError(
        f"the training step writes into its {kind} {role.of}",
        expected="writes into buffers alone",
        fix=f"write into a copy of the {kind}",
    )


def _refuse_shared_memory(ends: _Ends, state: Mapping[str, Tensor]) -> None:
    # The exported graph shows a write only in the named buffer: later reads of the other tensor would have old values.
    written = [role.of for role, value in ends.outputs.items() if role.kind == "written" and value is not None]
    for name in filter(state.__contains__, written):
        for other, tensor in state.items():
            if other != name and storage_key(tensor) == storage_key(state[name]):
                raise TraceError(
                    f"the training step writes into buffer {name}, whose memory {other} shares",
                    expected="written buffers that share no memory: the exported graph does not show such writes",
                    fix="compute one from the other where the step reads it, or choose the system graph",
                )


def _signature(parameter_names: list[str], buffer_names: list[str], num_inputs: int) -> Iterator[Role]:
    yield from (Role("parameter", name) for name in parameter_names)
    yield from (Role("buffer", name) for name in buffer_names)
    yield from (Role("input", str(index)) for index in range(num_inputs))


def _seed(graph: Graph, loss: Node, tangent: Node, gradient_seed: float) -> Node:
    """Add a call that computes the gradient of the loss, from which backward starts, and return the call.

    `tangent` is the input for this gradient in torch's graph.
    """
    # Eager writes `torch.full_like(loss, gradient_seed)`; torch adds `pin_memory=False` to its call in a trace.
    seed = graph.call_function(torch.ops.aten.full_like.default, (loss, gradient_seed), {"pin_memory": False})
    seed.meta = {"val": tangent.meta["val"], META_KEY: Origin(None, "backward"), SEED_KEY: True}
    return seed


def write_back(graph: Graph, buffer: Node, value: Node) -> Node:
    """Add a call that copies `value` into the graph input `buffer`, at the graph's insertion point, and return it."""
    node = graph.call_function(torch.ops.aten.copy_.default, (buffer, value))
    kept = (key for key in (META_KEY, CALLS_KEY) if key in value.meta)
    node.meta = {key: value.meta[key] for key in kept} | {"val": buffer.meta["val"]}
    return node


@contextmanager
def _trace_errors() -> Iterator[None]:
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        lines = str(error).splitlines()
        raise TraceError(
            "torch cannot export the training step as a joint graph",
            expected="a step that ahead-of-time autograd can trace",
            found=f"{type(error).__name__}: {lines[0] if lines else ''}",
            fix="choose the system graph, which records the step itself",
        ) from error

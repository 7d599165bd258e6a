"""Runs the finished graph as a CUDA graph: captured once, and replayed with static inputs and outputs.

Needs:    a graph without the chunk symbol, and state (parameters, buffers) at fixed addresses.
Promises: a replay runs the graph's calls in their order, collectives included. Results are in the same memory after
          every replay, so they must be read before the next replay.
Refuses:  before the capture, a step with calls that cannot be captured: each of them is an `Obstacle`.

Obstacles are found in the graph, on a CPU too, by the rules of CUDA's stream capture (CUDA C++ Programming Guide,
"Graphs"; torch's notes on CUDA graphs):

1. A size or a number depends on data, as for `x.nonzero()`: a replay has the sizes of the capture.
2. The host waits for a device, as for `x.cpu()`: to read a number, to copy to pageable memory, or by an explicit call.
3. The host computes, or calls Python: that would run only once, during the capture.
4. Memory is allocated for copies on a separate stream, as offload does.
5. Data determine a branch or a number of iterations; random numbers come from a generator unknown to torch.

In three cases no CUDA graph runs: on a CPU, if each operator is observed, and if an injected fault cannot be captured.
Then the graph's calls run separately, with the same static inputs and outputs.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.errors import MachineError, PassError
from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.hazards.value_devices import device_of, holds_up_host, is_for_cuda
from bitproof.harness.graph.origin import UNKNOWN, origin_of
from bitproof.harness.operators import RowFlow, Sync, Work
from bitproof.harness.records import PassReport
from bitproof.harness.step.effects import effects_of
from bitproof.harness.step.nested import chooses_by_data
from bitproof.harness.step.storages import Storages
from bitproof.harness.torch_compat import HigherOrderOperator, OpOverload
from bitproof.harness.torch_operators import is_watched

NAME = "cuda_graph"
MOST_SHOWN = 3
WARM_UPS = 1
"""The number of runs before the capture. They load kernels and create communicators."""

_HOST_WAITS = (Sync.HOST_WAITS, Sync.HOST_WAITS_EVENT, Sync.HOST_WAITS_STREAM)
_HOST_COPIES = (Work.OFFLOAD, Work.RELOAD, Work.TRANSFER)


# -- what no capture can hold -----------------------------------------------------------------------


@dataclass(frozen=True)
class Obstacle:
    """A call that a CUDA graph cannot capture, and the reason."""

    node: Node
    why: str

    def __str__(self) -> str:
        origin = origin_of(self.node)
        where = "" if origin == UNKNOWN else f", {origin.direction} of {origin.module or 'the model'}"
        return f"`{self.node.name}` ({operators.name_of(self.node.target)}{where}): {self.why}"


def obstacles(module: GraphModule) -> list[Obstacle]:
    for_cuda = is_for_cuda(module)
    found = []
    # Nested graphs are submodules, so `modules` also yields them.
    for graph in (each.graph for each in module.modules() if isinstance(each, GraphModule)):
        for node in graph.nodes:
            if (why := _why_not(node, for_cuda)) is not None:
                found.append(Obstacle(node, why))
    return found


def _why_not(node: Node, for_cuda: bool) -> str | None:
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    if node.op != "call_function" or not _is_operator(node.target):
        return "Python would run only once, during the capture"
    if chooses_by_data(node):
        return "data determine which branch runs"
    # A symbol that no input has is new: this call's result determines it, from data.
    given = {symbol for x in node.all_input_nodes for symbol in symbols.free_symbols(x.meta.get("val"))}
    if symbols.free_symbols(node.meta.get("val")) - given:
        return "a size or a number depends on data"
    effects = effects_of(node)
    if _reads_a_number(node) or effects.row.sync in _HOST_WAITS or (for_cuda and holds_up_host(node)):
        return "the host waits for the device"
    if effects.row.rows in (RowFlow.INDEX, RowFlow.INDEX_PUT) and any(map(_is_mask, node.all_input_nodes[1:])):
        return "the host waits to count the elements that a mask selects"
    if effects.row.launch is not None and effects.row.launch.work in _HOST_COPIES:
        return "it allocates host memory for a copy on a separate stream"
    if operators.is_random(node) and node.kwargs.get("generator") is not None:
        return "it draws from a separate generator"
    if for_cuda and _is_on_host(node):
        return "the host would compute it only once, during the capture"
    return None


def _reads_a_number(node: Node) -> bool:
    return torch.Tag.data_dependent_output in getattr(node.target, "tags", ())


def _is_mask(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _is_operator(target: Any) -> bool:
    return isinstance(target, OpOverload | HigherOrderOperator) or getattr(target, "__module__", None) == "_operator"


def _is_on_host(node: Node) -> bool:
    # `getitem` only picks a tensor from a call's results.
    return device_of(node.meta.get("val")) == "cpu" and node.target is not operator.getitem


def check_capture(module: GraphModule) -> PassReport:
    """Check that a step can be captured as a CUDA graph, and return a report.

    Raises PassError if it cannot be captured. The error lists the calls that prevent it.
    """
    start, num_nodes = time.perf_counter(), len(module.graph.nodes)
    if found := list(dict.fromkeys(map(str, obstacles(module)))):
        more = f", and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        raise PassError(
            "the step cannot be captured as a CUDA graph",
            expected="sizes that do not depend on data, and a host that neither waits nor computes",
            found="; ".join(found[:MOST_SHOWN]) + more,
            fix="state model.capacity for experts, leave out memory.policy 'offload', or choose the backend fx",
        )
    facts = {"static_outputs": len(module.graph.output_node().all_input_nodes)}
    return PassReport(NAME, time.perf_counter() - start, num_nodes, num_nodes, facts=facts)


# -- the step ---------------------------------------------------------------------------------------


class StaticStep:
    """A step with inputs and outputs at fixed addresses, as a CUDA graph needs.

    On a GPU, the step is captured if possible.

    - `run`: runs the graph of `module`, call by call.
    - `num_state`: the number of tensors of state, such as parameters. They are the first inputs.

    State is read and written in place. All other inputs are copied to fixed addresses. Each call overwrites the results
    of the previous call.
    """

    def __init__(self, run: Callable[..., Any], module: GraphModule, num_state: int) -> None:
        self._run = run
        self._num_state = num_state
        # An injected fault may be an obstacle.
        self._can_capture = not obstacles(module)
        self._written = _written_inputs(module)
        self._state: list[int] = []
        self._static: list[Tensor] = []
        self._outputs: list[Any] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the step, and return its results.

        Raises PassError if a tensor of state has another address than in the first call.
        """
        state, own = inputs[: self._num_state], inputs[self._num_state :]
        # The first call fixes the addresses of state, and allocates the static inputs.
        if not self._static:
            self._begin(state, own)
        if [x.data_ptr() for x in state] != self._state:
            place = next(i for i, x in enumerate(state) if x.data_ptr() != self._state[i])
            raise PassError(
                "state has moved in memory since the capture, and a replay uses the old addresses",
                expected="an optimizer that updates parameters and buffers in place",
                found=f"input {place} of the graph has another address",
            )
        for static, new in zip(self._static, own, strict=True):
            static.copy_(new)
        # A replay runs kernels without calling operators, so a watcher of operators would see none.
        if self._graph is not None and not is_watched():
            self._graph.replay()
        else:
            self._call(state)
        return list(self._outputs)

    def _begin(self, state: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        self._state = [x.data_ptr() for x in state]
        self._static = [x.clone() for x in own]
        if self._can_capture and any(x.is_cuda for x in state):
            self._capture(state)

    def _call(self, state: Sequence[Tensor]) -> None:
        found = self._run(*state, *self._static)
        # The first results become the static outputs; later ones are copied into them.
        if not self._outputs:
            self._outputs = [x.clone() if isinstance(x, Tensor) else x for x in found]
            return
        for static, new in zip(self._outputs, found, strict=True):
            if isinstance(static, Tensor):
                static.copy_(new)

    def _capture(self, state: Sequence[Tensor]) -> None:
        """Capture the graph after a warm-up run, whose in-place writes are undone.

        Raises MachineError if CUDA cannot capture it.
        """
        inputs = [*state, *self._static]
        # The warm-up is a whole step. Its in-place writes must not count.
        kept = {place: inputs[place].clone() for place in self._written}
        try:
            # On a side stream, as torch's notes on CUDA graphs prescribe for a warm-up.
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    self._run(*inputs)
            torch.cuda.current_stream().wait_stream(beside)
            for place, values in kept.items():
                inputs[place].copy_(values)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's watchdog, may query events during the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._outputs = list(self._run(*inputs))
        except RuntimeError as error:
            raise MachineError(
                "CUDA cannot capture the step",
                expected="a step that a capture can hold",
                found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                fix="choose the backend fx, and report what CUDA says",
            ) from error
        self._graph = graph


def _written_inputs(module: GraphModule) -> list[int]:
    # A write into a view of an input is a write into the input.
    written = Storages(module.graph.nodes).writers
    return [place for place, x in enumerate(module.graph.find_nodes(op="placeholder")) if x in written]

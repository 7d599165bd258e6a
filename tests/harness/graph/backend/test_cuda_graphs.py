"""What keeps a step from being captured as a CUDA graph, and a step whose inputs and outputs keep their memory."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from bitproof.harness.errors import MachineError, PassError
from bitproof.harness.graph.backend import cuda_graphs
from bitproof.harness.graph.backend.cuda_graphs import StaticStep, check_capture, obstacles
from bitproof.harness.graph.observation import observed
from bitproof.harness.graph.offload_operators import OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD
from bitproof.harness.torch_compat import TorchDispatchMode

importlib.import_module("torch._dynamo.variables.streams")

aten = torch.ops.aten

HOST_WAITS = "the host waits for the device"
MASKED = "the host waits to count the elements that a mask selects"
DATA = "a size or a number depends on data"
ON_HOST = "the host would compute it only once, during the capture"
PYTHON = "Python would run only once, during the capture"
ALLOCATES = "it allocates host memory for a copy on a separate stream"


def reasons(module: GraphModule) -> list[str]:
    return [obstacle.why for obstacle in obstacles(module)]


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, [x])


MASK, INDEX = torch.tensor([True, False, True, False]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, mask, index: x[mask.nonzero().squeeze(1)], [DATA]),
        (lambda x, mask, index: x.masked_select(mask).sum(), [DATA]),
        (lambda x, mask, index: aten._local_scalar_dense(x.sum()) * x, [DATA]),
        (lambda x, mask, index: aten.index_put(x, [mask], x.sum()), [MASKED]),
        (lambda x, mask, index: branch(x), ["data determine which branch runs"]),
        (lambda x, mask, index: x * 2 + x.sum(), []),
        (lambda x, mask, index: x[index], []),
        (lambda x, mask, index: aten.index_put(x, [index], x.sum()), []),
        (lambda x, mask, index: torch.where(mask, x, -x).cumsum(0).argsort(), []),
        (lambda x, mask, index: torch.rand_like(x) + x, []),
    ],
)
def test_what_data_decide_cannot_be_captured_and_what_only_computes_can(function: Any, expected: list[str]) -> None:
    module = make_fx(function, tracing_mode="symbolic")(torch.randn(4), MASK, INDEX)
    assert reasons(module) == expected


class Drawn:
    """A graph for CUDA by hand: each call runs on fake values."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.attributes: dict[str, Any] = {}

    def given(self, name: str, device: str = "cuda") -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(4, device=device)
        return node

    def call(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        if value is not None:
            with self.mode:
                node.meta["val"] = torch.empty(4, device=value)
        return node

    def reasons(self, *results: Node) -> list[str]:
        self.graph.output(list(results))
        return reasons(GraphModule(self.attributes, self.graph))


def test_in_a_graph_for_cuda_the_host_neither_computes_nor_waits_for_a_copy() -> None:
    drawn = Drawn()
    there, here = drawn.given("there"), drawn.given("here", "cpu")
    doubled = drawn.call(aten.mul.Tensor, here, 2, value="cpu")
    back = drawn.call(aten._to_copy.default, there, device=torch.device("cpu"), value="cpu")
    loose = drawn.call(aten.copy_.default, there, doubled, True, value="cuda")
    sunk = drawn.call(aten.copy_.default, there, doubled, value="cuda")
    fine = drawn.call(aten.mul.Tensor, there, 2, value="cuda")
    assert drawn.reasons(doubled, back, loose, sunk, fine) == [ON_HOST, HOST_WAITS, HOST_WAITS]


def test_copies_to_host_memory_and_back_cannot_be_captured() -> None:
    drawn = Drawn()
    x = drawn.given("x")
    host = drawn.call(OFFLOAD, x, value="cuda")
    kept = drawn.call(WAIT_OFFLOAD, host, x, value="cuda")
    again = drawn.call(RELOAD, kept, "cuda", value="cuda")
    assert drawn.reasons(drawn.call(WAIT_RELOAD, again, value="cuda")) == [ALLOCATES, ALLOCATES]


def test_python_a_generator_of_ones_own_and_a_host_that_waits_are_named() -> None:
    drawn = Drawn()
    x = drawn.given("x")
    drawn.call(observed, "layers.0", [x])
    drawn.call(torch.ops.streams.synchronize_stream.default, 0)
    drawn.attributes["generator"] = torch.Generator()
    drawn.call(aten.bernoulli.default, x, generator=drawn.graph.get_attr("generator"), value="cuda")
    drawn.graph.call_method("relu", (x,))
    own = "it draws from a separate generator"
    assert drawn.reasons(x) == [PYTHON, HOST_WAITS, own, PYTHON]


def test_a_step_that_cannot_be_captured_is_refused_with_its_first_calls() -> None:
    drawn = Drawn()
    x = drawn.given("x")
    copies = [drawn.call(OFFLOAD, x, value="cuda") for _ in range(5)]
    drawn.graph.output(copies)
    with pytest.raises(PassError) as error:
        check_capture(GraphModule({}, drawn.graph))
    text = "; ".join(f"`offload_default{place}` (offload): {ALLOCATES}" for place in ("", "_1", "_2"))
    assert str(error.value) == (
        "PassError: the step cannot be captured as a CUDA graph\n"
        "  expected: sizes that do not depend on data, and a host that neither waits nor computes\n"
        f"  found: {text}, and 2 more\n"
        "  fix: state model.capacity for experts, leave out memory.policy 'offload', or choose the backend fx"
    )


# -- the step ---------------------------------------------------------------------------------------


def counting() -> GraphModule:
    """Adds the tokens to a count in place, and returns their sum, and a weight times the count."""

    def step(weight: Tensor, count: Tensor, tokens: Tensor) -> list[Tensor]:
        count.add_(tokens)
        return [tokens.sum(), weight * count]

    return make_fx(step)(torch.ones(2), torch.zeros(2), torch.zeros(2))


def test_state_is_used_where_it_lies_inputs_are_copied_and_results_lie_where_they_lay() -> None:
    weight, count = torch.tensor([2.0, 3.0]), torch.zeros(2)
    module, seen = counting(), []
    step = StaticStep(lambda *given: seen.append([x.data_ptr() for x in given]) or module(*given), module, 2)
    first = step(weight, count, torch.tensor([1.0, 2.0]))
    assert [x.tolist() for x in first] == [3.0, [2.0, 6.0]] and count.tolist() == [1.0, 2.0]
    kept = [x.clone() for x in first]
    weight.mul_(10)
    second = step(weight, count, torch.tensor([5.0, 5.0]))
    assert [x.tolist() for x in second] == [10.0, [120.0, 210.0]]
    assert [x.data_ptr() for x in second] == [x.data_ptr() for x in first], "one memory for every step's results"
    assert first[0].tolist() == 10.0 != kept[0].tolist(), "which the next step overwrites"
    assert seen[0] == seen[1], "and one for every step's inputs"
    with pytest.raises(PassError, match="input 1 of the graph has another address"):
        step(weight, count.clone(), torch.zeros(2))


class FakeCuda:
    """Records what is asked of CUDA; a capture keeps the calls that are made in it, and a replay runs them."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self.fails = fails

    def named(self, name: str) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.asked.append(f"{name} waits for {other.name}"), name=name)

    def capturing(self, graph: Any, capture_error_mode: str) -> Any:
        self.asked.append(f"capture, {capture_error_mode}")
        if self.fails:
            raise RuntimeError(self.fails)
        return nullcontext()

    def install(self, patch: pytest.MonkeyPatch, replay: Any) -> None:
        stands_in = {
            "Stream": lambda: self.named("beside"),
            "current_stream": lambda: self.named("current"),
            "stream": lambda stream: self.asked.append(f"on {stream.name}") or nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.asked.append("replay") or replay()),
            "graph": self.capturing,
        }
        patch.setattr(cuda_graphs.torch, "cuda", SimpleNamespace(**stands_in))


def on_gpu(x: Tensor) -> Any:
    """A tensor that says that it lies on a GPU."""

    class There(Tensor):
        is_cuda = True  # type: ignore[assignment]

    return x.as_subclass(There)


def test_a_capture_warms_up_beside_puts_back_what_that_wrote_and_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, weight, count = FakeCuda(), on_gpu(torch.tensor([2.0, 3.0])), torch.tensor([7.0, 7.0])
    module, runs = counting(), []

    def run(*given: Tensor) -> list[Tensor]:
        runs.append(count.tolist())
        cuda.asked.append("run")
        return module(*given)

    step = StaticStep(run, module, 2)
    replayed: list[list[float]] = []
    cuda.install(monkeypatch, lambda: replayed.append(step._static[0].tolist()))
    step(weight, count, torch.tensor([1.0, 2.0]))
    assert cuda.asked == [
        *("beside waits for current", "on beside", "run", "current waits for beside"),
        *("capture, thread_local", "run", "replay"),
    ]
    assert runs == [[7.0, 7.0], [7.0, 7.0]], "what the warm-up added to the count is gone when the step is captured"
    step(weight, count, torch.tensor([4.0, 4.0]))
    assert cuda.asked[7:] == ["replay"] and len(runs) == 2, "nothing runs but the replay"
    assert replayed == [[1.0, 2.0], [4.0, 4.0]], "which finds the step's own inputs"
    with Watching():
        step(weight, count, torch.tensor([5.0, 5.0]))
    assert cuda.asked[8:] == ["run"], "who watches operators sees them run, one by one"


class Watching(TorchDispatchMode):
    """Sees each operator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_what_cuda_says_of_a_step_that_it_cannot_capture_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, module = FakeCuda(fails="operation not permitted when stream is capturing\nmore"), counting()
    cuda.install(monkeypatch, lambda: None)
    with pytest.raises(MachineError, match="found: operation not permitted when stream is capturing\n  fix: choose"):
        StaticStep(module, module, 2)(on_gpu(torch.ones(2)), torch.zeros(2), torch.zeros(2))


def test_a_graph_with_a_fault_that_no_capture_can_hold_runs_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, drawn = FakeCuda(), Graph()
    cuda.install(monkeypatch, lambda: None)
    x, own = drawn.placeholder("x"), drawn.placeholder("own")
    drawn.output([drawn.call_function(lambda a, b: a + b, (x, own))])
    module = GraphModule({}, drawn)
    [result] = StaticStep(module, module, 1)(on_gpu(torch.ones(2)), torch.ones(2))
    assert result.tolist() == [2.0, 2.0] and not cuda.asked

"""Small models, graphs traced from them, and two ways to run a step: as a graph, and in eager chunks by hand."""

# B batch, S sequence, D model dim

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from bitproof.harness.case import Chunking
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.operators import operator_name
from bitproof.harness.graph.origin import Origin, Part
from bitproof.harness.graph.pipeline import build_pipeline, run_pipeline
from bitproof.harness.graph.stages import OPEN, RESOLVED
from bitproof.harness.graph.symbols import free_symbols
from bitproof.harness.graph.tracing.trace import ChunkSymbol, JointGraph, trace_joint_step
from bitproof.harness.graph.verify import Facts

CPU = torch.device("cpu")
B, S, D = 4, 6, 8
SEED = 0.125

Step = dict[str, Tensor]


class Layers(nn.Module):
    """`layers` one after another; the loss is the mean of the squares of what the last returns."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Applied(nn.Module):
    """A module whose forward is the function it is given, called with the module and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **state: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype))


def batch(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """An input x_BSD."""
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mean_square(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).float().square().mean()


def trace(model: nn.Module, x: Tensor | None = None, *, dim: int = 0) -> JointGraph:
    """The joint graph of one step of `model`."""
    x = batch() if x is None else x
    return trace_joint_step(model, mean_square(model), [x], chunk_dim=dim, gradient_seed=SEED, device=CPU)


def copied(joint: JointGraph) -> JointGraph:
    """The same step for passes to change, without another trace."""
    graph = Graph()
    graph.output(graph.graph_copy(joint.module.graph, {}))
    return replace(joint, module=GraphModule(joint.module, graph))


def context_of(joint: JointGraph, modules: str | None = None, dim: Any = "batch", early: bool = False) -> PassContext:
    chunking = Chunking(dim=dim, modules=modules, early_grad_accumulation=early) if modules else None
    return PassContext(
        chunk_symbol=joint.chunk_symbol,
        chunking=chunking,
        chunk_groups=frozenset({"EP"}),
        guards=tuple(joint.guards),
        module_calls=joint.module_calls,
    )


def chunked(joint: JointGraph, modules: str | None, dim: Any = "batch", early: bool = False) -> GraphModule:
    """The traced step after the whole pipeline."""
    context = context_of(joint, modules, dim, early)
    return run_pipeline(joint.module, build_pipeline(context), context)[0]


def verify(module: GraphModule, resolved: ChunkSymbol | None = None) -> None:
    """Hold a graph that no pass has changed to the rules of its stage: with `resolved`, that of a number by now."""
    stage = OPEN if resolved is None else RESOLVED
    stage.check(module, Facts.of(module), resolved or ChunkSymbol(sympy.Symbol("none"), 0))


def run_graph(module: GraphModule, joint: JointGraph, model: nn.Module, x: Tensor) -> Step:
    """Loss, gradients and buffers after one step of the graph, on copies of the model's state."""
    state = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    names = [*joint.parameter_names, *joint.buffer_names]
    with torch.no_grad():
        loss, *gradients = module(*(state[name] for name in names), x.clone())
    return (
        {"loss": loss}
        | {f"grad {name}": g for name, g in zip(joint.parameter_names, gradients, strict=True)}
        | {f"buffer {name}": state[name] for name in joint.buffer_names}
    )


def run_eager(model: nn.Module, x: Tensor, modules: str | None = None, dim: str = "batch") -> Step:
    """The same, in eager, with the chosen modules' inputs cut in two by hand."""
    model = copy.deepcopy(model)
    if modules:
        chunking = Chunking(dim=dim, modules=modules)  # type: ignore[arg-type]
        for name, module in model.named_modules():
            if name and chunking.root_of(name) == name:
                module.forward = _in_halves(module.forward, ("batch", "seq").index(dim))  # type: ignore[method-assign]
    parameters = dict(model.named_parameters())
    loss = mean_square(model)(x)
    gradients = torch.autograd.grad(loss, list(parameters.values()), torch.full_like(loss, SEED))
    return (
        {"loss": loss.detach()}
        | {f"grad {name}": g for name, g in zip(parameters, gradients, strict=True)}
        | {f"buffer {name}": value for name, value in model.named_buffers()}
    )


def _in_halves(forward: Callable[[Tensor], Tensor], dim: int) -> Callable[[Tensor], Tensor]:
    def halves(x: Tensor) -> Tensor:
        half = x.shape[dim] // 2
        return torch.cat([forward(x.narrow(dim, start, half).contiguous()) for start in (0, half)], dim)

    return halves


def bits(x: Tensor) -> Tensor:
    """The elements of `x` in order, as integers: zeros of either sign differ, a NaN equals itself."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def differing(first: Step, second: Step) -> list[str]:
    """The names whose dtype, shape or bits are not the same; an unequal set of names is an error."""
    assert first.keys() == second.keys() and first, (list(first), list(second))
    return [
        name
        for name, x in first.items()
        if x.dtype != second[name].dtype
        or x.shape != second[name].shape
        or not torch.equal(bits(x), bits(second[name]))
    ]


def assert_as_eager(model: nn.Module, modules: str | None, dim: str = "batch", x: Tensor | None = None) -> GraphModule:
    """The rewritten step has eager's bits; returns it."""
    x = batch() if x is None else x
    joint = trace(model, x, dim=("batch", "seq").index(dim))
    module = chunked(joint, modules, dim)
    wrong = differing(run_graph(module, joint, model, x), run_eager(model, x, modules, dim))
    assert not wrong, wrong
    return module


# -- graphs by hand ---------------------------------------------------------------------------------


class Sketch:
    """A joint graph in the making: each call is run on fake values as it is added. `n` is the chunked size, 4."""

    def __init__(self) -> None:
        shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=shape_env)
        self.graph = Graph()
        with shape_env.ignore_fresh_unbacked_symbols():
            self.n = shape_env.create_unbacked_symint()
        torch._check(self.n >= B // 2)  # as traced: without bounds 2.11 asks sizes whether they are 0 or 1
        torch._check(self.n <= B)
        self.symbol = ChunkSymbol(self.n.node.expr, B)
        self.attributes: dict[str, Any] = {}

    def placeholder(self, name: str, *sizes: Any, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(sizes, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, at: str | None = "layers.0", backward: bool = False, **kwargs: Any) -> Node:
        """Add a call whose owner is the module `at`; None is for what autograd does by itself.

        An all-to-all is one of dispatch.
        """
        values = map_arg((args, kwargs), lambda node: node.meta["val"])
        with torch.no_grad(), self.mode:
            value = target(*values[0], **values[1])
        packet = getattr(target, "overloadpacket", target)
        node = self.graph.create_node("call_function", target, args, kwargs, name=packet.__name__)
        part: Part | None = "dispatch" if packet.__name__ == "all_to_all_single" else None
        node.meta |= {"val": value, "origin": Origin(at, "backward" if backward else "forward", part=part)}
        return node

    def attribute(self, name: str, value: Any) -> Node:
        self.attributes[name] = value
        node = self.graph.get_attr(name)
        node.meta["origin"] = Origin("layers.0", "forward")
        return node

    def finish(self, *outputs: Node) -> GraphModule:
        """The graph; its outputs are the loss, then gradients."""
        self.graph.output(list(outputs))
        return GraphModule(self.attributes, self.graph)

    def context(self, modules: str | None = None, dim: Any = "batch", early: bool = False) -> PassContext:
        chunking = Chunking(dim=dim, modules=modules, early_grad_accumulation=early) if modules else None
        return PassContext(chunk_symbol=self.symbol, chunking=chunking, chunk_groups=frozenset({"EP"}))


# -- looking at graphs ------------------------------------------------------------------------------


def listing(module: GraphModule) -> list[str]:
    """Every node in order, as `name = op(args)`; placeholders are left out."""
    return [_line(node) for node in module.graph.nodes if node.op != "placeholder"]


def _line(node: Node) -> str:
    if node.op == "get_attr":
        return f"{node.name} = {node.target}"
    arguments = [_text(argument) for argument in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "output":
        return f"return {arguments[0]}"
    return f"{node.name} = {operator_name(node)}({', '.join(arguments)})"


def _text(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_text, argument))}]"
    return str(argument)


def names(module: GraphModule, *operators: str) -> list[str]:
    """The names of the nodes that call any of `operators`, in order."""
    return [node.name for node in calls(module, *operators)]


def calls(module: GraphModule, *operators: str) -> list[Node]:
    return [n for n in module.graph.nodes if n.op == "call_function" and operator_name(n) in operators]


def symbols_left(module: GraphModule, symbol: Any) -> list[str]:
    """Nodes, in this graph and in those nested in it, whose value or arguments carry the symbol."""
    graphs: Iterable[GraphModule] = (m for m in module.modules() if isinstance(m, GraphModule))
    return [
        node.name
        for nested in graphs
        for node in nested.graph.nodes
        if symbol in free_symbols(node.meta.get("val")) or symbol in free_symbols(list(node.args))
    ]


def line_of(function: Callable[..., Any], offset: int = 0) -> str:
    """Where a function stands, as errors and origins name it."""
    code = function.__code__
    return f"{'/'.join(code.co_filename.rsplit('/', 3)[1:])}:{code.co_firstlineno + offset}"

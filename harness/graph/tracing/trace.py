"""Traces a training step (forward, loss, backward) into a joint graph.

The graph's inputs are parameters, buffers and the step's inputs. Its outputs are the loss and a gradient for each
parameter. The size of the chunked dim is a symbol. No code can branch on it, so exactly the values that depend on a
chunk have the symbol in their sizes.

1. Make fake tensors. The chunked dim of every input, of size n, gets the same unbacked symbol, bounded by n / 2 and n.
2. Run forward and backward under make_fx, and record every node's origin.
3. Refuse a step that works only for a single size. For example, `x.view(128, -1)` fits only 4 sequences of 32 tokens.
4. Refuse nested graphs with effects that passes would not see, and higher-order operators in chunked modules
   (higher_order.py).
5. Keep the conditions that tracing deferred. `concretize_symbols` checks the conditions on the chunked dim, and calls
   in the graph check the conditions on data (runtime_checks.py).
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import sympy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen

from bitproof.harness.case import Chunking
from bitproof.harness.errors import CaseError, TraceError
from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.observation import marking
from bitproof.harness.graph.origin import OriginRecorder, origin_of, user_line
from bitproof.harness.graph.tracing import higher_order
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.graph.tracing.runtime_checks import written_checks
from bitproof.harness.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    open_dim,
    swapped_state,
    symbolic_graph,
    untested_release,
)
from bitproof.harness.torch_compile import lazily_compiled

log = logging.getLogger(__name__)


class ChunkSymbol(NamedTuple):
    """The symbol for the size of the chunked dim. `hint` is the number that the case states for this size."""

    symbol: sympy.Symbol
    hint: int


@dataclass(frozen=True)
class Guard:
    """A condition on the chunk symbol that tracing assumed.

    `source` is the line of the user's code that needs the condition; None if only code of torch or bitproof needs it.
    """

    condition: sympy.Basic
    source: str | None


@dataclass
class StepGraph:
    """A step as a graph.

    The graph's inputs are the parameters, the buffers, and `num_inputs` inputs of the step. The names of parameters and
    buffers are in the order of the inputs.
    """

    module: GraphModule
    parameter_names: list[str]
    buffer_names: list[str]
    num_inputs: int


@dataclass
class JointGraph(StepGraph):
    """A traced step in which the size of the chunked dim is a symbol.

    - `guards`: the conditions on this symbol that tracing assumed.
    - `module_calls`: module name -> number of its calls.
    """

    chunk_symbol: ChunkSymbol
    guards: list[Guard] = field(default_factory=list)
    module_calls: dict[str, int] = field(default_factory=dict)


LossFunction = Callable[..., Tensor]


P = ParamSpec("P")
R = TypeVar("R")


def _naming_untested_release(trace: Callable[P, R]) -> Callable[P, R]:
    # An untested version of torch may be the cause of a failed trace, so the error names it first.
    @functools.wraps(trace)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return trace(*args, **kwargs)
        except TraceError as error:
            if (untested := untested_release()) is None:
                raise
            # Each field is kept; only the text and the fix change.
            facts = {name: getattr(error, name) for name in ("expected", "found", "where", "replay")}
            fix = f"install a tested version, or, if it is not to blame: {error.fix}"
            raise TraceError(f"{untested}; on it: {error.what}", fix=fix, **facts) from error

    return traced


@_naming_untested_release
def trace_joint_step(
    model: nn.Module,
    loss_function: LossFunction,
    inputs: Sequence[Tensor],
    *,
    chunk_dim: int,
    gradient_seed: float,
    device: torch.device,
    observe: Sequence[str] = (),
    is_cut: bool = True,
    chunking: Chunking | None = None,
) -> JointGraph:
    """Trace a step: the loss `loss_function(*inputs)`, and the gradients of the parameters of `model`.

    - `model`: may be on the meta device. Only its shapes and dtypes are read.
    - `loss_function`: calls `model`.
    - `inputs`: tensors of the same size along `chunk_dim`.
    - `gradient_seed`: the gradient of the loss, from which backward starts.
    - `device`: the device of the graph's values, which are fake.
    - `observe`: patterns of module names. In the graph, the outputs of the matching modules and the gradients of these
      outputs are marked, so that a run can record them.
    - `is_cut`: True if the step will run in two equal chunks along `chunk_dim`, whose size must then be even.
    - `chunking`: the modules that will run in chunks; None for no module.

    Raises TraceError for code that cannot be traced, CaseError for a pattern that matches no module, and ChunkError for
    a higher-order operator in a chunked module.
    """
    # 1. Fake tensors, with one symbol for the chunked dim of all inputs.
    fake_mode = step_fake_mode(shape_env=ShapeEnv())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = list(state)
    fake_state = [fixed_fake(fake_mode, x, device) for x in state.values()]
    chunk_symbol, fake_inputs = open_inputs(fake_mode, inputs, chunk_dim, device, is_cut=is_cut)
    symbol = chunk_symbol.symbol
    parameter_names = [name for name, _ in model.named_parameters()]
    recorder = OriginRecorder(model)

    # 2. Forward and backward, with the state as arguments, so that the graph reads it as inputs.
    def joint_step(state_tensors: list[Tensor], input_tensors: list[Tensor]) -> list[Tensor]:
        with swapped_state(model, dict(zip(names, state_tensors, strict=True))):
            with keeping_state(model):
                loss = loss_function(*input_tensors)
            recorder.before_backward(loss)
            # Parameters come first in the state; buffers get no gradients.
            parameters = state_tensors[: len(parameter_names)]
            return [loss, *torch.autograd.grad(loss, parameters, torch.full_like(loss, gradient_seed))]

    assert fake_mode.shape_env is not None
    checks = written_checks(fake_mode.shape_env, symbol)

    def recorded(*args: Any) -> list[Tensor]:
        tracer = cast(Any, get_proxy_mode()).tracer
        # The tracer exists only while make_fx runs, so recording begins in here.
        with recorder.recording(tracer), checks, marking(model, observe, tracer, symbol):
            return joint_step(*args)

    try:
        # On a single thread, since the recorder follows backward from autograd node to autograd node.
        with torch.autograd.set_multithreading_enabled(False), lazily_compiled():
            module = symbolic_graph(recorded, fake_mode)(fake_state, list(fake_inputs))
    except (CaseError, TraceError):
        raise
    except Exception as error:
        # A higher-order operator in a chunked module has an error of its own, which names the operator.
        caller = recorder.module_of(error)
        if chunking is not None and caller and chunking.root_of(caller):
            higher_order.refuse_failed(caller, error, _innermost_user_line(error))
        what = f"cannot trace the training step with dim {chunk_dim} of its inputs left open"
        raise _refusal(what, "that dim", error) from error
    _complete(module)
    # 3. to 5. Refusals and conditions. The refusals read the complete graph.
    guards = find_guards(module, fake_mode.shape_env, chunk_symbol, chunk_dim, chunking)
    log.debug("traced %d nodes, chunk symbol %s = %d, %d guards", len(module.graph.nodes), *chunk_symbol, len(guards))
    return JointGraph(
        module=module,
        parameter_names=parameter_names,
        buffer_names=names[len(parameter_names) :],
        num_inputs=len(inputs),
        chunk_symbol=chunk_symbol,
        guards=guards,
        module_calls={name: recorder.num_calls[name] for name, _ in model.named_modules() if name},
    )


def find_guards(
    module: GraphModule, shape_env: ShapeEnv, chunk_symbol: ChunkSymbol, dim: int, chunking: Chunking | None
) -> list[Guard]:
    """Return the conditions on the chunk symbol that the trace of `module` assumed.

    `dim` is the chunked dim of the step's inputs. Raises TraceError for a trace that fixed the symbol or has opaque
    nested graphs, and ChunkError for a higher-order operator in a module that `chunking` chooses.
    """
    symbol = chunk_symbol.symbol
    guards = _deferred_guards(shape_env, symbol)
    _refuse_fixed_symbol(shape_env, symbol, dim, guards)
    refuse_opaque_nested_graphs(module)
    if chunking is not None:
        roots = ((node, chunking.root_of(origin_of(node).module or "")) for node in module.graph.nodes)
        higher_order.refuse_calls(((node, root) for node, root in roots if root), symbol)
    return guards


def _complete(module: GraphModule) -> None:
    """Give a graph from make_fx the form that passes need: each input is an argument, and every node has a `val`."""
    module.graph.set_codegen(CodeGen())  # make_fx's graph takes two lists
    module.recompile()
    for reference in module.graph.find_nodes(op="get_attr"):
        reference.meta["val"] = getattr(module, reference.target)
    complete_checks(module)


def complete_checks(module: GraphModule) -> None:
    # Tracing sets no `val` for assertions, but passes read it for every node.
    for graph in (part.graph for part in module.modules() if isinstance(part, GraphModule)):
        for check in filter(operators.is_check, graph.nodes):
            check.meta.setdefault("val", None)


def trace_fixed_step(
    model: nn.Module,
    loss_function: LossFunction,
    inputs: Sequence[Tensor],
    *,
    gradient_seed: float,
    device: torch.device,
) -> StepGraph:
    """Trace a step as `trace_joint_step` does, but with fixed sizes, so that code may branch on them.

    The graph is only for inspection: no pass can run on it. A step that splits its tensors into chunks itself can be
    traced, too.
    """
    # Nothing is open, so repeated layers may be computed once (see `step_fake_mode`).
    fake_mode = step_fake_mode(shape_env=ShapeEnv(), repeats=True)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [name for name, _ in model.named_parameters()]
    recorder = OriginRecorder(model)

    def step(state_tensors: list[Tensor], input_tensors: list[Tensor]) -> list[Tensor]:
        with (
            recorder.recording(cast(Any, get_proxy_mode()).tracer),
            swapped_state(model, dict(zip(state, state_tensors, strict=True))),
        ):
            loss = loss_function(*input_tensors)
            recorder.before_backward(loss)
            seed = torch.full_like(loss, gradient_seed)
            return [loss, *torch.autograd.grad(loss, state_tensors[: len(names)], seed)]

    fake_state = [fixed_fake(fake_mode, x, device) for x in state.values()]
    fake_inputs = [fixed_fake(fake_mode, x, device) for x in inputs]
    # On a single thread, as in `trace_joint_step`.
    with torch.autograd.set_multithreading_enabled(False), lazily_compiled():
        module = symbolic_graph(step, fake_mode)(fake_state, fake_inputs)
    return StepGraph(module, names, list(state)[len(names) :], len(inputs))


@_naming_untested_release
def trace_forward(
    name: str, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], *, chunk_dim: int
) -> tuple[GraphModule, sympy.Symbol]:
    """Trace a module's `forward`. Returns (the graph, the chunk symbol).

    - `name`: the module's name.
    - `arguments`: the arguments of `forward`, by name. The first argument must be a tensor. Arguments that are not
      tensors, such as a BlockMask, become None.
    - `chunk_dim`: a dim of the first argument, whose size becomes the chunk symbol. Other tensors with this size in
      this dim get the same symbol.

    Raises TraceError if it cannot be traced, and ChunkError if a higher-order operator is the cause.
    """
    extent = next(iter(arguments.values())).shape[chunk_dim]
    # A single forward has few repeated calls, so torch's cache would cost more than it saves.
    fake_mode = step_fake_mode(ShapeEnv(), remembers=False)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fake_state = [fixed_fake(fake_mode, x.detach(), x.device) for x in state.values()]
    tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    # Other arguments with the chunked extent, such as positions, get the same symbol; all others keep their sizes.
    fake_inputs: list[Tensor] = [
        _fake_input(fake_mode, x, chunk_dim, extent, i, x.device)
        if x.dim() > chunk_dim and x.shape[chunk_dim] == extent
        else fixed_fake(fake_mode, x, x.device)
        for i, x in enumerate(tensors.values())
    ]
    recorder = OriginRecorder(module, name)

    def run(state_tensors: list[Tensor], input_tensors: list[Tensor]) -> Any:
        # The arguments in their order, with None for those that are no tensors.
        given = dict.fromkeys(arguments) | dict(zip(tensors, input_tensors, strict=True))
        with (
            recorder.recording(cast(Any, get_proxy_mode()).tracer),
            swapped_state(module, dict(zip(state, state_tensors, strict=True))),
        ):
            return forward(**given)

    try:
        with torch.no_grad(), lazily_compiled():
            graph = symbolic_graph(run, fake_mode)(fake_state, fake_inputs)
    except Exception as error:
        higher_order.refuse_failed(name, error, _innermost_user_line(error))
        what = f"cannot determine whether {name} mixes what its chunks hold apart, as its forward cannot be traced"
        raise _refusal(what, f"dim {chunk_dim}", error) from error
    return graph, symbols.expression(fake_inputs[0].shape[chunk_dim])


def _refusal(what: str, dim: str, error: Exception) -> TraceError:
    return TraceError(
        what,
        expected=f"code that does not branch on, or bake in, the size of {dim}",
        found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        where=_innermost_user_line(error),
        fix="write the size as x.shape[...], never as int(...) or in an `if`",
    )


def _common_extent(inputs: Sequence[Tensor], dim: int, is_cut: bool) -> int:
    extents = {x.shape[dim] for x in inputs}
    if len(extents) != 1 or (extent := extents.pop()) % (2 if is_cut else 1):
        raise TraceError(
            f"the inputs cannot be chunked along dim {dim}",
            expected="one even size, common to all inputs",
            found=", ".join(str(tuple(x.shape)) for x in inputs),
            fix="choose an even number of sequences (batch) or sequence length (seq) in the case",
        )
    return extent


@contextmanager
def keeping_state(model: nn.Module) -> Iterator[None]:
    """Return a context for a step. Its end raises TraceError if the step has replaced a buffer by another tensor.

    A graph can only write into its inputs, so it could not replace the buffer.
    """
    # Compared by identity: a write in place keeps the tensor.
    before = dict(model.named_buffers())
    yield
    after = dict(model.named_buffers())
    if replaced := [name for name, x in before.items() if after.get(name) is not x]:
        raise TraceError(
            f"the training step replaces the tensor of buffer {replaced[0]}",
            expected="buffers that are written in place, as a graph that reads and writes its inputs can",
            fix="write x.copy_(...) where the module says self.x = ...",
        )


def fixed_fake(fake_mode: FakeTensorMode, x: Tensor, device: torch.device) -> Tensor:
    with fake_mode:
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return fake.requires_grad_(x.requires_grad)


def open_inputs(
    fake_mode: FakeTensorMode, inputs: Sequence[Tensor], dim: int, device: torch.device, *, is_cut: bool
) -> tuple[ChunkSymbol, tuple[Tensor, ...]]:
    """Return (the chunk symbol, a fake tensor for each input). In the fake tensors, the symbol is the size of `dim`.

    `is_cut` is True if the step will run in two equal chunks. Raises TraceError if the inputs have different sizes
    along `dim`, or if the size must be even and is not.
    """
    extent = _common_extent(inputs, dim, is_cut)
    fakes = tuple(_fake_input(fake_mode, x, dim, extent, i, device) for i, x in enumerate(inputs))
    return ChunkSymbol(symbols.expression(fakes[0].shape[dim]), extent), fakes


def _fake_input(
    fake_mode: FakeTensorMode, x: Tensor, dim: int, extent: int, index: int, device: torch.device
) -> FakeTensor:
    # This tensor is real: on `device` it could need a GPU.
    placeholder = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    # From the rows of a chunk to all rows. With a single size the dim would not be symbolic.
    bounds = max(extent // 2, 1), max(extent, 2)
    fake = open_dim(fake_mode, placeholder, dim, bounds, f"input_{index}", shared="chunk")
    if device.type == "cpu":
        return fake
    with fake_mode:
        # A copy of the fake tensor keeps the symbol.
        return cast(FakeTensor, torch.empty_like(fake, device=device))


def _refuse_fixed_symbol(shape_env: ShapeEnv | None, symbol: sympy.Symbol, dim: int, guards: list[Guard]) -> None:
    assert shape_env is not None
    fixed = shape_env.replacements.get(symbol)
    if fixed is None:
        return
    # The condition that fixed the symbol has the source line.
    proofs = (guard.source for guard in guards if guard.condition == sympy.Eq(symbol, fixed))
    raise TraceError(
        f"the training step fixes the size of dim {dim} of its inputs, which must be left open",
        expected=f"sizes computed from x.shape, so that dim {dim} may have any size",
        found=f"a number that fits only {symbol} = {fixed}",
        where=next(proofs, None),
        fix="write the size as x.shape[...] or -1, not as a number",
    )


def refuse_opaque_nested_graphs(module: GraphModule) -> None:
    """Raise TraceError for a nested graph that does more than compute from its operands, such as draw or write.

    Passes see only the operands of a higher-order operator, not such effects.
    """
    for path, nested in module.named_modules():
        for node in nested.graph.nodes if path and isinstance(nested, GraphModule) else ():
            # The top graph has the path "": its effects are visible.
            if hidden := operators.hidden_effect(node):
                name = path.split(".")[0]
                # The error names the operator that runs the nested graph, since the user knows that call.
                [reader, *_] = (x for ref in module.graph.find_nodes(op="get_attr", target=name) for x in ref.users)
                raise TraceError(
                    f"nested graph `{path}` of {operators.operator_name(reader)} does more than compute from operands",
                    expected="a pure function of the operator's arguments",
                    found=f"`{node.name}`, {hidden}",
                    where=symbols.source_of(reader),
                    fix="hand the operator each tensor that its function reads; draw and write outside of it",
                )


def _deferred_guards(shape_env: ShapeEnv | None, symbol: sympy.Symbol) -> list[Guard]:
    assert shape_env is not None
    return [
        Guard(check.expr, _innermost((frame.filename, frame.lineno) for frame in check.stack.summary()))
        for checks in shape_env.deferred_runtime_asserts.values()
        for check in checks
        # Conditions on data are calls in the graph instead.
        if check.expr.free_symbols == {symbol}
    ]


def _innermost_user_line(error: BaseException) -> str | None:
    return _innermost((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))


def _innermost(frames: Iterable[tuple[str, int]]) -> str | None:
    """Return the innermost line of the user's code among `frames`; None if there is none.

    `frames` are pairs (file, line), outermost first. Only frames after this module's last frame count: earlier frames
    belong to the code that started the trace.
    """
    found = None
    for path, number in frames:
        found = None if path == __file__ else user_line(path, number) or found
    return found

"""Converts a user's object to a program for a proof.

    function, module    traced as it runs on the given inputs, including backward and in-place writes
    graph module        its own nodes, if these are operators; otherwise traced, node by node
    exported program    its own nodes, run only on fake values, operator by operator

The inputs of a traced program are the tensors anywhere among its arguments, the parameters and buffers of modules, and
the state tensors of optimizers. Everything else is part of the program.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen
from torch.optim import Optimizer

from bitproof.harness.graph.origin import META_KEY, Origin, OriginRecorder, user_line
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.graph.tracing.trace import fixed_fake, keeping_state
from bitproof.harness.machine.determinism import Switches
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.answers import BUFFER, INPUT, PARAMETER
from bitproof.harness.powers.proofs.prover.graphs.calls_only import why_not_calls_only
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.pairs import MOST_ELEMENTS, Provable
from bitproof.harness.powers.proofs.prover.programs.exported_file import SavedProgram
from bitproof.harness.powers.proofs.prover.programs.one_by_one import one_by_one, without_regions
from bitproof.harness.powers.proofs.prover.programs.one_setting import under_one_setting
from bitproof.harness.powers.proofs.prover.programs.optimizers import OPTIMIZER, HeldOptimizers
from bitproof.harness.powers.proofs.prover.programs.reachable import (
    GRADIENT,
    Around,
    Reached,
    changed,
    copied,
    has_values,
    is_users_file,
    plain_token,
)
from bitproof.harness.powers.proofs.prover.programs.side_effects import refusing_side_effects
from bitproof.harness.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    backward_callbacks,
    flattened,
    has_open_sizes,
    hooks_of_gradients,
    is_wrapper_subclass,
    keys_of,
    swapped_state,
    symbolic_graph,
)
from bitproof.harness.torch_compile import lazily_compiled
from bitproof.harness.torch_tracing import on_failures
from bitproof.harness.within_user_code import refused

NO_STEP = "a graph says nothing of what calls it"

OUTPUT, WRITTEN, LOSS = "output ", "written ", "loss"


@dataclass(frozen=True)
class ConvertedProgram:
    """A program, and the original values of its inputs by name."""

    program: Provable
    values: Mapping[str, Any]
    single_step_reason: str | None = NO_STEP
    """Why the next call may depend on more of this call than its outputs; None if it does not."""
    subject: Any = None
    """The object to call with `inputs` in a real run; None if the program is only a graph."""
    inputs: Sequence[Any] = ()
    effects: Mapping[str, Any] = field(default_factory=dict)
    """The changes that a call makes to values that are not tensors, by path, such as a counter or the length of a list.

    Changed tensors are outputs instead.
    """
    keys: Sequence[tuple[Any, ...]] | None = None
    """For each output, the dictionary keys and fields that lead to it in the returned value; None if unknown."""

    @property
    def called(self) -> str:
        return str(getattr(self.subject, "__qualname__", type(self.subject).__name__))


def convert(subject: Any, inputs: Sequence[Any], dynamic_shapes: Any = None) -> ConvertedProgram:
    """Convert a user's object to a program. Raises RefusedError, naming the object, if that is impossible."""
    if isinstance(subject, ExportedProgram | SavedProgram):
        return _exported(subject)
    if dynamic_shapes is not None:
        found = _exported(_export(subject, inputs, dynamic_shapes))
        return replace(found, values={**found.values, **_state(_modules(subject, ()))}, subject=subject, inputs=inputs)
    if isinstance(subject, GraphModule) and is_plain(subject) and not why_not_calls_only(subject):
        return replace(of_graph(subject, inputs), subject=subject, inputs=inputs)
    if not callable(subject):
        raise RefusedError(f"a {type(subject).__name__} is no program", where="what is to be proved")
    return _traced(subject, inputs)


# -- graphs -------------------------------------------------------------------------------------------


def is_plain(module: GraphModule) -> bool:
    """Return whether a graph only calls operators and arithmetic on numbers, so that no trace is needed."""
    return all(
        node.op in ("placeholder", "get_attr", "output")
        or (node.op == "call_function" and (isinstance(node.target, _READABLE) or node.target in known.ARITHMETIC))
        or node.target is operator.getitem
        for node in module.graph.nodes
    )


_READABLE = (OpOverload, HigherOrderOperator)


def of_graph(module: GraphModule, inputs: Sequence[Any]) -> ConvertedProgram:
    """Return a graph as a program with these inputs. Later changes of the graph do not affect the program.

    Raises RefusedError if the graph does not take this number of inputs.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    leaves = flattened(tuple(inputs))[0]
    if len(leaves) != len(placeholders):
        raise RefusedError(f"a graph of {len(placeholders)} inputs is given {len(leaves)}", where="its inputs")
    names = [f"{INPUT}{i}" for i in range(len(leaves))]
    copy = Graph()
    returned = flattened(copy.graph_copy(module.graph, {}))[0]
    first: dict[int, Node] = {}
    for leaf, own in zip(leaves, copy.find_nodes(op="placeholder"), strict=True):
        # A tensor passed twice is a single input; otherwise a proof would have to hold for two different tensors.
        if (one := first.setdefault(id(leaf), own)) is not own and isinstance(leaf, Tensor):
            own.replace_all_uses_with(one)
            returned = [one if x is own else x for x in returned]
    return ConvertedProgram(
        _program(GraphModule(module, copy), names, leaves, returned), dict(zip(names, leaves, strict=True))
    )


def _program(module: GraphModule, names: Sequence[str], inputs: Sequence[Any], returned: Sequence[Any]) -> Provable:
    # The copied graph has no output node yet; `_returning` adds one.
    named = [(f"{OUTPUT}{i}", x) for i, x in enumerate(returned)]
    return _returning(module, names, inputs, named)


def _returning(
    module: GraphModule, names: Sequence[str], inputs: Sequence[Any], returned: Sequence[tuple[str, Any]]
) -> Provable:
    nodes = [(name, x) for name, x in returned if isinstance(x, Node)]
    module.graph.output([x for _, x in nodes])
    others = tuple((name, repr(x)) for name, x in returned if not isinstance(x, Node))
    if opaque := [(name, x) for name, x in returned if not isinstance(x, Node) and plain_token(x) is None]:
        name, x = opaque[0]
        what = f"{name} is a {type(x).__name__}, neither a tensor nor a plain value: return what it holds"
        raise RefusedError(what, where="the outputs")
    return Provable(module, names, inputs, [name for name, _ in nodes], others=others)


# -- exported programs --------------------------------------------------------------------------------


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _export(subject: Any, inputs: Sequence[Any], dynamic_shapes: Any) -> ExportedProgram:
    module = subject if isinstance(subject, nn.Module) else _Function(subject)
    # `_Function` takes all arguments as one, `*args`, so their shapes are a single entry.
    shapes = dynamic_shapes if module is subject or not isinstance(dynamic_shapes, tuple | list) else (dynamic_shapes,)
    try:
        return torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise RefusedError(f"it cannot be exported: {type(error).__name__}: {reason}", where="torch.export") from error


def _exported(exported: ExportedProgram | SavedProgram) -> ConvertedProgram:
    graph, signature = exported.graph_module.graph, exported.graph_signature
    module = GraphModule(exported.graph_module, Graph())
    env: dict[Node, Node] = {}
    names: list[str] = []
    inputs: list[Any] = []
    values: dict[str, Any] = {}
    # The graph of an exported program has no state: parameters, buffers and constants are inputs, listed in the
    # signature. A proof keeps constants as part of the graph, since they never change.
    users = iter(flattened(exported.example_inputs)[0] if exported.example_inputs else ())
    for spec, node in zip(signature.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        kind = spec.kind.name
        if kind == "CONSTANT_TENSOR":
            constant = f"constant_{len(env)}"
            module.register_buffer(constant, exported.constants[str(spec.target)])
            env[node] = module.graph.get_attr(constant)
            continue
        if kind not in _INPUTS or not isinstance(node.meta.get("val"), Tensor | torch.SymInt | int):
            raise RefusedError(f"an input of kind {kind} (`{node.name}`)", where="the exported program's inputs")
        given = sum(name.startswith(INPUT) for name in names)
        name = f"{INPUT}{given}" if kind == "USER_INPUT" else f"{_INPUTS[kind]}{spec.target}"
        stored = exported.state_dict.get(str(spec.target), exported.constants.get(str(spec.target)))
        values[name] = next(users, None) if kind == "USER_INPUT" else stored
        env[node] = module.graph.node_copy(node)
        names.append(name)
        inputs.append(node.meta["val"])
    for node in graph.nodes:
        if node.op == "get_attr":
            raise RefusedError(f"a nested graph or an attribute (`{node.name}`)", where="the exported program's graph")
        if node.op not in ("placeholder", "output"):
            env[node] = module.graph.node_copy(node, env.__getitem__)
            if node.target is torch.ops.aten.detach_.default:
                env[node].target = torch.ops.aten.detach.default  # it changes no element, and shares the memory
    returned = flattened(graph.output_node().args[0])[0]
    by_argument = {
        node.name: name for node, name in zip(graph.find_nodes(op="placeholder"), _input_names(signature), strict=True)
    }
    named = [
        (_output_name(spec, place, by_argument), env[x] if isinstance(x, Node) else x)
        for place, (spec, x) in enumerate(zip(signature.output_specs, returned, strict=True))
    ]
    # Final values of written inputs come before the user's outputs, which are numbered from 0.
    first = sum(name.startswith(WRITTEN) for name, _ in named)
    named = [(f"{OUTPUT}{i - first}" if name == OUTPUT else name, x) for i, (name, x) in enumerate(named)]
    program = _returning(module, names, inputs, named)
    if isinstance(exported, SavedProgram):
        program = replace(program, others=(*program.others, ("the outputs' structure", exported.returns)))
    return ConvertedProgram(program, values)


_INPUTS = {"PARAMETER": PARAMETER, "BUFFER": BUFFER, "USER_INPUT": INPUT}


def _input_names(signature: Any) -> Iterator[str]:
    count = 0
    for spec in signature.input_specs:
        is_users = spec.kind.name == "USER_INPUT"
        yield f"{INPUT}{count}" if is_users else f"{_INPUTS.get(spec.kind.name, '')}{spec.target}"
        count += is_users


def _output_name(spec: Any, place: int, inputs: Mapping[str, str]) -> str:
    match spec.kind.name:
        case "USER_OUTPUT":
            return OUTPUT
        case "LOSS_OUTPUT":
            return LOSS
        case "BUFFER_MUTATION":
            return f"{WRITTEN}{BUFFER}{spec.target}"
        case "PARAMETER_MUTATION":
            return f"{WRITTEN}{PARAMETER}{spec.target}"
        case "USER_INPUT_MUTATION":
            return f"{WRITTEN}{inputs[spec.target]}"
        case "GRADIENT_TO_PARAMETER":
            return f"{GRADIENT}{spec.target}"
        case "GRADIENT_TO_USER_INPUT":
            return f"{GRADIENT}{inputs[spec.target]}"
    raise RefusedError(f"output {place} is of kind {spec.kind.name}", where="the exported program's outputs")


# -- functions and modules ----------------------------------------------------------------------------


def _modules(subject: Any, leaves: Sequence[Any]) -> dict[str, nn.Module]:
    """Return the modules of a program, by the prefix of their parameters' names.

    - If the program itself is a module, its prefix is "".
    - The prefix of a module among the inputs is its number among these modules, such as "0."; or "" if it is the
      program's only module.
    """
    modules = {"": subject} if isinstance(subject, nn.Module) else {}
    inner = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    return modules | {f"{i}." if modules or len(inner) > 1 else "": leaf for i, leaf in enumerate(inner)}


def _state(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for prefix, module in modules.items():
        state |= {f"{PARAMETER}{prefix}{name}": x for name, x in module.named_parameters()}
        state |= {f"{BUFFER}{prefix}{name}": x for name, x in module.named_buffers()}
    return state


def roots_of(subject: Any, inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the objects from which a program can reach all others, by name: the program and its inputs.

    Modules and optimizers come first, so the paths to their contents start with the name of the module or optimizer.
    """
    # Otherwise the paths would differ for two programs that take the same module at different positions.
    leaves = flattened(tuple(inputs))[0]
    modules = {f"module {prefix.removesuffix('.')}": x for prefix, x in _modules(subject, leaves).items()}
    optimizers = [leaf for leaf in leaves if isinstance(leaf, Optimizer)]
    return {
        **modules,
        **{f"optimizer {i}": x for i, x in enumerate(optimizers)},
        **{f"argument {i}": x for i, x in enumerate(inputs)},
        "function": subject,
    }


def _traced(subject: Callable[..., Any], inputs: Sequence[Any]) -> ConvertedProgram:
    # Tensors themselves are not copied here: the trace runs on fake values of them.
    own = copied({"subject": subject, "inputs": tuple(inputs)}, lambda x: x)
    leaves, rebuilt = flattened(own["inputs"])
    modules = _modules(own["subject"], leaves)
    state = _state(modules)
    names = {id(x): name.removeprefix(PARAMETER) for name, x in state.items() if name.startswith(PARAMETER)}
    optimizers = HeldOptimizers([leaf for leaf in leaves if isinstance(leaf, Optimizer)], names)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    values = {**state, **optimizers.state, **{f"{INPUT}{i}": x for i, x in enumerate(tensors)}}
    values |= {f"{GRADIENT}{name}": x.grad for name, x in values.items() if x.is_leaf and x.grad is not None}
    for name, x in values.items():
        is_seen_otherwise = x.is_nested or x.is_quantized or x.is_conj() or x.is_neg()
        if x.layout != torch.strided or is_seen_otherwise or is_wrapper_subclass(type(x)):
            raise RefusedError(f"{name} is a {type(x).__name__} that is not plain memory", where="the inputs")
        if has_open_sizes(x):
            raise RefusedError(f"{name} has open sizes, and the program is more than operators", where="the inputs")
        if x.grad_fn is not None:
            what = f"{name} was computed ({x.grad_fn.name()}), and a backward would go on into what computed it"
            raise RefusedError(f"{what}: pass it as x.detach().requires_grad_()", where="the inputs")
        if hooks_of_gradients(x):
            raise RefusedError(f"{name} has hooks on its gradient, which no graph shows", where="the inputs")
    tracing = _Tracing(own["subject"], own["inputs"], leaves, rebuilt, modules, optimizers, values)
    fake_mode = step_fake_mode(ShapeEnv())
    # Fixed sizes: code of the user's may branch on them, and the proof holds for these sizes only.
    fakes = [fixed_fake(fake_mode, x, x.device) for x in values.values()]
    before = Switches.now()
    try:
        # One thread for backward, so that its calls have the same order in each trace.
        with (
            torch.autograd.set_multithreading_enabled(False),
            lazily_compiled(),
            _refusing_failures(why_not_run(values)),
        ):
            graph = symbolic_graph(lambda given: tracing.run(given), fake_mode, as_eager=True)(fakes)
    except RefusedError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        what = f"it cannot be traced: {type(error).__name__}: {reason}"
        raise RefusedError(what, where=tracing.where or _line_of(error)) from error
    finally:
        switched = before.changes()
        # Also after an error, so that the next program does not run under these switches.
        before.restore()
    if switched:
        raise RefusedError(f"it changes what holds for the whole process: {'; '.join(switched)}", where="the program")
    graph.graph.set_codegen(CodeGen())
    output = without_regions(graph).graph.output_node()
    # A trace returns only tensors and sizes, in the order of `tracing.outputs`.
    traced = iter(output.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(output)
    returned = [(name, next(traced) if isinstance(x, Tensor | torch.SymInt) else x) for name, x in tracing.outputs]
    read = {x for _, x in returned if isinstance(x, Node)}
    for name, like, node in zip([*values], fakes, graph.graph.find_nodes(op="placeholder"), strict=True):
        # A gradient that the program never reads is no input of it.
        if name.startswith(GRADIENT) and not node.users and node not in read:
            graph.graph.erase_node(node)  # it was there before and stays
            fakes = [x for x in fakes if x is not like]
            del values[name]
    program = _returning(graph, list(values), fakes, returned)
    there = next((name for name, x in values.items() if name.startswith(PARAMETER) and x.grad is not None), None)
    begins = f"a gradient of {there} is there before the step, which may add to it" if there else None
    single_step_reason = begins or tracing.single_step_reason
    return ConvertedProgram(program, values, single_step_reason, subject, inputs, tracing.effects, tracing.keys)


def why_not_run(values: Mapping[str, Any]) -> str | None:
    """Return why a program with these inputs cannot be run here, such as a tensor without values; None if it can."""
    tensors = [x for x in values.values() if isinstance(x, Tensor)]
    if not all(map(has_values, tensors)):
        return "the inputs have no values"
    if sum(x.numel() for x in tensors) > MOST_ELEMENTS:
        return "the program is too large to be run here"
    if any(x.device.type != "cpu" for x in tensors):
        return "the program is not on the CPU"
    return None


def _refusing_failures(not_run: str | None) -> AbstractContextManager[Any]:
    # Some calls fail only while they are traced, such as reading a tensor's element, so the trace may take another
    # branch than a run. A run would show the difference, but without a run nothing does.

    def failed(what: str) -> None:
        refused(RefusedError(f"{what} while it is traced, and nothing shows what it does then: {not_run}", where="it"))

    return on_failures(failed) if not_run else nullcontext()


def _line_of(error: BaseException) -> str:
    lines = (user_line(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
    return next((line for line in reversed([*lines]) if line), "its first call")


class _Tracing:
    """Runs a function while it is traced, and collects its outputs and effects.

    - `leaves`: the arguments of the function as a flat list. `rebuilt` makes the arguments from such a list.
    - `modules`: the modules of the program, by the prefix of their parameters' names.
    - `values`: the inputs of the program, by name.
    - `where`: the node that runs now, if the function is a graph.
    """

    def __init__(
        self,
        subject: Any,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        rebuilt: Callable[[list[Any]], Any],
        modules: Mapping[str, nn.Module],
        optimizers: HeldOptimizers,
        values: Mapping[str, Tensor],
    ) -> None:
        self.subject = subject
        self.inputs = inputs
        self.leaves = leaves
        self.rebuilt = rebuilt
        self.modules = modules
        self.optimizers = optimizers
        self.values = values
        self.outputs: list[tuple[str, Any]] = []
        self.effects: dict[str, Any] = {}
        self.keys: list[tuple[Any, ...]] = []
        self.single_step_reason: str | None = None
        self.where: str | None = None

    def run(self, given: list[Tensor]) -> list[Any]:
        """Run the function with `given` as its input tensors. Returns the tensors and sizes among its outputs.

        Outputs are the returned values and the tensors that the function changed. `self.outputs` has all outputs by
        name.
        """
        by_name = self._given_by_name(given)
        tracer = cast(Any, get_proxy_mode()).tracer
        tensors = iter(x for name, x in by_name.items() if name.startswith(INPUT))
        args = self.rebuilt([next(tensors) if isinstance(x, Tensor) else x for x in self.leaves])
        recorder = OriginRecorder(next(iter(self.modules.values()), nn.Module()))
        known = {id(x): name for name, x in reversed(by_name.items())}  # the first name of a tensor wins
        with ExitStack() as stack:
            for prefix, module in self.modules.items():
                own = {
                    name.removeprefix(kind + prefix): x
                    for kind in (PARAMETER, BUFFER)
                    for name, x in by_name.items()
                    if name.startswith(kind + prefix)
                }
                stack.enter_context(swapped_state(module, _own_state(module, own)))
                stack.enter_context(keeping_state(module))
            parameters = {name.removeprefix(PARAMETER): x for name, x in by_name.items() if name.startswith(PARAMETER)}
            stack.enter_context(self.optimizers.swapped(by_name, parameters))
            before = Reached(roots_of(self.subject, args), known)
            stack.enter_context(under_one_setting())
            stack.enter_context(one_by_one())
            stack.enter_context(recorder.recording(tracer))
            stack.enter_context(backward_callbacks(recorder.before_backward, recorder.after_backward))
            # State is compared inside the contexts above: on leaving, they put the original tensors back.
            surroundings = Around(before, in_place=False)
            if isinstance(self.subject, GraphModule) and not why_not_calls_only(self.subject):
                found = _Named(self.subject, self, tracer).run(*args)
            else:
                with refusing_side_effects(is_users_file):
                    found = self.subject(*args)
            self._refuse_replaced(by_name)
            surroundings.refuse_changes()
            after = Reached(roots_of(self.subject, args) | {"returned": found}, known)
        changes = changed(before, after, without="returned")
        self.effects = {place: x for place, x in changes.items() if not isinstance(x, Tensor)}
        self.single_step_reason = self._why_keeps_less(changes)
        self.keys = keys_of(found)
        self.outputs = [(f"{OUTPUT}{i}", x) for i, x in enumerate(flattened(found)[0])]
        self.outputs += [(f"{WRITTEN}{place}", x) for place, x in changes.items() if isinstance(x, Tensor)]
        return [x for _, x in self.outputs if isinstance(x, Tensor | torch.SymInt)]

    def _given_by_name(self, given: Sequence[Tensor]) -> dict[str, Tensor]:
        first: dict[int, Tensor] = {}
        by_name = {
            name: first.setdefault(id(x), own) for (name, x), own in zip(self.values.items(), given, strict=True)
        }
        for name, x in by_name.items():
            if (gradient := by_name.get(f"{GRADIENT}{name}")) is not None:
                # Backward adds to a gradient that is there, so the trace must see it.
                x.grad = gradient
        return by_name

    def _refuse_replaced(self, given: Mapping[str, Tensor]) -> None:
        for prefix, module in self.modules.items():
            for name, x in module.named_parameters(remove_duplicate=False):
                if given.get(f"{PARAMETER}{prefix}{name}", x) is not x:
                    what = f"it puts another tensor in the place of parameter {prefix}{name}"
                    raise RefusedError(what, where="the program")

    def _why_keeps_less(self, changes: Mapping[str, Any]) -> str | None:
        tensors = {place: x for place, x in changes.items() if isinstance(x, Tensor)}
        optimizers = {place: x for place, x in tensors.items() if place.startswith(OPTIMIZER)}
        left = [place for place in tensors if place.startswith(f"{GRADIENT}{PARAMETER}")]
        if others := [place for place in changes if place not in {*optimizers, *left}]:
            return f"the step changes what is no tensor: {', '.join(others[:3])}"
        if new := [place for place, x in optimizers.items() if not _has_layout_of(x, self.values.get(place))]:
            return f"the optimizer makes state in this step, or lays it out again: {new[0]}; take a step before"
        if left:
            name = left[0].removeprefix(f"{GRADIENT}{PARAMETER}")
            return f"the step leaves a gradient of {name}, to which the next may add: end it by zero_grad()"
        return None


def _has_layout_of(x: Tensor, other: Tensor | None) -> bool:
    kinds = [(y.dtype, y.device, y.shape, y.stride(), y.storage_offset()) for y in (x, other) if y is not None]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def _own_state(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: x for name, x in state.items() if name in names}


class _Named(Interpreter):
    """Runs a graph node by node, while it is traced.

    If a traced call has no source line, the name of the node that made the call is recorded instead.
    """

    def __init__(self, module: GraphModule, tracing: _Tracing, tracer: Any) -> None:
        super().__init__(module)
        self._tracing, self._tracer = tracing, tracer

    def run_node(self, n: Node) -> Any:
        self._tracing.where = f"`{n.name}`"
        create_node = self._tracer.create_node

        def named(*args: Any, **kwargs: Any) -> Node:
            made: Node = create_node(*args, **kwargs)
            own = made.meta.get(META_KEY)
            if own is not None:
                # A call without a line of user code is identified by the node that runs.
                made.meta[META_KEY] = Origin(own.module, own.direction, own.source or f"`{n.name}`")
            return made

        self._tracer.create_node = named
        try:
            return super().run_node(n)
        finally:
            self._tracer.create_node = create_node

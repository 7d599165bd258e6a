"""All that bitproof uses of torch that is private, or that is not the same in every release it runs on.

No other module touches either, but `torch_inductor.py` for Inductor, so a new release of torch is met here. Private is
a name with a leading underscore, and what stands in a module of such a name, in dynamo or in inductor. Operators under
`torch.ops` are not: a graph is written in them, and torch keeps their schemas. `torch_versions.py` says which releases
count.

What differs between them:

    open_dim          2.11 takes an open dim's bounds as conditions on its size, 2.12 and later with the dim
    symbolic_graph    2.11 and 2.12 ask the sizes of linear and matmul as numbers, unless Python's kernels come first

Importing this loads nothing that `import torch` does not; dynamo and inductor load when a function here needs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from io import BytesIO
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch._dispatch.python import enable_python_dispatcher
from torch._logging import trace_structured
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import _unsafe_preserve_version_counter as unsafe_preserve_version_counter
from torch.distributed import distributed_c10d
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, make_fx
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.fx.graph_module import _WrappedCall
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from bitproof.harness.torch_versions import warning_of

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "LazyGraphModule",
    "LazyTraceHandler",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TorchLogsFormatter",
    "disable_current_modes",
    "is_wrapper_subclass",
    "register_op_impl",
    "trace_log",
    "tree_leaves",
    "tree_map_only",
    "unsafe_preserve_version_counter",
]

# The release.


def import_tracing() -> None:
    """Import what torch would import when a first step is traced: 0.5 s, which forked processes then save."""
    import sympy.combinatorics  # noqa: F401
    import torch._inductor.sizevars
    import torch.export._trace  # noqa: F401


def build() -> tuple[str, str, str]:
    """This torch: its whole version, the commit it was built from, and with what it was built."""
    return str(torch.__version__), str(torch.version.git_version), torch.__config__.show()


def untested_release() -> str | None:
    """This torch, in words, when it is none of those that bitproof was tested on; else None."""
    return warning_of(str(torch.__version__))


def functional_collectives() -> Any:
    """torch's collectives that return their results; through those named `..._autograd` backward goes."""
    import torch.distributed._functional_collectives as collectives

    return collectives


# Tracing.


def symbolic_graph(
    function: Callable[..., Any], fake_mode: FakeTensorMode, decompositions: Mapping[Any, Any] | None = None
) -> Callable[..., GraphModule]:
    """`function` as what traces it: called with fake tensors, it returns the graph of the operators that it runs.

    A number that depends on data is left to run time, as symbols are.
    """
    traced = make_fx(function, decomposition_table=decompositions, _error_on_data_dependent_ops=False)

    def trace(*args: Any) -> GraphModule:
        # 2.11 and 2.12 lower linear and matmul in C++, which asks for sizes as numbers; their Python versions do not.
        # Later releases need it for decompositions alone, and trace the same graph with it.
        with fake_mode, enable_python_dispatcher():
            if decompositions:
                return traced(*args)
            with mock.patch.object(proxy_tensor, "_extract_tensor_metadata", lambda value: None):
                return _without_tensor_meta(traced(*args))

    return trace


def _without_tensor_meta(module: GraphModule) -> GraphModule:
    """Each node with its `val` alone, and not told a second time in older words, which takes a tenth of a trace.

    None of our passes reads those, and they would be wrong after the first that changes a size. What Inductor compiles
    is traced again, decomposed, with them.
    """
    for nested in module.modules():
        for node in nested.graph.nodes if isinstance(nested, GraphModule) else ():
            node.meta.pop("tensor_meta", None)
    return module


def traced_node(tensor: Tensor, tracer: Any) -> Node | None:
    """The node of a running trace that computes a tensor; None for one that the trace does not know."""
    return get_proxy_slot(tensor, tracer, None, lambda found: found.proxy.node)


def lazily_compiled() -> AbstractContextManager[Any]:
    """Where graphs that are made have no code until it is asked for."""
    return _use_lazy_graph_module(True)


def open_dim(
    fake_mode: FakeTensorMode, placeholder: Tensor, dim: int, bounds: tuple[int, int], name: str, *, shared: str
) -> FakeTensor:
    """A fake input of `placeholder`'s layout with one dim of a size that no code can branch on, within `bounds`.

    Inputs whose open dims are `shared` by one name have one symbol there.
    """
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.STATIC] * placeholder.dim()
    sizes[dim] = DimDynamic.UNBACKED
    options: dict[str, Any] = {"shape_ids": {dim: shared}}
    takes_bounds = "unbacked_bounds" in {field.name for field in dataclasses.fields(StatelessSymbolicContext)}
    if takes_bounds:
        options["unbacked_bounds"] = {dim: bounds}
    context: Any = StatelessSymbolicContext(sizes, **options)
    shape_env = fake_mode.shape_env
    assert shape_env is not None
    with shape_env.ignore_fresh_unbacked_symbols():
        fake = fake_mode.from_tensor(placeholder, source=LocalSource(name, is_input=True), symbolic_context=context)
    if not takes_bounds:
        # 2.11, on which sizes 0 and 1 would be cases of their own, and code that tells them untraceable. Bounds given
        # as conditions are kept as guards, as later releases keep theirs, and outdate what was answered without them.
        torch._check(fake.shape[dim] >= bounds[0])
        torch._check(fake.shape[dim] <= bounds[1])
    return fake


def backward_told(before: Callable[[Tensor], None], after: Callable[[], None]) -> AbstractContextManager[Any]:
    """Where each tensor that a backward begins from is told before it runs, and its end after."""
    run = torch.autograd._engine_run_backward

    def running(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        for x in outputs:
            before(x)
        try:
            return run(outputs, *args, **kwargs)
        finally:
            after()

    return mock.patch.object(torch.autograd, "_engine_run_backward", running)


def flattened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of nested tuples, lists, dictionaries and what else torch's trees know, and what builds it again."""
    leaves, spec = tree_flatten(value)
    return leaves, lambda own: tree_unflatten(own, spec)


def swapped_state(model: nn.Module, state: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """A module that reads these tensors in place of its parameters and buffers, tied ones together."""
    return _reparametrize_module(model, dict(state), tie_weights=True)


def joint_graph(module: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule:
    """A module's forward and backward as one graph without in-place writes; `role_of` tells what its ends are.

    `inputs`, and the module's parameters and buffers, are fake tensors of one mode.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, inputs).graph_module


class Role(NamedTuple):
    """What an input or an output of a joint graph is: of which kind, and of what. An input has its position as name."""

    kind: Literal["parameter", "buffer", "input", "output", "tangent", "written", "gradient", "other"]
    of: str


def role_of(descriptor: Any) -> Role:
    """What one of torch's descriptors says. A gradient is of a parameter; what is written, of a parameter or buffer."""
    from torch._functorch._aot_autograd import descriptors as d

    match descriptor:
        case d.ParamAOTInput(target=name):
            return Role("parameter", name)
        case d.BufferAOTInput(target=name):
            return Role("buffer", name)
        case d.PlainAOTInput(idx=index):
            return Role("input", str(index))
        case d.PlainAOTOutput(idx=index):
            return Role("output", str(index))
        case d.TangentAOTInput(output=output):
            return Role("tangent", role_of(output).of)
        case d.InputMutationAOTOutput(mutated_input=written):
            return Role("written", role_of(written).of)
        case d.GradAOTOutput(grad_of=parameter):
            return Role("gradient", role_of(parameter).of)
    return Role("other", str(descriptor))


def divided(
    module: GraphModule, num_outputs: int, num_static: int, *, by: str, cse: bool
) -> tuple[GraphModule, GraphModule]:
    """A joint graph's forward and backward; `by` is "min_cut" or "default", torch's two ways to choose what is saved.

    The first `num_outputs` outputs are forward's, inputs of a name with "tangents" in it are backward's. The first
    `num_static` inputs live on in any case. Calls are kept with their names and metadata; those of both graphs have one
    name in both. `cse`: calls that look the same may become one. The module's own graph is used up.
    """
    from torch._functorch import config, partitioners

    way = partitioners.min_cut_rematerialization_partition if by == "min_cut" else partitioners.default_partition
    settings = {name: value for name, value in (_PARTITION_SETTINGS | {"cse": cse}).items() if hasattr(config, name)}
    with cast(Any, config).patch(settings):
        static = list(range(num_static))
        return way(module, [], num_fwd_outputs=num_outputs, static_lifetime_input_indices=static)


_PARTITION_SETTINGS = {"activation_memory_budget": 1.0, "unsafe_allow_optimization_of_collectives": False}
"""The partitioners' settings that could be set otherwise by the environment or by others of this process."""


def forget_memos(fake: FakeTensor) -> None:
    """Let a fake tensor be asked anew for what depends on data: it remembers the first answer."""
    for name in vars(FakeTensor):
        if name.endswith("_memo"):
            setattr(fake, name, None)


def has_open_sizes(tensor: Tensor) -> bool:
    """Whether any size or stride is a symbol, told without reading them."""
    return tensor._has_symbolic_sizes_strides


def archive_files(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The files of an archive, as torch's reader of exported programs sees them."""
    from torch.export.pt2_archive import PT2ArchiveReader

    with PT2ArchiveReader(BytesIO(content)) as reader:
        for name in reader.get_file_names():
            yield name, reader.read_bytes(name)


def range_of(size: torch.SymInt, symbol: Any) -> tuple[int | None, int | None]:
    """The least and the greatest number that a tracer takes a symbol of a size for; None where there is no bound."""
    found = size.node.shape_env.var_to_range.get(symbol)
    ends = (found.lower, found.upper) if found is not None else (None, None)
    least, most = (int(cast(Any, end)) if getattr(end, "is_Integer", False) else None for end in ends)
    return least, most


def promise(condition: Any) -> None:
    """Let tracing rely on a condition over symbols."""
    torch._check(condition)


Check = Callable[..., None]
"""torch's own check behind `torch._check` and its kin: (error type, condition, message or None)."""


@contextmanager
def checks_replaced(check: Callable[..., None]) -> Iterator[None]:
    """Within this context `torch._check` and its kin call `check(torch's own, error type, condition, message)`."""
    own = torch._check_with
    torch._check_with = functools.partial(check, own)
    try:
        yield
    finally:
        torch._check_with = own


def rename(node: Node, name: str) -> None:
    """Give a node a name, or one like it where that is taken."""
    node._rename(name)


# Operators and autograd.


class FlopCount(TorchDispatchMode):
    """Counts operations while it is entered, by torch's formulas; each call runs as it would. `flops` is None where a
    formula cannot read a call.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: by default torch.compile steps aside for a mode, and computes other bits."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        self._formulas = flop_registry
        self.flops: int | None = 0
        self._known: dict[Any, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and count it where torch has a formula for it."""
        if types and any(is_wrapper_subclass(each) for each in types):
            return NotImplemented  # a DTensor goes first, and calls operators of its local shards
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        formula = self._formulas.get(getattr(function, "_overloadpacket", function))
        if formula is not None and self.flops is not None:
            try:
                self.flops += self._count(formula, args, kwargs, out)
            except Exception:  # a formula is of shapes that torch knew when it was written
                self.flops = None
        return out

    def _count(self, formula: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> int:
        """One call's operations; a formula takes longer than a small product, and calls of one shape have as many."""
        if kwargs or not all(isinstance(each, Tensor) for each in args):
            return int(formula(*args, **kwargs, out_val=out))
        key = (formula, *(each.shape for each in args))
        if key not in self._known:
            self._known[key] = int(formula(*args, out_val=out))
        return self._known[key]


def schema_of(operator: Any) -> Any:
    """An operator's schema; None for what has none, such as a Python function."""
    return getattr(operator, "_schema", None)


def overload_of(operator: Any) -> str:
    """The name of an operator's overload, "default" for what has none."""
    name: str = getattr(operator, "_overloadname", "default")
    return name


def base_name_of(operator: Any) -> str:
    """An operator's name without namespace and overload; empty for what is no operator."""
    name: str = getattr(operator, "_opname", "")
    return name


def running_autograd_node() -> Any:
    """The autograd node that backward runs on this thread; None outside of backward."""
    return torch._C._current_autograd_node()


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor has a shape alone, as those have by which torch asks an operator for shapes."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_backward_running() -> bool:
    """Whether autograd's engine runs on this thread, be it a node or what it calls at its end."""
    return int(torch._C._current_graph_task_id()) != -1


def backward_number() -> int:
    """Which backward autograd's engine runs on this thread; they ascend. -1 where none runs."""
    return int(torch._C._current_graph_task_id())


def group_of(boxed: Any) -> Any:
    """The process group that an operator is given as an object of its own."""
    return ProcessGroup.unbox(boxed)


def last_sequence_number() -> int:
    """The sequence number of the autograd node that this thread made last."""
    return torch.autograd._get_sequence_nr() - 1


def accumulated_by(autograd_node: Any) -> Tensor | None:
    """The parameter whose gradient a node accumulates, a DTensor's local shard; None of any other node."""
    parameter = getattr(autograd_node, "variable", None)
    return None if parameter is None else local_of(parameter)


def local_of(parameter: Tensor) -> Tensor:
    """What a rank has of a parameter: of a DTensor its local shard."""
    return getattr(parameter, "_local_tensor", parameter)


def sequence_number_of(autograd_node: Any) -> int:
    """The sequence number of an autograd node: later forward calls have larger ones."""
    number: int = autograd_node._sequence_nr()
    return number


def is_watched() -> bool:
    """Whether something sees each operator that is called on this thread: a mode, a trace, Dynamo, or a profiler."""
    if torch.compiler.is_compiling():  # Dynamo reads this line, and could not call what follows
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._autograd._profiler_enabled()


def below_autograd() -> AbstractContextManager[Any]:
    """Where no gradient is asked for: operators go past autograd to the same kernels. Nothing where one watches."""
    return nullcontext() if is_watched() else torch._C._AutoDispatchBelowAutograd()


def rewrites_code(graph: Graph) -> bool:
    """Whether something rewrites the code that is made of a graph, as `on_generate_code` and `set_codegen` let it."""
    own = type(graph._codegen) in (CodeGen, _PyTreeCodeGen)
    return not own or getattr(graph._codegen, "_body_transformer", None) is not None


def wraps_its_call(module: GraphModule) -> bool:
    """Whether a graph module's class, which torch makes for it alone, calls something else than the graph's code."""
    own = vars(type(module))
    wrapped = own.get("_wrapped_call")  # is there with the code, which some modules make when they are first called
    return "__call__" in own if wrapped is None else type(wrapped) is not _WrappedCall or wrapped.cls_call is not None


def storage_key(tensor: Tensor) -> int:
    """What two strided tensors have in common while they share memory."""
    return tensor.untyped_storage()._cdata


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A module's parameter, past a property of the same name."""
    return module._parameters[name]


# Process groups.


def register_group(name: str, group: Any) -> None:
    """Let collectives find a process group by name. torch holds it by a weak reference alone."""
    torch._C._distributed_c10d._register_process_group(cast(Any, name), group)


def group_named(name: str) -> ProcessGroup:
    """The process group of a name. Raises RuntimeError where none is registered."""
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, name))


def parts_of(placement: Any, indices: Tensor, ranks: int) -> list[Tensor]:
    """A dim's indices, one after the other, as a DTensor's sharding placement divides them among ranks."""
    from torch.distributed.tensor import Shard

    factor = getattr(placement, "split_factor", None)
    along: Any = Shard(0) if factor is None else type(placement)(0, split_factor=factor)
    parts: list[Tensor] = along._split_tensor(indices, ranks, with_padding=False, contiguous=False)[0]
    return parts


def flat_collectives(group: ProcessGroup) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A group's own all-gather, of x (N) into an output (W * N), and reduce-scatter; both take the output first."""
    return group._allgather_base, group._reduce_scatter_base


def unregister_group(name: str) -> None:
    """Undo `register_group`."""
    torch._C._distributed_c10d._unregister_process_group(cast(Any, name))


def group_of_size(size: int) -> Any:
    """A process group that can be asked for its size and joins nobody."""
    return cast(Any, ProcessGroup)(0, size)


def set_timeout(options: Any, timeout: Any) -> None:
    """Set how long collectives wait, in options for a NCCL group, which are read in place of `new_group`'s own."""
    options._timeout = timeout


def collectives_by_group() -> dict[str, int]:
    """How many collectives this process has launched in each of torch's groups of several ranks, by the group's name.

    gloo counts messages from rank to rank among them, NCCL does not. A group that counts nothing is left out.
    """
    found = {}
    for group, name in distributed_c10d._world.pg_names.items():
        if group.size() > 1:
            with suppress(RuntimeError):  # a backend that keeps no number
                found[str(name)] = cast(Any, group)._get_sequence_number_for_group()
    return found


@contextmanager
def messages_told(tell: Callable[[], None]) -> Iterator[None]:
    """Within this context `tell` is called for each message that this process sends to one rank or takes from one."""

    def told(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if group.size() > 1:
                tell()
            return own(group, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("send", "recv", "recv_anysource"):
            stack.enter_context(mock.patch.object(ProcessGroup, name, told(getattr(ProcessGroup, name))))
        yield


@contextmanager
def backwards_told(tell: Callable[[Tensor], None]) -> Iterator[None]:
    """Within this context `tell` takes each tensor that backward begins with, but those that come with a gradient."""

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, Tensor) else tuple(grad_tensors)
        for root, gradient in zip(roots, given if len(given) == len(roots) else (None,) * len(roots), strict=True):
            if gradient is None and isinstance(root, Tensor):
                tell(root)
        own(tensors, grad_tensors, *args, **kwargs)

    own = torch.autograd.backward
    with mock.patch.object(torch.autograd, "backward", backward):
        yield


# torch.compile.


def compile_counters() -> dict[str, dict[str, int]]:
    """Dynamo's counters, by category, as far as it has any."""
    from torch._dynamo.utils import counters

    return {name: dict(counters[name]) for name in ("frames", "stats", "graph_break", "unimplemented", "dynamo_cache")}


@contextmanager
def compiled_calls_told(
    asked: Callable[[str], None], called: Callable[[], None], recompiled: Callable[[str], None]
) -> Iterator[None]:
    """Within this context `asked` takes the backend of each torch.compile that is not told to do nothing.

    `called` is called when code that was given to it runs, whether or not anything was compiled of it: the environment,
    a setting or a stance may turn compilation off without a word. `recompiled` takes the reason for which a frame that
    was compiled before is compiled again.
    """
    from torch._dynamo import convert_frame, eval_frame

    def optimize(*args: Any, **kwargs: Any) -> Any:
        made = own_optimize(*args, **kwargs)
        if kwargs.get("disable"):
            return made
        asked(_backend_name(args[0] if args else kwargs.get("backend", "inductor")))
        return _Uncompiled(called) if isinstance(made, nullcontext) else made

    def from_stance(callback: Any) -> Any:
        if callable(callback):  # of code that is never to be compiled it is None
            called()
        return own_from_stance(callback)

    def reasons(*args: Any, **kwargs: Any) -> Any:
        found = own_reasons(*args, **kwargs)
        if found:
            recompiled(str(found[0]))
        return found

    own_reasons = convert_frame.get_and_maybe_log_recompilation_reasons
    own_optimize, own_from_stance = torch._dynamo.optimize, eval_frame._callback_from_stance
    with (
        mock.patch.object(torch._dynamo, "optimize", optimize),
        mock.patch.object(convert_frame, "get_and_maybe_log_recompilation_reasons", reasons),
        mock.patch.object(eval_frame, "_callback_from_stance", from_stance),
    ):
        yield


def compile_calls(model: nn.Module, backend: Callable[..., Any]) -> None:
    """Have a module's calls compiled, as its own `compile` has, also where torch skips its class for being torch's own.

    Sizes are numbers: another one is compiled again.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    call: Callable[..., Any] = model._call_impl
    model._compiled_call_impl = torch.compile(called, backend=backend, dynamic=False)


def ahead_of_time(
    compile_graph: Callable[[GraphModule, str], Callable[..., Any]], decompositions: Mapping[Any, Any] | None
) -> Callable[..., Any]:
    """A backend of torch.compile that differentiates what Dynamo captured, as its backend "aot_eager" does.

    `compile_graph` takes each graph of operators and its direction, and gives what runs it.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(direction: str) -> Callable[..., Any]:
        return lambda module, inputs: make_boxed_func(compile_graph(module, direction))

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("forward"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        decompositions=dict(decompositions) if decompositions else None,
    )
    return backend


class _Uncompiled(nullcontext[None]):
    """What stands for torch.compile where it is off: code is left as it is, and `called` is called when it runs."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self._called = called

    def __call__(self, code: Any) -> Any:
        if isinstance(code, nn.Module):
            code.register_forward_pre_hook(lambda module, args: self._called())
            return code
        if isinstance(code, type):
            self._called()
            return code

        @functools.wraps(code)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._called()
            return code(*args, **kwargs)

        return call


def _backend_name(backend: Any) -> str:
    """A backend's name: torch wraps most of them."""
    backend = getattr(backend, "compiler_name", backend)
    return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)


# torch's structured trace, which tlparse reads.


def trace_artifact(name: str, text: str) -> None:
    """Add a text to the structured trace."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def count_gpus_by_driver() -> int | None:
    """How many GPUs this process may use, asked of the driver's library, which starts no CUDA; None where it fails."""
    try:
        count = torch.cuda._device_count_nvml()
    except Exception:
        return None
    return None if count < 0 else count


def sleep_on_stream(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles of the GPU's clock, while the host goes on."""
    torch.cuda._sleep(cycles)


def nnpack_enabled() -> bool:
    """Whether NNPACK may compute convolutions on the CPU."""
    return torch._C._get_nnpack_enabled()


def set_nnpack_enabled(value: bool) -> None:
    """Let NNPACK compute convolutions on the CPU, or not."""
    torch._C._set_nnpack_enabled(value)


def sdp_priority() -> list[int]:
    """The order in which torch tries its kernels for attention on a GPU."""
    return list(torch._C._get_sdp_priority_order())


def set_sdp_priority(value: list[int]) -> None:
    """Have torch try its kernels for attention on a GPU in this order."""
    torch._C._set_sdp_priority_order(value)


def replaced_kernels() -> list[str]:
    """Operators of torch for which Python code stands in the place of torch's kernel: `aten/silu/CPU`."""
    of_process = torch.library._impls
    return sorted(name for name in of_process if name.startswith("aten/") and not name.endswith("/Meta"))


def active_modes() -> list[str]:
    """What sees and may change each call of torch in this thread, outermost first; without torch's default device."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]


def set_mkldnn_enabled(value: bool) -> None:
    """Let oneDNN compute on the CPU, or not."""
    torch._C._set_mkldnn_enabled(value)


# Placements.


def sharding_rules() -> SimpleNamespace:
    """DTensor's propagator of shardings, the types in which it is asked, its cost of a redistribution, and a line."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, _collective_utils, _dtensor_spec, _op_schema

    found = {name: getattr(_op_schema, name) for name in ("OpSchema", "OpSpec", "OpStrategy", "TupleStrategy")}
    found |= {name: getattr(_dtensor_spec, name) for name in ("DTensorSpec", "TensorMeta")}
    line = functools.cache(lambda n: DeviceMesh("cpu", torch.arange(n, device="cpu"), _init_backend=False, _rank=0))
    propagator = DTensor._op_dispatcher.sharding_propagator
    return SimpleNamespace(**found, line=line, propagator=propagator, cost=_collective_utils.redistribute_cost)

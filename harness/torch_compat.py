"""Wraps private names of torch, and names that differ between the supported releases.

Only this module and the other `torch_*.py` files use private names, so a new release of torch affects no other file. A
name is private if it, or a module in its path, begins with an underscore, or if it belongs to Dynamo or Inductor. The
operators under `torch.ops` are not private.

Dynamo and Inductor are imported inside the functions that need them, so that importing this module stays fast.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import _unsafe_preserve_version_counter as unsafe_preserve_version_counter
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, make_fx
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.fx.graph_module import _WrappedCall
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_wrapper_subclass
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.hooks import BackwardHook

from bitproof.harness.torch_tracing import quick_tracing
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
    """Import the modules that torch imports at the first trace.

    This takes 0.5 s, and 1.5 s if torch has not imported Dynamo. If it is done before forking, the forked processes
    need not do it.
    """
    import sympy.combinatorics  # noqa: F401
    import torch._inductor.sizevars
    import torch.export._trace  # noqa: F401


def use_profiler_once() -> None:
    """Use the profiler as optimizers do: its first use searches for one of a GPU, which forked processes need not."""
    with torch.profiler.record_function("a step"):
        pass


def build() -> tuple[str, str, str]:
    """Return three texts: torch's full version, the commit of its build, and its build settings.

    If torch is built for CUDA, this starts CUDA's driver.
    """
    return str(torch.__version__), str(torch.version.git_version), torch.__config__.show()


def untested_release() -> str | None:
    return warning_of(str(torch.__version__))


# Tracing.


def symbolic_graph(
    function: Callable[..., Any],
    fake_mode: FakeTensorMode,
    decompositions: Mapping[Any, Any] | None = None,
    *,
    as_eager: bool = False,
) -> Callable[..., GraphModule]:
    """Return a function that traces `function` on fake tensors, and returns the graph of executed operators.

    - Numbers that depend on data stay symbolic until run time.
    - `as_eager`: whether the graph has exactly the operators of eager execution; all sizes must then be fixed. By
      default, 46 operators are decomposed, such as matmul of a vector and a batch.
    """
    traced = make_fx(function, decomposition_table=decompositions, _error_on_data_dependent_ops=False)

    def trace(*args: Any) -> GraphModule:
        # 2.11 and 2.12 lower linear and matmul in C++, which asks for sizes as numbers; their Python versions do not.
        # Later releases need it for decompositions alone, and trace the same graph with it.
        with fake_mode, nullcontext() if as_eager else enable_python_dispatcher():
            if decompositions:
                return traced(*args)
            with quick_tracing(), mock.patch.object(proxy_tensor, "_extract_tensor_metadata", lambda value: None):
                return _without_tensor_meta(traced(*args))

    return trace


def _without_tensor_meta(module: GraphModule) -> GraphModule:
    # It repeats facts of `val`, which stays, and would be wrong after the first pass that changes a size. No pass reads
    # it. Inductor needs it, but graphs for Inductor are traced again.
    for nested in module.modules():
        for node in nested.graph.nodes if isinstance(nested, GraphModule) else ():
            node.meta.pop("tensor_meta", None)
    return module


def traced_node(tensor: Tensor, tracer: Any) -> Node | None:
    """Return the graph node that computes `tensor`; None if the trace has not seen the tensor."""
    return get_proxy_slot(tensor, tracer, None, lambda found: found.proxy.node)


def open_dim(
    fake_mode: FakeTensorMode, placeholder: Tensor, dim: int, bounds: tuple[int, int], name: str, *, shared: str
) -> FakeTensor:
    """Return a fake copy of `placeholder` whose size along `dim` is an unbacked symbol: tracing a branch on it fails.

    - `bounds`: least and greatest value of the size.
    - `name`: name of the graph input.
    - `shared`: inputs with the same text here have equal sizes.
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
        # In 2.11 sizes 0 and 1 would be special cases, and code that distinguishes them could not be traced. Bounds
        # that are passed as conditions are kept as guards, as in later releases, and invalidate answers found without
        # them.
        torch._check(fake.shape[dim] >= bounds[0])
        torch._check(fake.shape[dim] <= bounds[1])
    return fake


def backward_callbacks(before: Callable[[Tensor], None], after: Callable[[], None]) -> AbstractContextManager[Any]:
    """Return a context that calls `before` with each tensor from which backward starts, and `after` when it ends."""
    # Both `Tensor.backward` and `torch.autograd.grad` end in this function.
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
    """Return a pair: the leaves of nested tuples, lists and dicts, and a function that nests new leaves in the same
    way.
    """
    leaves, spec = tree_flatten(value)
    return leaves, lambda own: tree_unflatten(own, spec)


def keys_of(value: Any) -> list[tuple[Any, ...]]:
    """Return, for each leaf of a pytree, the dict keys and field names on the path to the leaf, without list indices.

    For example, the leaf 7 of `{"a": [{"b": 7}]}` has `("['a']", "['b']")`.
    """
    leaves = tree_flatten_with_path(value)[0]
    kinds = (MappingKey, GetAttrKey)
    return [tuple(str(key) for key in path if isinstance(key, kinds)) for path, _ in leaves]


@contextmanager
def swapped_state(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which a module uses the tensors in `state` as its parameters and buffers of the same names.

    All names of a tied parameter get the same tensor.
    """
    # A recurrent module also keeps its parameters in a list, which its forward reads: the list is rebuilt.
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    try:
        with _reparametrize_module(model, dict(state), tie_weights=True):
            for module in recurrent:
                module._init_flat_weights()
            yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


def joint_graph(module: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule:
    """Return a module's forward and backward as a single graph without in-place writes.

    `inputs` and the module's parameters and buffers must be fake tensors of the same mode. The graph's inputs and
    outputs carry torch's descriptors, which `role_of` reads.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, inputs).graph_module


class Role(NamedTuple):
    """The role of an input or output of a joint graph (forward and backward).

    - `kind`: "tangent" is the gradient of an output, from which backward starts; "written" is a tensor's value after an
      in-place write.
    - `of`: name of the parameter or buffer; the position for "input", "output" and "tangent".
    """

    kind: Literal["parameter", "buffer", "input", "output", "tangent", "written", "gradient", "other"]
    of: str


def role_of(descriptor: Any) -> Role:
    """Convert torch's descriptor of an input or output of a joint graph into a `Role`.

    For example, the gradient of parameter w is `Role("gradient", "w")`, and w after an in-place write is
    `Role("written", "w")`.
    """
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
    """Divide a joint graph into a pair: its forward and its backward graph. `module` cannot be used afterwards.

    - `num_outputs`: the first `num_outputs` outputs belong to forward.
    - `num_static`: the first `num_static` inputs, such as parameters, stay in memory in any case.
    - `by`: torch's algorithm for choosing saved values, "min_cut" or "default".
    - `cse`: whether equal calls may be merged.

    Inputs with "tangents" in their names belong to backward. A call keeps its name in both graphs.
    """
    from torch._functorch import config, partitioners

    way = partitioners.min_cut_rematerialization_partition if by == "min_cut" else partitioners.default_partition
    # Not every release has every setting.
    settings = {name: value for name, value in (_PARTITION_SETTINGS | {"cse": cse}).items() if hasattr(config, name)}
    with cast(Any, config).patch(settings):
        static = list(range(num_static))
        return way(module, [], num_fwd_outputs=num_outputs, static_lifetime_input_indices=static)


_PARTITION_SETTINGS = {"activation_memory_budget": 1.0, "unsafe_allow_optimization_of_collectives": False}
"""torch's partitioner settings, fixed here because an environment variable or the user's code could change them."""


def forget_memos(fake: FakeTensor) -> None:
    """Remove a fake tensor's cached symbols for data-dependent sizes; the next query creates new symbols."""
    # The memos are descriptors of the class, with a name for each kind of size.
    for name in vars(FakeTensor):
        if name.endswith("_memo"):
            setattr(fake, name, None)


def has_open_sizes(tensor: Tensor) -> bool:
    # Sizes are not read, since that may add a guard.
    return tensor._has_symbolic_sizes_strides


def range_of(size: torch.SymInt, symbol: Any) -> tuple[int | None, int | None]:
    """Return the tracer's (lower bound, upper bound) for `symbol`, a symbol in `size`. None stands for an unknown
    bound.
    """
    found = size.node.shape_env.var_to_range.get(symbol)
    ends = (found.lower, found.upper) if found is not None else (None, None)
    least, most = (int(cast(Any, end)) if getattr(end, "is_Integer", False) else None for end in ends)
    return least, most


def assume(condition: Any) -> None:
    """Assert a condition on symbolic sizes, so that the trace may rely on it."""
    torch._check(condition)


Check = Callable[..., None]
"""torch's function behind `torch._check` and its variants, with arguments (error type, condition, message or None)."""


@contextmanager
def checks_replaced(check: Callable[..., None]) -> Iterator[None]:
    """Context in which `torch._check` and its variants call `check(own, error_type, condition, message)` instead.

    `own` is torch's function, which raises `error_type(message)` if `condition` is False.
    """
    own = torch._check_with
    torch._check_with = functools.partial(check, own)
    try:
        yield
    finally:
        torch._check_with = own


@contextmanager
def before_saving(before: Callable[[object], None]) -> Iterator[None]:
    """Context in which `before` is called before each `torch.save`, with the path or file that will be written."""
    own = torch._C.PyTorchFileWriter

    def writer(file: Any, *args: Any) -> Any:
        before(file)
        return own(file, *args)

    with mock.patch.object(torch._C, "PyTorchFileWriter", writer):
        yield


def rename(node: Node, name: str) -> None:
    """Rename a node; torch adds a suffix if another node has this name."""
    node._rename(name)


# Operators and autograd.


def rewrites_code(graph: Graph) -> bool:
    """Return whether a hook, such as a hook set by `on_generate_code`, changes the code generated from `graph`."""
    own = type(graph._codegen) in (CodeGen, _PyTreeCodeGen)
    return not own or any(map(callable, vars(graph._codegen).values()))


def wraps_its_call(module: GraphModule) -> bool:
    """Return whether a call of `module` runs code other than its graph, because the method `__call__` was replaced."""
    # torch makes a class for each graph module, and a user's code may replace the method `__call__` in it.
    own = vars(type(module))
    wrapped = own.get("_wrapped_call")  # present with the code, which some modules create at their first call
    return "__call__" in own if wrapped is None else type(wrapped) is not _WrappedCall or wrapped.cls_call is not None


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    # A property of the same name would hide the parameter from getattr.
    return module._parameters[name]


def module_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each attribute of a module, including parameters, buffers and submodules.

    Attributes that torch gives every module, such as dicts of hooks, are skipped if they are empty.
    """
    for key, value in vars(module).items():
        if key in ("_parameters", "_buffers", "_modules"):
            yield from value.items()
        elif key not in _OF_EVERY_MODULE or value:
            yield key, value


# `training` is always yielded: False is a value, but would count as empty.
_OF_EVERY_MODULE = {*vars(nn.Module())} - {"training"}


def is_within_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the running step hook was called because an optimizer's own `step` calls `super().step()`.

    Only for step hooks of optimizers.
    """
    # torch runs the hooks of an optimizer once for each class, among its own class and the bases, whose `step` it has
    # patched. It patches a base's `step` when an object of the base is created.
    steps, frame = 0, sys._getframe(1)
    while frame is not None and steps < 2:
        is_step = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        steps += is_step and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1


def hooks_of_gradients(tensor: Tensor) -> bool:
    """Return whether hooks may change the tensor's gradient, before or after it is accumulated."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks)


@contextmanager
def compiled_calls_within(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Context in which `wrap(call)` replaces the compiled call of `module`.

    No effect if the module is not compiled.
    """
    own = module._compiled_call_impl
    module._compiled_call_impl = own and wrap(own)
    try:
        yield
    finally:
        module._compiled_call_impl = own


@contextmanager
def backward_hooks_set_within(within: Callable[[nn.Module], AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which torch enters `within(module)` while it attaches a module's backward hooks to the outputs.

    torch attaches them after the module's forward hooks have run.
    """

    def setup(hook: Any, args: Any) -> Any:
        with within(hook.module):
            return own(hook, args)

    # `own` is defined below `setup`, which reads it only when it is called.
    own: Any = BackwardHook.setup_output_hook
    with mock.patch.object(BackwardHook, "setup_output_hook", setup):
        yield


# Devices and switches.


def count_gpus_by_driver() -> int | None:
    """Return the number of visible GPUs without initializing CUDA; None if the driver's library cannot be used."""
    try:
        count = torch.cuda._device_count_nvml()
    except Exception:
        return None
    return None if count < 0 else count


def name_visible_gpus(count: int) -> list[str]:
    """Return the names of the first `count` visible GPUs, in torch's order.

    The names are UUIDs from NVML. If NVML fails, they are the entries of CUDA_VISIBLE_DEVICES.
    """
    visible = torch.cuda._parse_visible_devices()[:count]
    try:
        # CUDA_VISIBLE_DEVICES has either indices or names. Names become indices first.
        uuids = torch.cuda._raw_device_uuid_nvml() or []
        by_name = [str(each) for each in visible]
        ordinals = [each for each in visible if isinstance(each, int)]
        ordinals = ordinals or torch.cuda._transform_uuid_to_ordinals(by_name, uuids)
        return [uuids[ordinal] for ordinal in ordinals] if len(ordinals) == len(visible) else by_name
    except Exception:
        return [str(each) for each in visible]


def sleep_on_stream(cycles: int) -> None:
    """Keep the current CUDA stream busy for this number of GPU clock cycles. The host does not wait."""
    torch.cuda._sleep(cycles)


def nnpack_enabled() -> bool:
    return torch._C._get_nnpack_enabled()


def set_nnpack_enabled(value: bool) -> None:
    torch._C._set_nnpack_enabled(value)


def sdp_priority() -> list[int]:
    return list(torch._C._get_sdp_priority_order())


def set_sdp_priority(value: list[int]) -> None:
    torch._C._set_sdp_priority_order(value)


def set_mkldnn_enabled(value: bool) -> None:
    torch._C._set_mkldnn_enabled(value)

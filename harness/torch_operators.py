"""Wraps torch's private names for operators, autograd, annotations and storage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_wrapper_subclass


class FlopCount(TorchDispatchMode):
    """Context that counts FLOPs with torch's formulas. Calls run unchanged.

    `flops` is None if a formula failed.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code stays compiled. By default it would run eagerly, with other bits."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        self._formulas = flop_registry
        self.flops: int | None = 0
        self._known: dict[Any, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(is_wrapper_subclass(each) for each in types):
            return NotImplemented  # a DTensor dispatches first, and calls operators on its local shards
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        # torch registers a formula for all overloads of an operator together.
        formula = self._formulas.get(getattr(function, "_overloadpacket", function))
        if formula is not None and self.flops is not None:
            try:
                self.flops += self._count(formula, args, kwargs, out)
            except Exception:  # a formula handles only the shapes that its author knew
                self.flops = None
        return out

    def _count(self, formula: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> int:
        # Cached by shapes, since a formula takes longer than a small product.
        if kwargs or not all(isinstance(each, Tensor) for each in args):
            return int(formula(*args, **kwargs, out_val=out))
        key = (formula, *(each.shape for each in args))
        if key not in self._known:
            self._known[key] = int(formula(*args, out_val=out))
        return self._known[key]


def schema_of(operator: Any) -> Any:
    """Return an operator's schema; None for an object without a schema, such as a Python function."""
    return getattr(operator, "_schema", None)


def is_composed(operator: Any) -> bool:
    """Return whether an operator has no kernel of its own: it calls other operators (CompositeImplicitAutograd)."""
    try:
        return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))
    except RuntimeError:  # an operator of TorchScript, which torch does not dispatch
        return False


def written_by_kernel(call: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that a Triton kernel writes, by torch's analysis; all names if it fails.

    `call` has the arguments of torch's operator for Triton kernels; `given` maps the kernel's argument names to values.
    """
    try:
        from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

        places = (call["kernel_idx"], call["constant_args_idx"], dict(given), call.get("tma_descriptor_metadata", {}))
        return {*get_mutated_tensors(*places)}
    except Exception:  # without Triton, or for a kernel unknown to this process
        return {*given}


def overload_of(operator: Any) -> str:
    """Return the name of an operator's overload, such as "Tensor"; "default" for an object without one."""
    name: str = getattr(operator, "_overloadname", "default")
    return name


def base_name_of(operator: Any) -> str:
    """Return an operator's name without namespace and overload, such as "add"; "" for an object that is no operator."""
    name: str = getattr(operator, "_opname", "")
    return name


def running_autograd_node() -> Any:
    return torch._C._current_autograd_node()


def has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_backward_running() -> bool:
    """Return whether autograd runs a backward pass on this thread, or the callbacks queued for its end."""
    return int(torch._C._current_graph_task_id()) != -1


def is_beginning_backward() -> bool:
    """Return whether autograd is creating the initial gradients of a backward pass on this thread."""
    # No state of torch shows this, so look for its function on the stack.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd._make_grads.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def on_backward(on_root: Callable[[Tensor], None]) -> Iterator[None]:
    """Context in which `on_root` is called with each tensor that is passed to `torch.autograd.backward` without its
    gradient.
    """

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, Tensor) else tuple(grad_tensors)
        # `grad_tensors` may be None for all tensors, or have a None for some of them.
        for root, gradient in zip(roots, given if len(given) == len(roots) else (None,) * len(roots), strict=True):
            if gradient is None and isinstance(root, Tensor):
                on_root(root)
        own(tensors, grad_tensors, *args, **kwargs)

    own = torch.autograd.backward
    with mock.patch.object(torch.autograd, "backward", backward):
        yield


def backward_number() -> int:
    """Return the number of the backward pass that runs on this thread; -1 if none runs.

    Later passes have larger numbers.
    """
    return int(torch._C._current_graph_task_id())


def running_annotations() -> Mapping[str, Any]:
    found: Mapping[str, Any] = traceback.current_meta.get("custom", {})
    return found


def last_sequence_number() -> int:
    return torch.autograd._get_sequence_nr() - 1


def accumulated_by(autograd_node: Any) -> Tensor | None:
    """Return the parameter (or its local shard) whose gradient this node accumulates; None for any other node."""
    parameter = getattr(autograd_node, "variable", None)
    return None if parameter is None else local_of(parameter)


def local_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter: the local shard of a DTensor, or the plain tensor itself."""
    return getattr(parameter, "_local_tensor", parameter)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor without coalescing: an index may occur more than once."""
    return tensor._indices(), tensor._values()


def sequence_number_of(autograd_node: Any) -> int:
    number: int = autograd_node._sequence_nr()
    return number


def is_watched() -> bool:
    """Return whether a mode, a trace, Dynamo or the profiler observes operator calls on this thread."""
    if torch.compiler.is_compiling():  # Dynamo reads this line, and could not trace the rest
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._autograd._profiler_enabled()


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context in which operators skip autograd and run the same kernels, so no gradients are recorded.

    If operator calls are observed (`is_watched`), the context has no effect.
    """
    return nullcontext() if is_watched() else torch._C._AutoDispatchBelowAutograd()


def storage_key(tensor: Tensor) -> int:
    """Return a key of the tensor's storage; tensors that share memory have equal keys."""
    return tensor.untyped_storage()._cdata


def is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


def replaced_kernels() -> list[str]:
    """Return the torch kernels that Python code has replaced, such as `aten/silu/CPU`. Meta kernels are ignored."""
    # torch itself registers its Meta kernels in Python.
    of_process = torch.library._impls
    return sorted(name for name in of_process if name.startswith("aten/") and not name.endswith("/Meta"))


def active_modes() -> list[str]:
    """Return the class names of the modes that intercept torch calls on this thread.

    Function modes precede dispatch modes, and outer modes precede inner modes. The mode for torch's default device is
    left out.
    """
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]

"""Makes traces faster by avoiding repeated work of torch.

For each call, torch creates three fake tensors and queries a device twice, each time through two dispatch modes. Here a
new fake tensor copies its attributes from an earlier fake tensor on the same device. Device queries are answered
directly, with the answer that torch would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import TorchFunctionMode

_DEVICE = torch.ops.prim.device.default
_ATTRIBUTES = "bitproof_attributes"
"""Name of the attribute of a fake mode that holds device -> attributes of a new fake tensor."""


def new_fake(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> FakeTensor:
    """Return `FakeTensor(mode, tensor, device)`, made faster than by torch.

    `tensor` must be a new plain tensor on the meta device that does not require gradients.
    """
    known: dict[torch.device, dict[str, Any]] = vars(mode).setdefault(_ATTRIBUTES, {})
    if (attributes := known.get(device)) is None:
        # The first fake tensor on a device is made by torch, and later ones get its attributes.
        made = FakeTensor(mode, tensor, device)
        known[device] = dict(vars(made))
        return made
    found: FakeTensor = Tensor._make_subclass(
        FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
    )
    # The constructor of FakeTensor does the same.
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(found)
    else:
        torch._C._set_throw_on_mutable_data_ptr(found)
    vars(found).update(attributes)
    return found


def device_asked(func: Any, args: Sequence[Any]) -> torch.device | None:
    """Return the device if the call of `func` only queries a fake tensor's device; otherwise None."""
    return args[0].device if func is _DEVICE and len(args) == 1 and type(args[0]) is FakeTensor else None


@contextmanager
def quick_tracing() -> Iterator[None]:
    """Context in which traces answer device queries and copy fake tensors as this module describes."""
    own_dispatch, own_snapshot = ProxyTorchDispatchMode.__torch_dispatch__, proxy_tensor.snapshot_fake

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = device_asked(func, args)
        return own_dispatch(mode, func, types, args, kwargs) if device is None else device

    def snapshot(x: Tensor, include_real: bool = False) -> Tensor | None:
        # A subclass, or a tensor with real values, has more than a layout to copy.
        if include_real or type(x) is not FakeTensor:
            return own_snapshot(x, include_real)
        with torch._C._DisablePythonDispatcher(), in_kernel_invocation_manager(x.fake_mode):
            plain = torch.ops.aten.detach.default(x)
        return new_fake(x.fake_mode, plain, x.fake_device)

    with (
        mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", dispatch),
        mock.patch.object(proxy_tensor, "snapshot_fake", snapshot),
    ):
        yield


class _Failures(TorchFunctionMode):
    """Mode that reports each torch call that raises an exception."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **dict(kwargs or {}))
        except Exception as error:
            self._report(f"`{getattr(func, '__name__', func)}` fails ({type(error).__name__})")
            raise


@contextmanager
def on_failures(report: Callable[[str], None]) -> Iterator[None]:
    """Context in which `report` is called with a text for each failing torch call and each branch on traced data.

    This also shows errors that the program catches, for example that of `x.numpy()` for a traced tensor `x`.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # sympy: half a second

    make = ShapeEnv._make_data_dependent_error

    def made(*args: Any, **kwargs: Any) -> Any:
        report("a branch on data fails")
        return make(*args, **kwargs)

    with mock.patch.object(ShapeEnv, "_make_data_dependent_error", made), _Failures(report):
        yield

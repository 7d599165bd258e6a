"""Operators that copy an activation to host memory and back. Each copy has two calls: one starts it, the other waits.

    host = offload(x)              begin to copy x
    host = wait_offload(host, x)   x may be freed after this
    y = reload(host, device)       begin to copy back, to this process's current device of that type
    y = wait_reload(y)             y may be read after this

Bits, sizes and strides stay the same. On CUDA, copies run on a separate stream, through pinned memory. On a CPU the
copies are real, but nothing overlaps.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

_library = torch.library.Library("bitproof", "DEF")
_library.define("offload(Tensor x) -> Tensor")
_library.define("wait_offload(Tensor(a) host, Tensor x) -> Tensor(a)")
_library.define("reload(Tensor host, str device) -> Tensor")
_library.define("wait_reload(Tensor(a) x) -> Tensor(a)")

OFFLOAD = torch.ops.bitproof.offload.default
WAIT_OFFLOAD = torch.ops.bitproof.wait_offload.default
RELOAD = torch.ops.bitproof.reload.default
WAIT_RELOAD = torch.ops.bitproof.wait_reload.default

COPIES = (OFFLOAD, RELOAD)
"""Operators that return before their result is filled."""
WAITS = (WAIT_OFFLOAD, WAIT_RELOAD)
"""Operators that wait until their first argument is filled, and return that argument."""


def is_host_copy(node: Node) -> bool:
    return node.target is OFFLOAD


@functools.cache
def copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def empty_like(x: Tensor, device: torch.device | str, pin: bool = False) -> Tensor:
    """Return an uninitialized tensor on `device` with the layout and dtype of `x`.

    With `pin`, it is in pinned memory.
    """
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device, pin_memory=pin)


def begin_copy(source: Tensor, target: Tensor, device: torch.device) -> None:
    """Copy `source` to `target`: a tensor on `device` to host memory, or the reverse.

    On CUDA this only starts the copy, on the device's copy stream and after earlier work of the current stream.
    """
    if device.type != "cuda":
        target.copy_(source)
        return
    stream = copy_stream(device)
    # The copy must not begin before `source` is computed.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        # The event is freed with the target tensor, so a failing step leaves nothing behind.
        cast(Any, target).copied = stream.record_event()
    # The allocator belongs to the current stream: without this it could reuse the memory while the copy still runs.
    (source if source.is_cuda else target).record_stream(stream)


def end_copy(target: Tensor, device: torch.device) -> None:
    """Let the current stream of `device` wait for the copy into `target`. The host does not wait."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_event(cast(Any, target).copied)


def land(target: Tensor) -> None:
    """Let the host wait until the copy into `target` is done."""
    # Without this, the host could read pinned memory during a copy.
    if (copied := getattr(target, "copied", None)) is not None:
        copied.synchronize()


def run_offload(x: Tensor) -> Tensor:
    host = empty_like(x, "cpu", pin=x.is_cuda)
    begin_copy(x, host, x.device)
    return host


def run_wait_offload(host: Tensor, x: Tensor) -> Tensor:
    end_copy(host, x.device)
    return host


def run_reload(host: Tensor, device: str) -> Tensor:
    # A graph serves all ranks, so it names only the type of a device.
    to = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    x = empty_like(host, to)
    begin_copy(host, x, to)
    return x


def run_wait_reload(x: Tensor) -> Tensor:
    end_copy(x, x.device)
    return x


# torch looks up the source line of each registration, for which inspect would search all modules.
inspect.modulesbyfile[__file__] = __name__

for _name, _run, _fake in (
    ("offload", run_offload, lambda x: empty_like(x, "cpu")),
    ("wait_offload", run_wait_offload, lambda host, x: host),
    ("reload", run_reload, lambda host, device: empty_like(host, device)),
    ("wait_reload", run_wait_reload, lambda x: x),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitproof::{_name}", _fake, lib=_library)

"""Checks of a single GPU: digests, attention, copies to host memory and back.

A check returns a pair: whether it passed, and a text about its findings. Tests run the checks on a CPU. `run.py` lists
all checks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bitproof.harness.capture.digest import digest
from bitproof.harness.graph.offload_operators import OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD, copy_stream, land
from bitproof.harness.graph.operators import name_of
from bitproof.harness.powers.doctor.setting import Answer, Setting
from bitproof.harness.torch_compat import TorchDispatchMode, sleep_on_stream

MIN_SHARE_OF_BANDWIDTH = 0.05
"""A digest must read memory at 5% or more of a copy's bandwidth.

Otherwise recording would take most of a run's time.
"""


def check_digests(setting: Setting) -> Answer:
    """Check that a tensor of any layout has the same digest on the device and on the CPU.

    A change of a single element must change the digest.
    """
    device, differing, count = setting.device_of(0), [], 0
    for name, tensor in layouts():
        count += 1
        if digest(to_device(tensor, device)) != digest(tensor):
            differing.append(name)
    # Second question: a digest that ignored an element would be equal everywhere, too.
    unseen = [f"element {place} of {num}" for num, place in changes() if not _is_seen(num, place, device)]
    first = [*differing, *unseen]
    text = f"; first {first[0]}" if first else ""
    layers = f"{count} layouts, {len(differing)} with another digest than the CPU's"
    return not first, f"{layers}; {len([*changes()])} changed elements, {len(unseen)} unseen{text}"


def changes() -> Iterator[tuple[int, int]]:
    """Yield (number of elements, index of the element to change) for tensors of several sizes.

    The index is that of the first, the middle or the last element.
    """
    for num in (1, 7, 1_000, 4_097, 100_003):
        # For a single element, all three places are the same.
        yield from ((num, place) for place in dict.fromkeys((0, num // 2, num - 1)))


def _is_seen(num: int, place: int, device: torch.device) -> bool:
    values = torch.arange(num, dtype=torch.float32)
    other = values.clone()
    # -1 is not among the values.
    other[place] = -1.0
    return digest(to_device(other, device)) != digest(to_device(values, device))


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
SHAPES = ((), (1,), (7,), (0, 3), (33, 65), (4, 5, 6), (128, 128), (100_003,))
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1) if x.dim() else x,
    "every other": lambda x: x[::2] if x.dim() else x,
    "from the second": lambda x: x[1:] if x.dim() else x,
    "expanded": lambda x: x.expand(2, *x.shape),
}


def layouts() -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) for each dtype, shape and view. The values include 0.0 and -0.0."""
    generator = torch.Generator().manual_seed(0)
    for dtype, shape, (name, view) in itertools.product(DTYPES, SHAPES, VIEWS.items()):
        # Multiples of 0.5, which every floating-point dtype holds exactly; the zeros are -0.0.
        values = torch.randint(-3, 4, shape, generator=generator).double() * -0.5
        yield f"{dtype} {shape} {name}", view(values.to(dtype))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `tensor` on the device, with the same bits and strides."""
    # `to` alone would make some layouts contiguous.
    sizes = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    # The elements of the storage up to the last one that the view uses.
    extent = tensor.storage_offset() + (sum(sizes) + 1 if tensor.numel() else 0)
    storage = tensor.as_strided((extent,), (1,), 0).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(name_of(function))
        return function(*args, **kwargs or {})


def check_attention(setting: Setting) -> Answer:
    """Check that attention repeats its bits, forward and backward, and uses no cuDNN kernel."""
    device, lines, is_ok = setting.device_of(0), [], True
    # Head dims for which torch chooses different kernels: equal ones, small ones, and another dim of values.
    for dtype, (qk_dim, v_dim) in itertools.product((torch.bfloat16, torch.float32), ((64, 64), (24, 24), (24, 16))):
        runs = [attend(device, dtype, qk_dim, v_dim) for _ in range(2)]
        kernels = [name for name in runs[0][0] if "attention" in name and "backward" not in name] or ["its math"]
        repeats = runs[0][1] == runs[1][1]
        is_ok &= repeats and not any("cudnn" in kernel for kernel in kernels)
        again = "" if repeats else " (other bits the second time)"
        lines.append(f"{str(dtype).removeprefix('torch.')} {qk_dim}/{v_dim}: {', '.join(kernels)}{again}")
    return is_ok, "; ".join(lines)


def attend(device: torch.device, dtype: torch.dtype, qk_dim: int, v_dim: int) -> tuple[list[str], list[str]]:
    """Return (operators that causal attention calls, digests of its output and gradients)."""
    # Drawn on the CPU, so that every run and every device gets the same inputs.
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 128, qk_dim), (2, 4, 128, qk_dim), (2, 4, 128, v_dim))
    query, key, value = (torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes)
    with _Names() as calls:
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradients = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
    return calls.names, [digest(x.detach()) for x in (output, *gradients)]


def check_offload(setting: Setting) -> Answer:
    device, lost = setting.device_of(0), []
    text = f"{len(OFFLOADS)} ways in which one stream lags behind another, {len(_NUMS_OF_ELEMENTS)} sizes of each"
    for (name, way), num in itertools.product(OFFLOADS.items(), _NUMS_OF_ELEMENTS):
        # Computed on the CPU, so that no stream of the device is read before the copy under test.
        wanted = digest(filled(num, TEST_VALUE, torch.device("cpu")))
        lost += [] if digest(way(num, device)) == wanted else [f"{name}, {num} elements"]
    first = f"; first {lost[0]}" if lost else ""
    return not lost, f"{text}, {len(lost)} with other bits{first}"


_NUMS_OF_ELEMENTS = (1_000, 7_000, 70_000, 1_000_000)
TEST_VALUE, _OTHER = 3.0, -1.0
_LAG_CYCLES = 20_000_000  # about 10 ms, longer than any copy here


def filled(num: int, value: float, device: torch.device) -> Tensor:
    """Return a tensor of `num` elements, filled on the device's current stream.

    The allocator may place it in memory that was freed just before; some tests rely on this.
    """
    return torch.full((num,), value, device=device)


def lag(device: torch.device) -> None:
    if device.type == "cuda":
        sleep_on_stream(_LAG_CYCLES)


def lag_copies(device: torch.device) -> None:
    if device.type == "cuda":
        with torch.cuda.stream(copy_stream(device)):
            sleep_on_stream(_LAG_CYCLES)


def _offloaded_while_computed(num: int, device: torch.device) -> Tensor:
    """Return a tensor of TEST_VALUE if an offload (a copy to host memory) starts only after its source is computed."""
    x = filled(num, _OTHER, device)
    # A copy that starts too early reads the first values.
    lag(device)
    x.fill_(TEST_VALUE)
    return _reloaded(WAIT_OFFLOAD(OFFLOAD(x), x), device)


def _written_after_the_wait(num: int, device: torch.device) -> Tensor:
    """Return a tensor of TEST_VALUE if a tensor may be overwritten after the wait for its offload."""
    x = filled(num, TEST_VALUE, device)
    # The copy is late: without the wait, the fill below would come first.
    lag_copies(device)
    host = WAIT_OFFLOAD(OFFLOAD(x), x)
    x.fill_(_OTHER)
    return _reloaded(host, device)


def _freed_while_offloaded(num: int, device: torch.device) -> Tensor:
    """Return a tensor of TEST_VALUE if memory that is freed during its offload is reused only after the offload."""
    x = filled(num, TEST_VALUE, device)
    lag_copies(device)
    host = OFFLOAD(x)
    del x
    other = filled(num, _OTHER, device)
    # `other` may be in the memory of `x`: without a guard, the lagging copy would read its values.
    return _reloaded(WAIT_OFFLOAD(host, other), device)


def _reloaded_where_others_wrote(num: int, device: torch.device) -> Tensor:
    """Return a tensor of TEST_VALUE if a reload (a copy to the device) starts after earlier writes to its memory."""
    x = filled(num, TEST_VALUE, device)
    host = WAIT_OFFLOAD(OFFLOAD(x), x)
    other = filled(num, _OTHER, device)
    # The late write to this memory is still to come when the reload gets the memory.
    lag(device)
    other.fill_(_OTHER)
    del other
    return _reloaded(host, device)


def _read_after_the_wait(num: int, device: torch.device) -> Tensor:
    """Return a tensor of TEST_VALUE if a tensor has the reloaded values after the wait for its reload."""
    x = filled(num, TEST_VALUE, device)
    host = WAIT_OFFLOAD(OFFLOAD(x), x)
    other = filled(num, _OTHER, device)
    del other  # a premature read returns these values
    lag_copies(device)
    return _reloaded(host, device)


def _freed_while_reloaded(num: int, device: torch.device) -> Tensor:
    """Return a tensor of TEST_VALUE if memory that is freed during a reload is reused only after the reload."""
    source = filled(num, _OTHER, device)
    host = WAIT_OFFLOAD(OFFLOAD(source), source)
    lag_copies(device)
    filling = RELOAD(host, device.type)
    # The memory is freed while the late copy still has to fill it, and `x` may get it.
    del filling
    x = filled(num, TEST_VALUE, device)
    WAIT_RELOAD(RELOAD(host, device.type))  # the stream of copies has come past the first reload
    return x


def _read_by_the_host(num: int, device: torch.device) -> Tensor:
    """Return a tensor of TEST_VALUE if a copy in host memory has the right values once the host has waited for it."""
    other = filled(num, _OTHER, device)
    land(OFFLOAD(other))  # pinned memory of that size holds other values then
    x = filled(num, TEST_VALUE, device)
    lag_copies(device)
    host = OFFLOAD(x)
    land(host)
    return host


def _reloaded(host: Tensor, device: torch.device) -> Tensor:
    return WAIT_RELOAD(RELOAD(host, device.type))


OFFLOADS: dict[str, Callable[[int, torch.device], Tensor]] = {
    "offloaded while it is computed": _offloaded_while_computed,
    "written after its offload was waited for": _written_after_the_wait,
    "freed while it is offloaded": _freed_while_offloaded,
    "reloaded where something else is being written": _reloaded_where_others_wrote,
    "read after its reload was waited for": _read_after_the_wait,
    "freed while it is reloaded": _freed_while_reloaded,
    "read by the host": _read_by_the_host,
}
"""The tests of `check_offload` by name. Each returns a tensor of `TEST_VALUE` if the copies wait as they must.

Each test is for a single synchronization that the copies need. A test must not read device memory before the copy under
test has begun, since a read would synchronize all streams.
"""


def check_bandwidth(setting: Setting) -> Answer:
    device = setting.device_of(0)
    # An element of float32 has 4 bytes.
    x = torch.ones(setting.max_bytes // 4, device=device)
    digest(x)  # compile the kernel before measuring
    copy, hashed = seconds_of(x.clone, device), seconds_of(lambda: digest(x), device)
    rates = [setting.max_bytes / seconds / 1e9 for seconds in (hashed, copy / 2)]  # a copy reads and writes
    share = rates[0] / rates[1]
    text = f"{rates[0]:.1f} GB/s read by a digest, {rates[1]:.1f} GB/s moved by a copy: {share:.0%}"
    return share >= MIN_SHARE_OF_BANDWIDTH, f"{text}; at least {MIN_SHARE_OF_BANDWIDTH:.0%} are needed"


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Return the shortest time of several calls in seconds, including the work on the device."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            # The call has only queued its work.
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best

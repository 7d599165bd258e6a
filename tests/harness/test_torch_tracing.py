"""What traces ask less of torch: fake tensors have what torch's own have, and nothing is remembered of another mode."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.torch_tracing import device_asked, new_fake, quick_tracing

CPU = torch.device("cpu")


def plain(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(x: FakeTensor) -> tuple[Any, ...]:
    """All of a fake tensor that torch looks at."""
    own = {name: value for name, value in vars(x).items() if name != "fake_mode"}
    keys = torch._C._dispatch_keys(x).raw_repr()
    return own, keys, x.shape, x.stride(), x.dtype, x.device, x.requires_grad, type(x), x.fake_mode


def test_a_fake_tensor_has_all_that_torchs_own_constructor_gives_it():
    mode = FakeTensorMode()
    for tensor in (plain(2, 3), plain(4, dtype=torch.int64), plain(2, 3).t(), plain()):
        assert described(new_fake(mode, tensor, CPU)) == described(FakeTensor(mode, tensor, CPU))
        assert new_fake(mode, tensor, CPU).untyped_storage()._cdata == tensor.untyped_storage()._cdata


def read(x: FakeTensor) -> str:
    """Whether a fake tensor's memory can be read, of which torch warns once in a process, or how torch refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            x.data_ptr()
        except RuntimeError as error:
            return str(error)
    return "read"


@pytest.mark.parametrize("is_allowed", [False, True])
def test_the_memory_of_one_is_read_where_torch_lets_it_be_read(is_allowed):
    mode = FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = is_allowed
    new_fake(mode, plain(2), CPU)  # which torch makes
    assert read(new_fake(mode, plain(2), CPU)) == read(FakeTensor(mode, plain(2), CPU))


def test_what_one_fake_tensor_learns_is_not_known_of_the_next():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first = new_fake(mode, plain(2), CPU)
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        first.item_memo = mode.shape_env.create_unbacked_symint()
    second = new_fake(mode, plain(2), CPU)
    second.item_memo = first.item_memo
    assert new_fake(mode, plain(2), CPU).item_memo is None


def test_modes_and_devices_are_distinguished():
    modes = [FakeTensorMode(), FakeTensorMode()]
    for device in (CPU, torch.device("cuda:0"), CPU):
        for mode in modes:
            x = new_fake(mode, plain(2), device)
            assert x.fake_mode is mode and x.device == device


def test_where_a_fake_tensor_is_depends_on_whether_a_kernel_asks():
    mode, device = FakeTensorMode(), torch.ops.prim.device.default
    x = new_fake(mode, plain(2), CPU)
    with mode:
        assert device_asked(device, (x,)) == device(x) == CPU
    with in_kernel_invocation_manager(mode):
        assert device_asked(device, (x,)) == torch.device("meta")
    assert device_asked(device, (torch.ones(2),)) is None
    assert device_asked(torch.ops.aten.neg.default, (x,)) is None


def test_a_trace_writes_the_same_graph_and_values_as_torchs_own():
    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        w = w.detach().requires_grad_()
        y = (x @ w).relu()
        z = x + 1
        z.t_()
        return [z, *torch.autograd.grad(y.sum(), w)]

    def traced() -> list[Any]:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            inputs = torch.ones(4, 3), torch.ones(3, 2)
        graph = make_fx(step)(*inputs)
        with mode:
            values = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
        return [graph.code, *([x.shape, x.stride(), x.dtype, x.requires_grad, x.device] for x in values)]

    own = ProxyTorchDispatchMode.__torch_dispatch__, proxy_tensor.snapshot_fake
    expected = traced()
    with quick_tracing():
        assert traced() == expected
    assert (ProxyTorchDispatchMode.__torch_dispatch__, proxy_tensor.snapshot_fake) == own

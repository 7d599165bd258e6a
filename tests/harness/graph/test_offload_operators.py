"""The copies themselves: bits, strides, symbolic sizes, and that they are copies."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.graph import operators
from bitproof.harness.graph.offload_operators import OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD
from bitproof.harness.step.storages import Storages
from tests.harness.graph.graphs import Sketch, bits

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
    host = WAIT_OFFLOAD(OFFLOAD(x), x)
    return host, WAIT_RELOAD(RELOAD(host, x.device.type))


def values() -> list[Tensor]:
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    base[0, 0], base[0, 1], base[0, 2] = -0.0, float("nan"), float("-inf")
    return [base, base.t(), base.to(torch.bfloat16), torch.empty_strided((3, 2), (4, 1)).fill_(1.5), torch.empty(0, 3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(5))
def test_bits_and_strides_survive_in_a_buffer_of_their_own(index: int, device: str) -> None:
    source = values()[index]
    x = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device).copy_(source)
    host, back = there_and_back(x)
    assert host.device.type == "cpu" and back.device == x.device
    for copy in (host, back):
        assert (copy.dtype, copy.shape, copy.stride()) == (x.dtype, x.shape, x.stride())
        assert torch.equal(bits(copy.cpu()), bits(x.cpu()))
    addresses = {x.data_ptr(), host.data_ptr(), back.data_ptr()}
    assert len(addresses) == 3 or x.numel() == 0


def test_what_comes_back_does_not_depend_on_what_became_of_the_value() -> None:
    x = torch.arange(6.0)
    host = WAIT_OFFLOAD(OFFLOAD(x), x)
    x.zero_()
    assert WAIT_RELOAD(RELOAD(host, "cpu")).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_fails_between_copy_and_wait_leaves_nothing_behind(device: str) -> None:
    x = torch.ones(8, device=device)
    host = OFFLOAD(x)
    left = [weakref.ref(x), weakref.ref(host)]
    with pytest.raises(RuntimeError):
        torch.mm(x, host)
    del x, host
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_sizes_and_strides_may_be_symbols() -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env), shape_env.ignore_fresh_unbacked_symbols():
        n = shape_env.create_unbacked_symint()
        x = torch.empty(n, 4, device="cpu").transpose(0, 1)
        host, back = there_and_back(x)
    for copy in (host, back):
        assert str(copy.shape) == str(x.shape) and str(copy.stride()) == str(x.stride())


def test_the_schemas_say_which_results_are_new_storage() -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    begun = sketch.call(OFFLOAD, x)
    host = sketch.call(WAIT_OFFLOAD, begun, x)
    reload = sketch.call(RELOAD, host, "cpu")
    back = sketch.call(WAIT_RELOAD, reload)
    owners = Storages(sketch.graph.nodes).owners
    assert [owners[node] for node in (x, begun, host, reload, back)] == [x, begun, begun, reload, reload]
    assert not any(operators.has_effects(node) or operators.is_collective(node) for node in (begun, host, reload, back))

"""Fake results that are made again: what torch computes, for symbols of any names, and nothing that it would not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.torch_fakes import FakeResults

aten = torch.ops.aten


class Mode:
    """A mode whose results are kept, or torch's own; `computed` has each operator that torch computed."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.env = ShapeEnv()
        self.fake = FakeTensorMode(shape_env=self.env)
        self.computed: list[Any] = []
        own = self.fake.dispatch

        def compute(func: Any, *args: Any) -> Any:
            if func is not torch.ops.prim.device.default:
                self.computed.append(func)
            return own(func, *args)

        if keeps:
            self.fake.dispatch = FakeResults(self.fake, self.env, compute)  # type: ignore[method-assign]

    def size(self, least: int = 0, most: int | None = None) -> torch.SymInt:
        with self.env.ignore_fresh_unbacked_symbols():
            size = self.env.create_unbacked_symint()
        torch._check(size >= least)
        if most is not None:
            torch._check(size <= most)
        return size

    def tensor(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        with self.fake:
            return torch.empty(shape, dtype=dtype)

    def num_computed(self, call: Callable[[], Any]) -> int:
        """How many operators torch computes for a call."""
        self.computed.clear()
        with self.fake:
            call()
        return len(self.computed)


def described(x: Any) -> Any:
    """All of a result that a trace writes down."""
    if isinstance(x, list | tuple):
        return type(x), [described(each) for each in x]
    if isinstance(x, torch.SymInt):
        return str(x.node.expr), x.node._hint
    if not isinstance(x, Tensor):
        return x
    sizes = *x.shape, *x.stride(), x.storage_offset()  # in how many bytes torch's own cache writes otherwise
    keys = torch._C._dispatch_key_set(x)
    return [described(n) for n in sizes], x.dtype, x.device, x.requires_grad, keys, type(x)


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a product": lambda x, y: aten.mul.Tensor(x, y),
    "a cast": lambda x, y: aten._to_copy.default(x, dtype=torch.bfloat16),
    "a decomposed operator": lambda x, y: aten.silu_backward.default(x, y),
    "a transpose": lambda x, y: aten.transpose.int(x, 0, 1),
    "a view that joins dims": lambda x, y: aten.view.default(x, [-1]),
    "a view in secret": lambda x, y: aten._unsafe_view.default(x, [x.shape[0], 2, 4]),
    "parts": lambda x, y: aten.split_with_sizes.default(x, [3, 5], 1),
    "rows": lambda x, y: aten.unbind.int(aten.t.default(x)),
    "a part with an offset": lambda x, y: aten.slice.Tensor(x, 1, 2, 6),
    "a sum of sizes": lambda x, y: aten.cat.default([x, y, x]),
    "a sum": lambda x, y: aten.sum.dim_IntList(x, [0], True),
    "two results": lambda x, y: aten.sort.default(x),
    "a new tensor": lambda x, y: aten.new_zeros.default(x, [y.shape[0], 2]),
    "numbers": lambda x, y: aten.arange.default(x.shape[0] * 2, device="cpu"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_other_symbols_has_what_torch_gives_it_without_torch(name):
    found = []
    for mode in (Mode(keeps=False), Mode()):
        first, second = ([mode.tensor(n, 8) for _ in "xy"] for n in (mode.size(), mode.size()))
        mode.num_computed(lambda on=first: found.append(described(CALLS[name](*on))))
        num_computed = mode.num_computed(lambda on=second: found.append(described(CALLS[name](*on))))
    assert found[:2] == found[2:]
    assert num_computed == 0


def test_a_view_that_is_made_again_shares_its_own_arguments_memory_and_sizes():
    mode = Mode()
    first, second = (mode.tensor(mode.size(), 8) for _ in range(2))
    with mode.fake:
        views = [aten.transpose.int(x, 0, 1) for x in (first, second)]
        copy = aten.clone.default(aten.clone.default(second))
    memories = [x.untyped_storage()._cdata for x in (first, second, *views)]
    assert memories[:2] == memories[2:]
    assert views[1].shape[1].node is second.shape[0].node
    assert copy.untyped_storage()._cdata not in memories


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.add_(1),
        lambda x: aten.nonzero.default(x),
        lambda x: x[x > 0],
        lambda x: aten.as_strided.default(x, [2, 2], [1, 1]),
        lambda x: aten._local_scalar_dense.default(aten.sum.default(x)),
        lambda x: aten.add.Tensor(x, torch.tensor(1.0)),
    ],
)
def test_a_call_is_computed_again_that_writes_or_depends_on_data_or_constants(call):
    mode = Mode()
    x, y = (mode.tensor(mode.size(), 8) for _ in "xy")
    mode.num_computed(lambda: call(x))
    assert mode.num_computed(lambda: call(y)) > 0


def test_what_is_known_of_a_symbol_counts():
    mode = Mode()
    a, b, c, least = mode.size(), mode.size(), mode.size(), mode.size(least=2)
    assert mode.num_computed(lambda: aten.neg.default(mode.tensor(a, 8))) > 1
    assert mode.num_computed(lambda: aten.neg.default(mode.tensor(b, 8))) == 0
    assert mode.num_computed(lambda: aten.neg.default(mode.tensor(least, 8))) > 0
    torch._check(c * 2 <= a + 100)
    assert mode.num_computed(lambda: aten.neg.default(mode.tensor(c, 8))) > 0
    torch._check(b == a)
    assert mode.num_computed(lambda: aten.neg.default(mode.tensor(b, 8))) > 0


def test_one_symbol_twice_is_another_call_than_two_symbols():
    mode = Mode()
    x, y, z = (mode.tensor(mode.size(), 8) for _ in "xyz")
    assert mode.num_computed(lambda: aten.cat.default([x, y])) > 0
    assert mode.num_computed(lambda: aten.cat.default([z, x])) == 0
    assert mode.num_computed(lambda: aten.cat.default([x, x])) > 0


def test_which_sizes_have_one_symbol_counts_where_they_are_different_objects():
    mode = Mode()
    a, b = mode.size(), mode.size()

    def joined(*sizes: torch.SymInt) -> Callable[[], Tensor]:
        tensors = [mode.tensor(size * 2, 8) for size in sizes]
        return lambda: aten.cat.default(tensors)

    assert mode.num_computed(joined(a, b, a)) > 0
    assert mode.num_computed(joined(b, a, b)) == 0
    assert mode.num_computed(joined(a, b, b)) > 0


def test_a_call_that_teaches_torch_something_is_computed_again():
    mode = Mode()
    a, b, c, d = (mode.size() for _ in range(4))
    assert mode.num_computed(lambda: aten.add.Tensor(mode.tensor(a), mode.tensor(b))) > 0
    num_known = mode.env.num_deferred_runtime_asserts
    assert mode.num_computed(lambda: aten.add.Tensor(mode.tensor(c), mode.tensor(d))) > 0
    assert mode.env.num_deferred_runtime_asserts > num_known


def test_a_call_that_takes_a_symbol_which_its_result_does_not_show_is_computed_again():
    mode = Mode()
    plain = mode.fake.dispatch._compute

    def compute(*args: Any) -> Any:
        mode.size()
        return plain(*args)

    mode.fake.dispatch._compute = compute
    x, y = mode.tensor(mode.size(), 8), mode.tensor(mode.size(), 8)
    assert mode.num_computed(lambda: aten.neg.default(x)) > 0
    assert mode.num_computed(lambda: aten.neg.default(y)) > 0


def test_a_result_whose_bytes_are_written_otherwise_when_it_is_made_again_is_not_kept():
    mode = Mode()
    x = mode.tensor(mode.size(), mode.size())
    assert mode.num_computed(lambda: aten.neg.default(x)) > 0
    assert mode.num_computed(lambda: aten.neg.default(x)) > 0


def test_a_mode_takes_no_result_of_another():
    one, other = Mode(), Mode()
    for mode in (one, other):
        assert mode.num_computed(lambda mode=mode: aten.neg.default(mode.tensor(mode.size(), 8))) > 0


def random_program(seed: int, mode: Mode) -> list[Any]:
    """What a program of random calls on tensors with open sizes gives, and what torch has learned from it."""
    draw = random.Random(seed)
    sizes: list[Any] = [4, 8]
    tensors: list[Tensor] = []
    found: list[Any] = []
    for _ in range(60):
        x = draw.choice(tensors) if tensors else None
        kind = draw.randrange(10)
        try:
            with mode.fake:
                if x is None or kind == 0:
                    sizes.append(mode.size(draw.choice([0, 0, 0, 1, 2]), draw.choice([None, None, 64])))
                    made: Any = torch.empty(draw.choice(sizes), draw.choice(sizes), draw.choice([1, 4]))
                elif kind == 1:
                    made = x.transpose(draw.randrange(x.dim()), 0)
                elif kind == 2:
                    made = x * draw.choice([y for y in tensors if y.dim() == x.dim()])
                elif kind == 3:
                    made = torch.cat(
                        [x, draw.choice([y for y in tensors if y.dim() == x.dim()])], draw.randrange(x.dim())
                    )
                elif kind == 4:
                    made = aten.silu_backward.default(x, x.contiguous())
                elif kind == 5:
                    made = x.reshape(draw.choice([(-1,), (x.shape[0], -1), (*x.shape, 1)]))
                elif kind == 6:
                    made = x.sum(draw.randrange(x.dim()), keepdim=True)
                elif kind == 7:
                    made = x[draw.choice([slice(1, 3), slice(None), slice(0, draw.choice(sizes))])]
                elif kind == 8:
                    made = x.to(draw.choice([torch.bfloat16, torch.float32])).expand(3, *x.shape)
                else:
                    made = x.new_zeros(draw.choice(sizes), *x.shape[1:])
            tensors.append(made)
            found.append(described(made))
        except Exception as error:
            found.append(type(error))
    env = mode.env
    learned = [str(check.expr) for checks in env.deferred_runtime_asserts.values() for check in checks]
    ranges = {str(symbol): str(extent) for symbol, extent in env.var_to_range.items()}
    return [*found, learned, ranges, {str(symbol): str(x) for symbol, x in env.replacements.items()}]


@pytest.mark.parametrize("seed", range(16))
def test_random_programs_find_and_teach_what_they_do_in_torch(seed):
    mode = Mode()
    assert random_program(seed, mode) == random_program(seed, Mode(keeps=False))

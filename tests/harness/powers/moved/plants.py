"""Planted moves: operators of this process overridden by a version with other bits, and a program that calls them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PROGRAM = """
import torch

def calls():
    g = torch.Generator().manual_seed(1)
    r = lambda *s: torch.randn(*s, generator=g)
    a, b, tiny = r(8, 32), r(32, 8), r(4, 8) * 1e-40
    h = a.bfloat16() @ b.bfloat16()
    out = [a @ b, torch.addmm(r(8), a, b), torch.bmm(r(2, 4, 32), r(2, 32, 4)), h, a.sum(1), a.mean(1)]
    out += [torch.softmax(a, 1), torch.log_softmax(a, 1), a.exp(), a.sigmoid(), a.tanh(), a.abs().sqrt()]
    out += [torch.addcmul(a, r(8, 32), r(8, 32)), a * 3.0, tiny * 1.0, tiny + tiny, tiny - 2 * tiny, tiny / 2]
    out += [torch.nn.functional.gelu(a), torch.mv(a, r(32)), torch.dot(r(64), r(64)), a.cumsum(1), a.relu()]
    return out
"""


def in_order(products: Tensor) -> Tensor:
    total = products[..., 0].clone()
    for k in range(1, products.shape[-1]):
        total = total + products[..., k]
    return total


def backwards(products: Tensor) -> Tensor:
    return in_order(products.flip(-1))


def evens_first(products: Tensor) -> Tensor:
    return in_order(torch.cat([products[..., ::2], products[..., 1::2]], -1))


def narrow(products: Tensor) -> Tensor:
    total = torch.zeros_like(products[..., 0])
    for k in range(products.shape[-1]):
        total = (total + products[..., k]).bfloat16().to(total.dtype)
    return total


def wide(products: Tensor) -> Tensor:
    """A float64 accumulator, of additions in order."""
    return in_order(products.double()).to(products.dtype)


def products_of(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None, :].float() * b.transpose(-1, -2)[..., None, :, :].float()


def edge(values: Tensor) -> Tensor:
    """The last element of the last dim, one ULP off."""
    values = values.clone()
    values[..., -1] = torch.nextafter(values[..., -1], torch.tensor(float("inf")))
    return values


def flushed(values: Tensor) -> Tensor:
    return torch.where(values.abs() < 2.0**-126, torch.zeros_like(values), values)


def _exp2(x: Tensor) -> Tensor:
    return torch.exp2(x * 1.4426950408889634)


def _softmax(x: Tensor, dim: int, half: bool = False) -> Tensor:
    raised = _exp2(x - x.amax(dim, keepdim=True))
    return raised / in_order(raised)[..., None]


class Plant(NamedTuple):
    """A move: its operator, its kind, and ways to plant it, each a function and a pattern of its cause, empty for none.

    A way that computes what this machine's kernel does anyway is no move, so the next one is planted: on AMD, MKL adds
    the products of `mm` in order, and does not fuse.
    """

    operator: str
    kind: str
    ways: tuple[tuple[Callable[..., Tensor], str], ...]

    def __str__(self) -> str:
        return f"{self.operator}-{self.kind}"


def _sums(add: Callable[[Tensor], Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Operators that add, each with its additions made by `add`."""
    return {
        "mm": lambda a, b: add(products_of(a, b)).to(a.dtype),
        "bmm": lambda a, b: add(products_of(a, b)),
        "addmm": lambda c, a, b, beta=1, alpha=1: add(products_of(a, b)) + c,
        "sum.dim_IntList": lambda x, dim, keepdim=False, dtype=None: add(x),
        "mean.dim": lambda x, dim, keepdim=False, dtype=None: add(x) / x.shape[-1],
        "mv": lambda a, b: add(a * b),
        "dot": lambda a, b: add(a * b),
    }


def plants() -> list[Plant]:
    """All plants."""
    other, narrowed = "another order of additions", "accumulator of 8 bits"
    # On Intel, MKL adds in order and fuses. On AMD it does not fuse, and adds the first operand of `addmm` first.
    unfused = dict.fromkeys(("mm", "bmm", "addmm"), f"no fused multiply-add|{other}")
    found = []
    for operator, third in _sums(evens_first).items():
        ways = (_sums(in_order)[operator], unfused.get(operator, other)), (third, other)
        found += [
            Plant(operator, "in order", ways),
            Plant(operator, "backwards", ((_sums(backwards)[operator], other), (third, other))),
            Plant(operator, "narrow", ((_sums(narrow)[operator], narrowed),)),
        ]
    found += [
        Plant(name, "wide", ((_sums(wide)[name], "accumulator of 5"),)) for name in ("mm", "sum.dim_IntList", "dot")
    ]
    function = "elementary function"
    rows: list[tuple[str, str, Callable[..., Tensor], str]] = [
        ("addcmul", "not fused", lambda a, b, c, value=1: a + b * c, "no fused multiply-add"),
        ("exp", "exp2", _exp2, function),
        ("sigmoid", "exp2", lambda x: 1 / (1 + _exp2(-x)), function),
        ("tanh", "exp2", lambda x: 1 - 2 / (_exp2(2 * x) + 1), function),
        ("_softmax", "exp2", _softmax, function),
        ("_log_softmax", "exp2", lambda x, d, h: torch.log2(_softmax(x, d)) * 0.6931471805599453, "elementary"),
        ("sqrt", "edge", lambda x: edge(x.double().pow(0.5).float()), ""),
        ("exp", "edge", lambda x: edge(torch.exp2(x.double() * 1.4426950408889634).float()), function),
        ("relu", "edge", lambda x: edge(x.clamp(min=0)), ""),
        ("gelu", "edge", lambda x, approximate="none": edge(x * 0.5), function),
        ("cumsum", "edge", lambda x, dim, dtype=None: edge(x), ""),
        ("div.Tensor", "flushed", lambda x, y: flushed(x * 0.5), ""),
        ("add.Tensor", "flushed", lambda x, y, alpha=1: flushed(torch.sub(x, y, alpha=-alpha)), "subnormals"),
        ("sub.Tensor", "flushed", lambda x, y, alpha=1: flushed(torch.add(x, y, alpha=-alpha)), "subnormals"),
    ]
    return found + [Plant(operator, kind, ((way, cause),)) for operator, kind, way, cause in rows]


@contextlib.contextmanager
def planted(operator: str, function: Callable[..., Tensor], with_keyset: bool = False) -> Iterator[None]:
    """This process with an operator's CPU kernel replaced."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that a kernel is replaced
            library.impl(operator, function, "CPU", with_keyset=with_keyset)
        yield
    finally:
        library._destroy()

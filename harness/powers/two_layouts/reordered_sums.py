"""Runs a system with its sums in other orders, to measure how far rounding alone changes its records.

Another layout of ranks adds the same terms in other groups. This module imitates such a layout in a single run: the
terms of every matrix product and every sum are permuted, divided into `parts`, summed part by part in the operator's
own dtype, and the parts are added in sequence. For example, with two parts a sum of 8 terms becomes (t5+t0+t3+t6) +
(t1+t7+t2+t4).

Calls of eager code, of backward and of users' systems are changed. Fused operators, such as attention and norms, run
unchanged on changed inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bitproof.harness.records.layout import Regroup
from bitproof.harness.within_user_code import refusing, theirs

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def regrouped(regroup: Regroup | None, rank: int, step: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Context in which this thread's sums have another order; no effect if `regroup` is None.

    `step` must return the index of the current step.
    """
    if regroup is None:
        yield
        return
    import torch
    from torch.distributed.tensor import DTensor

    from bitproof.harness.graph.operators import row_of
    from bitproof.harness.torch_compat import TorchDispatchMode

    parts, first = regroup.parts, regroup.first_step
    # Ranks draw independent orders, as in another layout.
    generator = torch.Generator().manual_seed(regroup.seed * 65_537 + rank)

    class Regrouping(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented  # DTensor turns it into calls on local tensors, which arrive here
            kwargs = kwargs or {}
            with refusing():
                row = row_of(function)
                # Earlier steps stay as in the plain run.
                if first and step() < first:
                    return theirs(function, *args, **kwargs)
                if row.factors_from is not None and _is_product(args, kwargs, row.factors_from):
                    return _product(function, args, kwargs, row.factors_from, parts, generator)
                if row.adds is not None and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                    return _sum(function, args, kwargs, parts, generator)
                return theirs(function, *args, **kwargs)

    with Regrouping():  # type: ignore[no-untyped-call]
        yield


def _is_product(args: Sequence[Any], kwargs: Any, at: int) -> bool:
    import torch

    factors = args[at : at + 2]
    # Sums of two products are the same in either order, so longer inner dims are needed.
    are_matrices = len(args) == at + 2 and all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in factors)
    return are_matrices and not kwargs and factors[0].shape[-1] > 2


def _product(function: Any, args: Sequence[Any], kwargs: Any, at: int, parts: int, generator: Any) -> Tensor:
    """Return the matrix product left (.., M, K) @ right (.., K, N); the sum over K is permuted and divided into
    `parts`.

    The factors are `args[at]` and `args[at + 1]`.
    """
    left, right = args[at], args[at + 1]
    total = None
    for terms in _terms(left.shape[-1], parts, generator, left.device):
        factors = left.index_select(-1, terms), right.index_select(-2, terms)
        # A summand, such as a bias, is added with the first part; the other parts are only products.
        part = theirs(function, *args[:at], *factors, **kwargs) if total is None else factors[0] @ factors[1]
        total = part if total is None else total + part
    assert total is not None, "a product has terms"
    return total


def _sum(function: Any, args: Sequence[Any], kwargs: Any, parts: int, generator: Any) -> Any:
    import torch

    x, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    # `sum` takes None, a number, or a list of dims; an empty list means all dims.
    dims = [*range(x.dim())] if dims is None or dims == [] else [dims] if isinstance(dims, int) else [*dims]
    # The longest dim has the most terms to regroup.
    dim = max(dims, key=lambda dim: x.shape[dim], default=None)
    # Two terms have the same sum in either order.
    if dim is None or x.shape[dim] < 3 or kwargs.get("dtype") not in (None, x.dtype):
        return theirs(function, *args, **kwargs)
    pieces = [x.index_select(dim, terms) for terms in _terms(x.shape[dim], parts, generator, x.device)]
    keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    # A mean is a sum of parts, divided once at the end.
    total = torch.ops.aten.sum.dim_IntList(pieces[0], dims, keep)
    for piece in pieces[1:]:
        total = total + torch.ops.aten.sum.dim_IntList(piece, dims, keep)
    if "mean" not in str(function):
        return total
    count = 1
    for each in dims:
        count *= x.shape[each]
    return total / count


def _terms(size: int, parts: int, generator: Any, device: Any) -> Sequence[Tensor]:
    import torch

    order = torch.randperm(size, generator=generator).to(device)
    # At least two terms in a group, however many parts are asked for.
    return order.tensor_split(max(1, min(parts, size // 2)))

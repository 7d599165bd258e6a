"""Formulas that compute the same function as an operator, with another order, dtype or number of roundings.

They differ from the operator only by rounding, as a fused kernel does. Example: `1 / sqrt(x)` for `rsqrt(x)`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.powers.sensitivity.lockstep import Get
from bitproof.harness.powers.sensitivity.program import Program, ReplayedCall, Slot, filled

aten = torch.ops.aten

Arguments = Mapping[str, Any]
Formula = Callable[..., Any]
"""Takes a call's arguments, and returns the value that replaces the call's result."""


def _wide(function: Formula) -> Formula:
    """Return a formula that calls `function` with floating-point arguments in float64, and rounds the result once."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        # The result gets the dtype of the first floating-point argument, as the operator's own.
        dtypes = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()]

        def widened(x: Any) -> Any:
            return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

        kwargs = {
            name: torch.float64 if name == "dtype" and value else widened(value) for name, value in kwargs.items()
        }
        given = function(*(torch.float64 if isinstance(x, torch.dtype) else widened(x) for x in args), **kwargs)
        return given.to(dtypes[0]) if isinstance(given, Tensor) else given

    return computed


def _sum_backwards(x: Tensor, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dims = list(range(x.dim())) if not dims else list(dims)
    return aten.sum.dim_IntList(x.flip(dims), dims, keepdim, **kwargs)


def _mean_backwards(x: Tensor, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dims = list(range(x.dim())) if not dims else list(dims)
    return aten.mean.dim(x.flip(dims), dims, keepdim, **kwargs)


def _mean_by_product(x: Tensor, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dims = list(range(x.dim())) if not dims else list(dims)
    count = functools.reduce(lambda n, dim: n * x.shape[dim], dims, 1)
    return aten.sum.dim_IntList(x, dims, keepdim, **kwargs) * (1 / count)


def _mm_in_halves(x: Tensor, y: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.matmul(x[..., :half], y[..., :half, :]) + torch.matmul(x[..., half:], y[..., half:, :])


def _mm_backwards(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x.flip(-1), y.flip(-2))


def _grouped_in_float32(x: Tensor, y: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    assert offs is not None
    bounds = [0, *offs.tolist()]
    pairs = list(itertools.pairwise(bounds))
    if y.dim() == 3:  # rows of x by group, a matrix each
        # Rows after the last group's end belong to no group; their results are zeros here.
        parts = [x[a:b].float() @ y[i].float() for i, (a, b) in enumerate(pairs)]
        return torch.cat([*parts, x.new_zeros(x.shape[0] - bounds[-1], y.shape[-1]).float()]).to(x.dtype)
    # Both operands are 2-dimensional: the groups divide the inner dim, as in the gradient of the weights.
    return torch.stack([x[:, a:b].float() @ y[a:b].float() for a, b in pairs]).to(x.dtype)


def _truncated(x: Tensor, **kwargs: Any) -> Tensor:
    # -65536 is 0xFFFF0000: the upper 16 bits of a float32 number are a bfloat16 number.
    return (x.view(torch.int32) & -65536).view(torch.float32).to(kwargs["dtype"])


def _softmax_by_steps(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    power = (x - x.amax(dim, keepdim=True)).exp()
    return power / power.sum(dim, keepdim=True)


def _log_softmax_by_steps(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return x - x.logsumexp(dim, keepdim=True)


def _attention_by_steps(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any
) -> tuple[Any, ...]:
    scale = kwargs.get("scale") or q.shape[-1] ** -0.5
    scores = q.float() @ k.float().transpose(-2, -1) * scale
    if (mask := kwargs.get("attn_mask")) is not None:
        scores = scores + mask
    if is_causal:
        # Above the diagonal: the keys that come after a query.
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    out = (scores.softmax(-1) @ v.float()).to(q.dtype)
    return out, scores.logsumexp(-1)


def _embedding_backwards(grad: Tensor, indices: Tensor, num: int, padding: int, by_count: bool) -> Tensor:
    rows, places = grad.reshape(-1, grad.shape[-1]).flip(0), indices.reshape(-1).flip(0)
    return aten.embedding_dense_backward.default(rows, places, num, padding, by_count)


def _adamw_by_steps(
    params: Any, grads: Any, means: Any, squares: Any, maxima: Any, steps: Any, **kwargs: Any
) -> list[tuple[Tensor, Tensor]]:
    lr, beta1, beta2 = float(kwargs["lr"]), kwargs["beta1"], kwargs["beta2"]
    given = []
    for x, g, m, v, step in zip(params, grads, means, squares, steps, strict=True):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        # The kernel's `steps` are already incremented when it runs.
        moved = (m / (1 - beta1 ** float(step))) / ((v / (1 - beta2 ** float(step))).sqrt() + kwargs["eps"])
        given.append((x - lr * (moved + kwargs["weight_decay"] * x), m))
    return given


_FORMULAS: dict[str, list[tuple[str, Formula]]] = {
    "rsqrt": [("1 / sqrt(x)", lambda x: 1 / x.sqrt()), ("in float64", _wide(aten.rsqrt.default))],
    "sigmoid": [("1 / (1 + exp(-x))", lambda x: 1 / (1 + (-x).exp())), ("in float64", _wide(aten.sigmoid.default))],
    "silu": [("x sigmoid(x) in two roundings", lambda x: x * x.sigmoid()), ("in float64", _wide(aten.silu.default))],
    "silu_backward": [("in float64", _wide(aten.silu_backward.default))],
    "sigmoid_backward": [("g (s - s s)", lambda g, s: g * (s - s * s))],
    "exp": [("in float64", _wide(aten.exp.default))],
    "div": [("times the reciprocal", lambda x, y: x * (1 / y))],
    "sum": [("from the last summand", _sum_backwards)],
    "mean": [("from the last summand", _mean_backwards), ("times 1 / n", _mean_by_product)],
    "mm": [
        ("two halves of the inner dim", _mm_in_halves),
        ("inner dim reversed", _mm_backwards),
        ("in float64", _wide(aten.mm.default)),
    ],
    "bmm": [("two halves of the inner dim", _mm_in_halves), ("in float64", _wide(aten.bmm.default))],
    "_grouped_mm": [("each group in float32", _grouped_in_float32)],
    "_softmax": [("by steps", _softmax_by_steps)],
    "_log_softmax": [("by steps", _log_softmax_by_steps)],
    "_scaled_dot_product_flash_attention_for_cpu": [("by steps in float32", _attention_by_steps)],
    "embedding_dense_backward": [("from the last row", _embedding_backwards)],
}
"""Operator -> (name, formula) for each of its formulas."""


def names_of(program: Program, call: ReplayedCall) -> list[str]:
    return [name for name, _ in _formulas_of(program, call)]


def computed(program: Program, call: ReplayedCall, name: str, gets: list[Get]) -> dict[tuple[int, int], Any]:
    """Compute a call on all ranks by the formula `name`. Returns a dict: (value number, rank) -> result.

    `gets` has a function for each rank, which takes the number of a value and returns the value.
    """
    formula = dict(_formulas_of(program, call))[name]
    return {key: value for rank in range(len(gets)) for key, value in formula(gets, rank)}


Slots = Iterator[tuple[tuple[int, int], Any]]


def _formulas_of(program: Program, call: ReplayedCall) -> Iterator[tuple[str, Callable[[list[Get], int], Slots]]]:
    # A collective; of these only sums over ranks have a neighbouring formula.
    if call.partition is not None:
        if call.operator in ("reduce_scatter_tensor", "all_reduce"):
            yield "from the last rank", functools.partial(_from_last_rank, call)
        return
    if call.operator == "_fused_adamw_":
        yield "by steps", functools.partial(_stepwise, call)
    for name, formula in _FORMULAS.get(call.operator, ()):
        yield name, functools.partial(_by_formula, call, formula)
    if call.operator == "_to_copy" and call.kwargs.get("dtype") is torch.bfloat16:
        yield "cut, not rounded", functools.partial(_cut, call)
    if call.operator in ("add", "sub") and not call.kwargs and len(call.args) == 2:
        yield from _sums(program, call)


def _by_formula(call: ReplayedCall, formula: Formula, gets: list[Get], rank: int) -> Slots:
    get = gets[rank]
    kwargs = {name: filled(value, get) for name, value in call.kwargs.items()}
    found, usual = formula(*filled(call.args, get), **kwargs), get(call.result)
    if isinstance(usual, tuple):  # outputs that the formula does not compute stay as they are
        found = (*found, *usual[len(found) :])
        yield (call.result, rank), tuple(_like(x, y) for x, y in zip(found, usual, strict=True))
    else:
        yield (call.result, rank), _like(found, usual)


def _cut(call: ReplayedCall, gets: list[Get], rank: int) -> Slots:
    x = filled(call.args[0], gets[rank])
    if x.dtype is torch.float32:
        yield (call.result, rank), _like(_truncated(x, dtype=torch.bfloat16), gets[rank](call.result))


def _stepwise(call: ReplayedCall, gets: list[Get], rank: int) -> Slots:
    get = gets[rank]
    kwargs = {name: filled(value, get) for name, value in call.kwargs.items()}
    # From the slot before the call to the slot after it.
    new = dict(call.writes)
    by_steps = _adamw_by_steps(*filled(call.args, get), **kwargs)
    for x, mean, (value, moment) in zip(call.args[0], call.args[2], by_steps, strict=True):
        yield (new[x.number], rank), value
        yield (new[mean.number], rank), moment


def _from_last_rank(call: ReplayedCall, gets: list[Get], rank: int) -> Slots:
    assert call.partition is not None
    group = next(ranks for ranks in call.partition if rank in ranks)
    # Descending: bitproof's own sums add in ascending rank order.
    xs = [gets[peer](call.args[0].number) for peer in reversed(group)]
    if call.operator == "reduce_scatter_tensor":
        xs = [x.chunk(len(group))[group.index(rank)] for x in xs]
    yield (call.result, rank), _like(functools.reduce(torch.add, xs), gets[rank](call.result))


def _sums(program: Program, call: ReplayedCall) -> Iterator[tuple[str, Callable[[list[Get], int], Slots]]]:
    """Yield (name, formula) for formulas that combine a sum with the call that makes its input.

    The formulas are `a*b + c` with an unrounded product, like an FMA, and `a + (b+c)` for `(a+b) + c`.
    """
    for place, read in enumerate(call.args):
        maker = program.makers.get(read.number) if isinstance(read, Slot) else None
        if maker is None or maker.partition is not None or maker.kwargs or len(maker.args) != 2:
            continue
        if maker.operator == "mul":
            yield f"product {place} not rounded (FMA)", functools.partial(_fused, call, maker, place)
        elif call.operator == maker.operator == "add" and place == 0:
            yield "a + (b + c)", functools.partial(_reassociated, call, maker)


def _fused(call: ReplayedCall, maker: ReplayedCall, place: int, gets: list[Get], rank: int) -> Slots:
    get = gets[rank]
    usual = get(call.result)
    sides = [filled(x, get) for x in call.args]
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in sides):
        return
    first, second = (filled(x, get) for x in maker.args)
    # In float64 the product of two float32 numbers is exact (48 of 53 bits), so only the sum is rounded, as in an FMA.
    exact = (first.double() if isinstance(first, Tensor) else first) * (
        second.double() if isinstance(second, Tensor) else second
    )
    wide = [exact if index == place else x.double() for index, x in enumerate(sides)]
    total = wide[0] - wide[1] if call.operator == "sub" else wide[0] + wide[1]
    yield (call.result, rank), _like(total, usual)


def _reassociated(call: ReplayedCall, maker: ReplayedCall, gets: list[Get], rank: int) -> Slots:
    get = gets[rank]
    a, b, c = (*(filled(x, get) for x in maker.args), filled(call.args[1], get))
    if all(isinstance(x, Tensor) and x.is_floating_point() for x in (a, b, c)):
        yield (call.result, rank), _like(a + (b + c), get(call.result))


def _like(value: Any, usual: Any) -> Any:
    if not isinstance(value, Tensor) or value is usual:
        return value
    return torch.empty_strided(usual.shape, usual.stride(), dtype=usual.dtype).copy_(value)

"""Probes how a kernel adds: order of additions, accumulator width, fused multiply-adds, flushed subnormals.

The order is found as in FPRev (Xie et al., USENIX ATC 2025):

1. In a sum of n ones, replace two terms by +big and -big.
2. Each of the two terms absorbs the ones that are added to it, until both terms meet and cancel.
3. So the result is the number of ones that are added later, outside the smallest partial sum that contains both terms.

Example: 8 terms are added from left to right, with +big first and -big third. The result is 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .allowed_calls import operator_named
from .call_archive import Archive
from .call_values import DTYPES, digest_of
from .replaying import run_loaded

MOST_TERMS, MOST_SHAPES = 512, 40
BIG = {torch.float32: 2.0**60, torch.float64: 2.0**200, torch.bfloat16: 2.0**60, torch.float16: 2.0**15}
# All terms together must vanish beside BIG in a float32 accumulator, so float16 needs terms that are subnormal.
UNIT = {torch.float16: 2.0**-17}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "mv", "dot"}
SUMS = {"sum", "mean"}


def probe(archive: Archive, call: dict[str, Any]) -> dict[str, Any]:
    """Return facts about the kernel that a call uses in this environment, for comparison with another environment.

    The dict has the key "shapes", and those keys of `_ASKED` that can be probed for this call, such as "order" and
    "bias".
    """
    found: dict[str, Any] = {}
    for name, ask in _ASKED.items():
        try:
            answer = ask(call)
            if answer is not None:
                found[name] = answer
        except Exception:  # a probe whose shapes do not fit this call
            continue
    found["shapes"] = _shapes(archive, call)
    return found


def _terms(call: dict[str, Any], rows_KN: Tensor, bias: float = 0.0) -> Tensor | None:
    """Compute N sums of K terms with the call's operator. Returns a tensor of shape (N,); None for other operators.

    The operators are those in SUMS and PRODUCTS. Operators such as `addmm` also add `bias`.
    """
    name = call["op"].split(".")[1]
    operator = operator_named(call["op"])
    terms_NK = rows_KN.T.contiguous()
    if name in SUMS:
        scale = rows_KN.shape[0] if name == "mean" else 1
        return operator(terms_NK, [1]) * scale if "dim" in call["op"] else operator(terms_NK[0]).reshape(1) * scale
    shapes = [tensor["shape"] for tensor in call["tensors"]]
    if name not in PRODUCTS:
        return None
    # A product computes a sum as a row of terms times a column of ones. The terms are in row 0, beside rows of ones, so
    # that the operands have as many rows and columns as in the recorded call.
    rows, columns = (shapes[-2][-2], shapes[-1][-1]) if name in ("mm", "addmm", "bmm", "baddbmm") else (1, 1)
    ones = torch.ones(rows_KN.shape[0], columns, dtype=rows_KN.dtype)
    sums = []
    for row in terms_NK:
        left = torch.ones(rows, rows_KN.shape[0], dtype=row.dtype)
        left[0] = row
        added = torch.full((rows, columns), bias, dtype=row.dtype)
        given = {
            "mm": (left, ones),
            "addmm": (added, left, ones),
            "bmm": (left[None], ones[None]),
            "baddbmm": (added[None], left[None], ones[None]),
            "linear": (left, ones.T.contiguous()),
            "mv": (left, ones[:, 0]),
            "dot": (left[0], ones[:, 0]),
        }[name]
        sums.append(operator(*given).flatten()[0])
    return torch.stack(sums)


def _inner(call: dict[str, Any]) -> tuple[int, torch.dtype]:
    name = call["op"].split(".")[1]
    tensor = call["tensors"][-2 if name in PRODUCTS and len(call["tensors"]) > 1 else 0]
    dtype = DTYPES[tensor["dtype"]]
    if name in SUMS:
        # The first list among the arguments has the dims; without one, the call adds all elements.
        dims = next((v[1] for v in call["args"][1:] if v[0] == "l"), [["i", d] for d in range(len(tensor["shape"]))])
        count = 1
        for _, dim in dims:
            count *= tensor["shape"][dim]
        return min(count, MOST_TERMS), dtype
    return min(tensor["shape"][-1], MOST_TERMS), dtype


def order_of_additions(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return facts about the order in which a call's kernel adds terms; None if it cannot be probed.

    - "sizes": for pairs of terms, the number of terms in the smallest partial sum that contains both terms. The pairs
      are term 0 with each other term, then the middle term with each other term. Example: in a sum from left to right,
      terms 0 and 2 have size 3.
    - "first": the term that is added to term 0 first.
    - "terms": number of terms.
    """
    terms, dtype = _inner(call)
    name = call["op"].split(".")[1]
    # A mean divides the float16 terms below its smallest number.
    if name not in PRODUCTS | SUMS or terms < 3 or (name, dtype) == ("mean", torch.float16):
        return None
    # More ones than 256 cannot be counted exactly in bfloat16.
    most = {torch.bfloat16: 256, torch.float16: 256}.get(dtype, MOST_TERMS)
    terms, unit = min(terms, most), UNIT.get(dtype, 1.0)
    sizes = []
    # With term 0 alone, terms that meet it together show no order among themselves.
    for pivot in (0, terms // 2):
        for other in (each for each in range(terms) if each != pivot):
            rows_KN = torch.full((terms, 1), unit, dtype=dtype)
            rows_KN[pivot], rows_KN[other] = BIG[dtype], -BIG[dtype]
            found = _terms(call, rows_KN)
            if found is None:
                return None
            sizes.append(round(terms - float(found[0]) / unit))
    first = sizes[: terms - 1]
    return {"sizes": sizes, "first": 1 + first.index(min(first)), "terms": terms}


def _bias(call: dict[str, Any]) -> list[int] | None:
    """Return a number for each term of a product: how many other terms are added before this term meets the bias.

    Example: 0, 1, 2, ... if the kernel starts with the bias. None if this cannot be probed, for example without a bias.
    """
    terms, dtype = _inner(call)
    if call["op"].split(".")[1] not in ("addmm", "baddbmm"):
        return None
    terms, unit = min(terms, 256 if dtype.itemsize == 2 else MOST_TERMS), UNIT.get(dtype, 1.0)
    sizes = []
    for other in range(terms):
        rows_KN = torch.full((terms, 1), unit, dtype=dtype)
        rows_KN[other] = -BIG[dtype]
        found = _terms(call, rows_KN, BIG[dtype])
        if found is None:
            return None
        sizes.append(round(terms - 1 - float(found[0]) / unit))
    return sizes


def _accumulator_bits(call: dict[str, Any]) -> int | None:
    """Return the accumulator's precision: the smallest tested number of bits with which 1 + 2^-bits - 1 becomes 0.

    None if the small term is never lost, or if this cannot be probed.
    """
    order = order_of_additions(call)
    if order is None:
        return None
    terms, dtype = order["terms"], _inner(call)[1]
    thirds = sorted({0, 1, order["first"], terms // 4, terms // 2, 3 * terms // 4, terms - 1})
    # The index of the small term and of the last one, among the positions where kernels split their sums.
    places = [(small, last) for small in thirds for last in thirds if 0 < small != last > 0]
    # The stored bits of a significand in bfloat16, float16, float32 and float64, and one more each.
    for bits in (7, 8, 10, 11, 23, 24, 52, 53):
        for small, last in places:
            for one, other in ((0, last), (last, 0)):  # a kernel may add the last term first
                rows_KN = torch.zeros(terms, 1, dtype=dtype)
                rows_KN[one], rows_KN[small], rows_KN[other] = 1.0, 2.0**-bits, -1.0
                found = _terms(call, rows_KN)
                if found is None or float(found[0]) == 0.0:
                    return bits
    return None


def _fused(call: dict[str, Any]) -> bool | None:
    operator, name = operator_named(call["op"]), call["op"].split(".")[1]
    # a * a is 1 + 2^-11 + 2^-24, which float32 rounds to 1 + 2^-11. Only a fused sum with c keeps the 2^-24.
    a = torch.full((64,), 1 + 2.0**-12)
    c = torch.full((64,), -(1 + 2.0**-11))
    calls = {
        "addcmul": lambda: operator(c, a, a),
        "lerp": lambda: operator(-a * 2.0**11, c, a),
        "add": lambda: operator(c, a, alpha=1 + 2.0**-12),
        "mm": lambda: operator(torch.stack([torch.ones(64), a], 1), torch.stack([c, a])),
        "bmm": lambda: operator(torch.stack([torch.ones(64), a], 1)[None], torch.stack([c, a])[None]),
        "addmm": lambda: operator(c.repeat(64, 1), a[:, None], a[None]),
    }
    # The rounding error of a product is 2^-24 here. A kernel that is off by 1 ULP makes a subnormal number of a zero.
    return bool((calls[name]().abs() > 2.0**-30).any()) if name in calls else None


def _flushes(call: dict[str, Any]) -> bool | None:
    operator, name = operator_named(call["op"]), call["op"].split(".")[1]
    tiny = torch.full((4, 64), 1e-40)
    calls = {
        "mul": lambda: operator(tiny, torch.ones(4, 64)),
        "add": lambda: operator(tiny, torch.zeros(4, 64)),
        "sub": lambda: operator(tiny, torch.zeros(4, 64)),
        "div": lambda: operator(tiny, torch.ones(4, 64)),
        "mm": lambda: operator(tiny, torch.eye(64)),
        "sum": lambda: operator(tiny, [1]) if "dim" in call["op"] else operator(tiny),
        "relu": lambda: operator(tiny),
        "sqrt": lambda: operator(tiny),
        "exp": lambda: operator(tiny - 90.0),
    }
    return bool((calls[name]() == 0).all()) if name in calls else None


def _shapes(archive: Archive, call: dict[str, Any]) -> dict[str, str]:
    """Run the call at up to MOST_SHAPES smaller shapes. Returns a dict: shape as text -> digest of the results.

    The dict is empty for calls that draw random numbers or take lists of integers, which may be sizes.
    """
    found: dict[str, str] = {}
    bases, state = archive.bases(call), archive.state(call)
    if state is not None or any(value[0] == "l" and value[1] and value[1][0][0] == "i" for value in call["args"][2:]):
        return found
    # Each entry maps an original size to a smaller one; all dims of that size shrink together, so that products still
    # fit.
    tried: list[dict[int, int]] = [{}]
    # The three largest dim sizes are halved repeatedly, in all combinations; the smallest are tried first.
    for size in sorted({s for t in call["tensors"] for s in t["shape"] if s > 1}, reverse=True)[:3]:
        smaller = [size >> k for k in range(size.bit_length()) if size >> k >= 1]
        tried = [known | {size: small} for known in tried for small in smaller]
    tried.sort(key=lambda sizes: sum(sizes.values()))
    for sizes in tried[:MOST_SHAPES]:
        tensors = [t | {"shape": [sizes.get(s, s) for s in t["shape"]]} for t in call["tensors"]]
        try:
            values = run_loaded(call | {"tensors": tensors}, bases, None)
        except Exception:  # sizes that do not fit each other
            continue
        found[" ".join(str(t["shape"]) for t in tensors)] = " ".join(digest_of(value) for value in values)
    return found


def _elementary_values(call: dict[str, Any]) -> str | None:
    operator, name = operator_named(call["op"]), call["op"].split(".")[1]
    values = torch.linspace(-8, 8, 64)
    if name in ("exp", "sigmoid", "tanh", "log1p", "sin", "cos", "erf", "gelu", "silu"):
        return digest_of(operator(values))
    if name not in ("_softmax", "_log_softmax"):
        return None
    rows = torch.full((64, 64), -float("inf"))
    # A softmax also adds. With only two finite terms, as exp(-inf) is 0, the sum is the same in any order.
    rows[:, 0], rows[:, 1] = values, 0.0
    return digest_of(operator(rows, 1, False))


_ASKED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "order": order_of_additions,
    "bias": _bias,
    "accumulator": _accumulator_bits,
    "fused": _fused,
    "flushes": _flushes,
    "exp": _elementary_values,
}

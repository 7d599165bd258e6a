"""How a kernel adds: the order of additions, the accumulator's width, fused multiply-adds, flushed subnormals.

The order is revealed as in FPRev (Xie et al., USENIX ATC 2025): of n ones, two become +big and -big. They cancel where
they meet in the tree of additions, and every one that was added to either before is lost. What remains shows the size
of the subtree in which the two meet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .allowed_calls import operator_named
from .call_archive import Archive
from .call_values import DTYPES, digest_of
from .replaying import run_loaded

MOST_TERMS, MOST_SHAPES = 512, 40
BIG = {torch.float32: 2.0**60, torch.float64: 2.0**200, torch.bfloat16: 2.0**60, torch.float16: 2.0**15}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "mv", "dot"}
SUMS = {"sum", "mean"}


def probe(archive: Archive, call: dict[str, Any]) -> dict[str, Any]:
    """Facts about a call's kernel here, to be compared with the other environment's. Facts that cannot be had are left
    out."""
    found: dict[str, Any] = {}
    for name, ask in (("order", _order), ("accumulator", _wide), ("fused", _fused), ("flushes", _flushes)):
        try:
            answer = ask(call)
            if answer is not None:
                found[name] = answer
        except Exception:  # a probe whose shapes do not fit this call
            continue
    found["shapes"] = _shapes(archive, call)
    return found


def _terms(call: dict[str, Any], rows_KN: Tensor) -> Tensor | None:
    """The sums of K terms, computed N times by the call's operator: a product with ones, or a sum."""
    name = call["op"].split(".")[1]
    operator = operator_named(call["op"])
    terms_NK = rows_KN.T.contiguous()
    if name in SUMS:
        scale = rows_KN.shape[0] if name == "mean" else 1
        return operator(terms_NK, [1]) * scale if "dim" in call["op"] else operator(terms_NK[0]).reshape(1) * scale
    shapes = [tensor["shape"] for tensor in call["tensors"]]
    if name not in PRODUCTS:
        return None
    # Terms in the first operand's row 0, beside ones, and with as many rows and columns as the recorded call.
    rows, columns = (shapes[-2][-2], shapes[-1][-1]) if name in ("mm", "addmm", "bmm", "baddbmm") else (1, 1)
    ones = torch.ones(rows_KN.shape[0], columns, dtype=rows_KN.dtype)
    sums = []
    for row in terms_NK:
        left = torch.ones(rows, rows_KN.shape[0], dtype=row.dtype)
        left[0] = row
        added = torch.zeros(rows, columns, dtype=row.dtype)
        made = {
            "mm": lambda left=left: operator(left, ones),
            "addmm": lambda left=left, added=added: operator(added, left, ones),
            "bmm": lambda left=left: operator(left[None], ones[None])[0],
            "baddbmm": lambda left=left, added=added: operator(added[None], left[None], ones[None])[0],
            "linear": lambda left=left: operator(left, ones.T.contiguous()),
            "mv": lambda left=left: operator(left, ones[:, 0])[:, None],
            "dot": lambda left=left: operator(left[0], ones[:, 0]).reshape(1, 1),
        }[name]()
        sums.append(made[0, 0])
    return torch.stack(sums)


def _inner(call: dict[str, Any]) -> tuple[int, torch.dtype]:
    """How many terms a call adds, and their dtype."""
    name = call["op"].split(".")[1]
    tensor = call["tensors"][-2 if name in PRODUCTS and len(call["tensors"]) > 1 else 0]
    dtype = DTYPES[tensor["dtype"]]
    if name in SUMS:
        dims = next((v[1] for v in call["args"][1:] if v[0] == "l"), [["i", d] for d in range(len(tensor["shape"]))])
        count = 1
        for _, dim in dims:
            count *= tensor["shape"][dim]
        return min(count, MOST_TERMS), dtype
    return min(tensor["shape"][-1], MOST_TERMS), dtype


def _order(call: dict[str, Any]) -> dict[str, Any] | None:
    """For term 0 and each other one, how many terms were added to either before the two met."""
    terms, dtype = _inner(call)
    if call["op"].split(".")[1] not in PRODUCTS | SUMS or terms < 3:
        return None
    most = {torch.bfloat16: 256, torch.float16: 256}.get(dtype, MOST_TERMS)
    terms = min(terms, most)
    rows_KN = torch.ones(terms, terms - 1, dtype=dtype)
    rows_KN[0] = BIG[dtype]
    for other in range(1, terms):
        rows_KN[other, other - 1] = -BIG[dtype]
    sums = torch.cat([_terms(call, rows_KN[:, n : n + 1]) for n in range(terms - 1)])  # type: ignore[misc]
    sizes = [round(terms - float(value)) for value in sums]
    nearest = min(sizes)
    return {"sizes": sizes, "first": 1 + sizes.index(nearest), "terms": terms, "dtype": str(dtype)[6:]}


def _wide(call: dict[str, Any]) -> str | None:
    """Whether small terms survive beside a large one, as in an accumulator wider than the terms."""
    terms, dtype = _inner(call)
    if terms < 8 or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    step = 2.0 ** {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype]
    rows_KN = torch.ones(terms, 1, dtype=dtype)
    rows_KN[0], rows_KN[terms - 1] = step, -step
    rows_KN[1 : terms - 1] = 0.5
    found = _terms(call, rows_KN)
    # In a narrow accumulator each half is lost beside `step`; lanes that do not hold it keep theirs.
    return None if found is None else f"keeps {float(found[0]):g} of {(terms - 2) / 2:g}"


def _fused(call: dict[str, Any]) -> bool | None:
    """Whether a product is added without being rounded first."""
    operator, name = operator_named(call["op"]), call["op"].split(".")[1]
    a = torch.full((64,), 1 + 2.0**-12)
    c = torch.full((64,), -(1 + 2.0**-11))
    calls = {
        "addcmul": lambda: operator(c, a, a),
        "lerp": lambda: operator(-a * 2.0**11, c, a),
        "add": lambda: operator(c, a, alpha=1 + 2.0**-12),
        "mm": lambda: operator(torch.stack([torch.ones(64), a], 1), torch.stack([c, a])),
        "addmm": lambda: operator(c.repeat(64, 1), a[:, None], a[None]),
    }
    return bool((calls[name]() != 0).any()) if name in calls else None


def _flushes(call: dict[str, Any]) -> bool | None:
    """Whether subnormal numbers become zero."""
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
    """Digests of the call's results at smaller sizes, by size: each dim size is halved, wherever it occurs."""
    found: dict[str, str] = {}
    bases, state = archive.bases(call), archive.state(call)
    if state is not None or any(value[0] == "l" and value[1] and value[1][0][0] == "i" for value in call["args"][2:]):
        return found
    tried: list[dict[int, int]] = [{}]
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

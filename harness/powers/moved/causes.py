"""The causes of a move, as differences of what both environments' kernels show when probed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def causes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Every probed fact that differs, as a sentence; none if nothing shows why."""
    found = []
    if old.get("flushes") != new.get("flushes") and None not in (old.get("flushes"), new.get("flushes")):
        found.append("subnormals become zero" if new["flushes"] else "subnormals are kept, became zero")
    if old.get("fused") != new.get("fused") and None not in (old.get("fused"), new.get("fused")):
        found.append("a fused multiply-add" if new["fused"] else "no fused multiply-add, was fused")
    wide = old.get("accumulator"), new.get("accumulator")
    if None not in wide and wide[0] != wide[1]:
        narrower = _kept(wide[1]) < _kept(wide[0])
        found.append(
            f"a {'narrower' if narrower else 'wider'} accumulator or other lanes: {wide[1]} small terms, {wide[0]} before"
        )
    order = old.get("order"), new.get("order")
    if None not in order and order[0] != order[1]:
        found.append(_order(*order))
    return found


def _kept(text: Any) -> float:
    match = re.match(r"keeps ([-\d.e+]+) of", str(text))
    return float(match[1]) if match else 0.0


def _order(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The difference of two orders of additions."""
    if old["first"] != new["first"]:
        return f"another order of additions: term 0 meets term {new['first']} first, met term {old['first']}"
    differ = sum(a != b for a, b in zip(old["sizes"], new["sizes"], strict=True))
    return f"another order of additions: {differ} of {len(old['sizes'])} terms meet term 0 elsewhere"


def smallest_shape(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The first tried shapes, from small to large, whose results differ; empty if none do."""
    return next((shape for shape, digest in old.items() if shape in new and new[shape] != digest), "")

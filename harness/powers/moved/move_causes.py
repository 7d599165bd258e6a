"""Finds why a call's results differ between two environments, by comparing facts about its kernel (`order_probes`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def causes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a text for each probed fact that differs between the environments; [] if none differs.

    `old` and `new` are the results of `order_probes.probe` in each environment.
    """
    # A fact is a cause only if both environments have it, with other values.
    found = []
    if old.get("flushes") != new.get("flushes") and None not in (old.get("flushes"), new.get("flushes")):
        found.append("subnormals become zero" if new["flushes"] else "subnormals are kept, became zero")
    if old.get("fused") != new.get("fused") and None not in (old.get("fused"), new.get("fused")):
        found.append("a fused multiply-add" if new["fused"] else "no fused multiply-add, was fused")
    was, now = old.get("accumulator"), new.get("accumulator")
    if was and now and was != now:
        found.append(f"an accumulator of {now} bits, was {was}")
    if old.get("exp") and new.get("exp") and old["exp"] != new["exp"]:
        found.append("other values of its elementary function, independent of any order of additions")
    if old.get("order") and new.get("order") and old["order"] != new["order"]:
        found.append(_order(old["order"], new["order"]))
    if old.get("bias") and new.get("bias") and old["bias"] != new["bias"]:
        found.append(
            f"another order of additions: the bias is added {_added(new['bias'])}, was added {_added(old['bias'])}"
        )
    return found


def _added(sizes: Sequence[int]) -> str:
    """Describe when a kernel adds the bias of a product: "last", or to which term, such as "to term 0 first".

    `sizes` has a number for each term: how many other terms are added before this term meets the bias.
    """
    # The bias meets first the term with the fewest other terms in between.
    first = min(range(len(sizes)), key=sizes.__getitem__)
    return "last" if min(sizes) == len(sizes) - 1 else f"to term {first} first"


def _order(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if old["first"] != new["first"]:
        return f"another order of additions: term 0 meets term {new['first']} first, met term {old['first']}"
    differ = sum(a != b for a, b in zip(old["sizes"], new["sizes"], strict=True))
    return f"another order of additions: {differ} of {len(old['sizes'])} pairs of terms meet elsewhere"


def smallest_shape(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the first of the probed shapes, from small to large, whose results differ; "" if none do.

    `old` and `new` map each shape to a digest of the call's result.
    """
    return next((shape for shape, digest in old.items() if shape in new and new[shape] != digest), "")

"""The operators that a proof may meet: those that did as their schemas say in all that a scan tried.

The list stands in `admitted.txt`. `tests/benchmarks/scan_operators.py` checks it, and writes it with `--write`. What
the scan could not call is unknown, so it is not there. What a call does to memory, as fake values show it, is held
against its schema, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.graph.operators import written_names
from harness.prove import operators as known
from harness.torch_compat import OpOverload, storage_key

SCANNED = ("aten", "prims")
"""The namespaces of which an operator must be on the list."""

UNKNOWN = {
    *("quantized", "_quantized", "quantization", "quantized_decomposed", "onednn", "mkldnn", "mkldnn_prepacked", "mkl"),
    *("sparse", "static_runtime", "inductor", "inductor_prims", "rngprims", "debugprims", "streams", "profiler"),
    *("_native", "fsdp", "_dtensor", "export", "onnx", "flex_lib", "prim", "debug_mode_ops", "_test"),
}
"""Torch's other namespaces, of which nobody has tried anything. Of a user's operators schemas are believed."""

FILE = Path(__file__).with_name("admitted.txt")


@functools.cache
def names() -> frozenset[str]:
    """Their names, `aten.add.Tensor`."""
    rows = (line.split() for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return frozenset(f"{packet}.{overload}" for packet, *overloads in rows for overload in overloads)


def write(found: Iterable[str]) -> None:
    """Write the list: a row an operator, with its overloads."""
    overloads: dict[str, list[str]] = {}
    for name in sorted(found):
        packet, _, overload = name.rpartition(".")
        overloads.setdefault(packet, []).append(overload)
    rows = [" ".join([packet, *own]) for packet, own in overloads.items()]
    FILE.write_text("\n".join(["# Written by tests/benchmarks/scan_operators.py --write.", *rows, ""]))
    names.cache_clear()


def why_not(target: Any) -> str | None:
    """Why a proof takes no call of an operator, in words; None where it may take some."""
    if not isinstance(target, OpOverload):
        return None
    name, namespace = str(target), target.namespace
    if namespace in UNKNOWN:
        return f"{name} is not understood: whether it does what its schema says, nobody has tried"
    is_known = name in known.DRAWS | known.REFUSED or name.split(".")[1] in known.UNDEFINED
    if namespace not in SCANNED or is_known or name in names():
        return None
    return f"{name} is not among the operators that were seen to do what their schemas and fake values say, and no more"


def untold(target: Any, given: Mapping[str, Any], results: Any) -> str | None:
    """What a call does to memory that its operator's schema does not say, in words. `given` are its arguments by name,
    on fake values."""
    if not isinstance(target, OpOverload):
        return None
    says = {x.name for x in target._schema.arguments if x.alias_info is not None}
    memory = {name: {storage_key(x) for x in _tensors(value)} for name, value in given.items()}
    told = set().union(*(memory.get(name, set()) for name in says))
    hidden = set().union(*memory.values()) - told
    if any(storage_key(x) in hidden for x in _tensors(results)):
        return f"{target} hands back memory that it was given, and does not say so"
    written = set().union(*(memory.get(name, set()) for name in written_names(target)))
    others = set().union(*(memory[name] for name in given if name not in written_names(target)))
    if written & others and str(target) not in {*known.IN_PLACE, known.COPY_INTO}:
        return f"{target} writes memory that it reads by another argument, too"
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)

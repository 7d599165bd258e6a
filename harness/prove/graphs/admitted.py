"""The operators that a proof may meet: those that did as their schemas say in all that a scan tried.

The list stands in `admitted.txt`. `tests/benchmarks/scan_operators.py` checks it, and writes it with `--write`. What
the scan could not call is unknown, so it is not there. What a call does to memory, as fake values show it, is held
against its schema, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from bitproof.harness.graph.operators import written_names
from bitproof.harness.prove import known_operators as known
from bitproof.harness.prove.windows import row_major
from bitproof.harness.torch_compat import OpOverload
from bitproof.harness.torch_operators import schema_of, storage_key

ROWS, INNER, ANY = LAYOUTS = ("rows", "inner-rows", "any-layout")
"""Layouts of all tensors that an operator reads: row-major; with a last dim whose elements follow one another; any."""

SCANNED = ("aten", "prims")
"""The namespaces whose operators must be on the list."""

UNKNOWN = {
    *("quantized", "_quantized", "quantization", "quantized_decomposed", "onednn", "mkldnn", "mkldnn_prepacked", "mkl"),
    *("sparse", "static_runtime", "inductor", "inductor_prims", "rngprims", "debugprims", "streams", "profiler"),
    *("_native", "fsdp", "_dtensor", "export", "onnx", "flex_lib", "prim", "debug_mode_ops", "_test"),
}
"""Torch's other namespaces: no scan tried their operators. A user's operators are trusted to follow their schemas."""

FILE = Path(__file__).with_name("admitted.txt")


@functools.cache
def names() -> Mapping[str, str]:
    """Their names, `aten.add.Tensor`, and the layouts of tensors, of LAYOUTS, with which each is admitted."""
    rows = (line.split() for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return {f"{packet}.{overload}": layout for layout, packet, *own in rows for overload in own}


def write(found: Mapping[str, str]) -> None:
    """Write the list: a row an operator and layout, with overloads."""
    rows: dict[str, list[str]] = {}
    for name, layout in sorted(found.items(), key=lambda item: (LAYOUTS.index(item[1]), item[0])):
        packet, _, overload = name.rpartition(".")
        rows.setdefault(f"{layout} {packet}", []).append(overload)
    lines = [" ".join([row, *overloads]) for row, overloads in rows.items()]
    FILE.write_text("\n".join(["# Written by tests/benchmarks/scan_operators.py --write.", *lines, ""]))
    names.cache_clear()


def layout_of(given: Mapping[str, Any]) -> str:
    """The first of LAYOUTS that all tensors among a call's arguments have. Sizes that depend on data are understood in
    the first dim alone. An `input_dtype` that no tensor has makes a backward call as unusual as any layout."""
    tensors = [*_tensors(given)]
    if given.get("input_dtype", None) not in {None, *(x.dtype for x in tensors)}:
        return ANY
    found = {_layout_of(x) for x in tensors}
    return next(layout for layout in reversed(LAYOUTS) if layout in found | {ROWS})


def _layout_of(x: Tensor) -> str:
    shape, strides = tuple(x.shape), tuple(x.stride())
    if not all(isinstance(n, int) for n in (*shape[1:], *strides)):
        return ANY
    if any(isinstance(n, int) and n == 0 for n in shape):
        return ROWS
    inner = row_major((1, *shape[1:])) if shape else ()
    dims = [*zip(shape, strides, inner, strict=True)]
    if all(s == t for n, s, t in dims if not isinstance(n, int) or n != 1):
        return ROWS
    return INNER if all(s == 1 for n, s, _ in dims[-1:] if not isinstance(n, int) or n != 1) else ANY


def why_not(target: Any, given: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """Why a proof takes no call of an operator with these arguments, on fake values, in words; None where it does."""
    if not isinstance(target, OpOverload):
        return None
    name, namespace = str(target), target.namespace
    if namespace in UNKNOWN:
        return f"{name} is not understood: whether it does what its schema says, nobody has tried"
    is_known = name in known.DRAWS | known.REFUSED or name.split(".")[1] in known.UNINITIALIZED
    if namespace not in SCANNED or is_known:
        return None
    if _is_drawn_dropout(name, given) or _is_norm_in_training(name, given) or _is_update(name, given):
        return None
    if reads_elsewhere(name, given):
        return f"{name} reads each channel's statistics, and whatever lies there where they have none"
    allowed = names().get(name)
    if allowed is not None:
        layout = layout_of(given)
        if LAYOUTS.index(layout) <= LAYOUTS.index(allowed):
            return None
        return f"{name} was seen to do what its schema and fake values say with tensors in {allowed} alone"
    return f"{name} is not among the operators that were seen to do what their schemas and fake values say, and no more"


def _is_drawn_dropout(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call is a dropout that draws its mask: only without a draw, or without elements, was it seen to do
    other than its fake. What it draws, it draws of the generator's state, as any random call does."""
    if name != "aten.native_dropout.default" or given.get("train") is not True:
        return False
    p, shape = given["p"], given["input"].shape
    return type(p) is float and 0 < p < 1 and all(isinstance(n, int) and n > 0 for n in shape)


def _is_norm_in_training(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call is a batch norm that counts its batch: it writes both statistics, and in rows it was seen to do
    nothing else that its schema and its fake do not say. Statistics must lie apart from all that it reads, and all have
    an element a channel: beyond the end of others it reads whatever is there."""
    if name not in {*known.BATCH_NORMS, *known.BATCH_NORMS.values()} or given.get("training") is not True:
        return False
    counted = {storage_key(x) for x in _tensors([given.get(x) for x in known.STATISTICS])}
    others = {storage_key(x) for name, value in given.items() if name not in known.STATISTICS for x in _tensors(value)}
    are_apart = len(counted) == len(known.STATISTICS) and not counted & others
    sizes = {tuple(x.shape) for x in _tensors([given.get(x) for x in (*known.STATISTICS, "weight", "bias")])}
    fits = sizes == {tuple(given["input"].shape[1:2])} and 0 not in given["input"].shape
    return are_apart and fits and layout_of(given) == ROWS and type(given.get("momentum")) is float


def reads_elsewhere(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call is a batch norm's backward that lacks statistics which it reads, as it does without looking: the
    process ends, or the call reads beyond their end."""
    if name != "aten.native_batch_norm_backward.default" or not given:
        return False
    read = ("save_mean", "save_invstd") if given["train"] else known.STATISTICS
    sizes = {tuple(x.shape) for x in _tensors([given.get(x) for x in (*read, "weight")])}
    return any(given.get(x) is None for x in read) or sizes != {tuple(given["input"].shape[1:2])}


def _is_update(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call is an optimizer's kernel that goes through lists of as many tensors, of one dtype and size at each
    place, all in rows on the CPU. It writes parameters and their state, which lie apart from all else, and nothing
    more, as it scales no gradients. It walks memory, so that other strides would pair other elements."""
    if name not in known.FUSED or not all(given.get(x) is None for x in ("grad_scale", "found_inf")):
        return False
    lists = {key: x for key, x in given.items() if isinstance(x, list | tuple) and x}
    if not all(isinstance(x, Tensor) and x.device.type == "cpu" for items in lists.values() for x in items):
        return False
    if len({len(items) for items in lists.values()}) != 1 or layout_of(given) != ROWS:
        return False
    steps = lists.pop("state_steps")
    one_kind = all(len({(x.dtype, tuple(x.shape)) for x in own}) == 1 for own in zip(*lists.values(), strict=True))
    updated = [storage_key(x) for key, items in lists.items() if key != "grads" for x in items]
    others = {storage_key(x) for x in (*lists["grads"], *steps)}
    return one_kind and len({*updated}) == len(updated) and not others.intersection(updated)


def untold(target: Any, given: Mapping[str, Any], results: Any) -> str | None:
    """What a call does to memory that its operator's schema does not say, in words. `given` are its arguments by name,
    on fake values."""
    if not isinstance(target, OpOverload):
        return None
    says = {x.name for x in schema_of(target).arguments if x.alias_info is not None}
    memory = {name: {storage_key(x) for x in _tensors(value)} for name, value in given.items()}
    told = set().union(*(memory.get(name, set()) for name in says))
    hidden = set().union(*memory.values()) - told
    if str(target) not in known.SHARES_UNTOLD and any(storage_key(x) in hidden for x in _tensors(results)):
        return f"{target} hands back memory that it was given, and does not say so"
    written = set().union(*(memory.get(name, set()) for name in written_names(target)))
    others = set().union(*(memory[name] for name in given if name not in written_names(target)))
    if written & others and str(target) not in {*known.IN_PLACE, known.COPY_INTO}:
        return f"{target} writes memory that it reads by another argument, too"
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)

"""The operators that a proof admits, each with the tensor layouts and dtypes for which it is admitted.

A scan (`tests/benchmarks/scan_operators.py`) called each listed operator. The real results agreed with the schema and
the fake results of the operator.

Many operators have a fake result of a wrong dtype if their tensors have several dtypes. So separate lists name the
operators that are admitted for such tensors, and `mixes_as_tried` checks each call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.graph.operators import written_names
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.graphs.size_checks import sizes_misfit
from bitproof.harness.powers.proofs.prover.windows import row_major
from bitproof.harness.torch_compat import OpOverload, tree_leaves
from bitproof.harness.torch_operators import schema_of, storage_key

ROWS, INNER, ANY, LOOSE = LAYOUTS = ("rows", "inner-rows", "any-layout", "any-strides")
"""Layouts of tensor arguments, from strict to loose.

- `rows`: row-major.
- `inner-rows`: contiguous in the last dim.
- `any-layout`: any strides, except the next case.
- `any-strides`: also tensors in which the stride of a dim of size 1 decides whether torch regards them as
  channels-last. No element depends on this stride, but a convolution chooses its layout by it, and many fakes have
  another stride there.
"""

SCANNED = ("aten", "prims")
"""Namespaces whose operators are only admitted if they are listed."""

UNKNOWN = {
    *("quantized", "_quantized", "quantization", "quantized_decomposed", "onednn", "mkldnn", "mkldnn_prepacked", "mkl"),
    *("sparse", "static_runtime", "inductor", "inductor_prims", "rngprims", "debugprims", "streams", "profiler"),
    *("_native", "fsdp", "_dtensor", "export", "onnx", "flex_lib", "prim", "debug_mode_ops", "_test"),
}
"""Other namespaces of torch. No scan covers them, so their operators are refused.

Operators of any further namespace are a user's own, and are trusted to follow their schemas.
"""

ALIKE = ""
FLOATS, KINDS = MIXTURES = ("floats", "kinds")
"""Mixtures of dtypes among a call's tensors.

- ALIKE: all tensors have the same dtype.
- `floats`: several floating-point dtypes, such as float32 and bfloat16.
- `kinds`: several of floating-point, integer, complex and bool, such as float32 and int64.
"""

NUMBERS = ((bool, torch.SymBool), (int, torch.SymInt), (float, torch.SymFloat), (complex,))
"""Kinds of Python numbers, in torch's order of promotion."""

CHOOSING = (torch.int64, torch.int32, torch.bool)
"""The dtypes of indices, offsets and masks."""

FILES = {
    mixture: Path(__file__).with_name(name)
    for mixture, name in ((ALIKE, "admitted.txt"), (FLOATS, "mixed_floats.txt"), (KINDS, "mixed_kinds.txt"))
}


@functools.cache
def names(mixture: str = ALIKE) -> Mapping[str, str]:
    """Return the admitted operators, each with the loosest layout admitted for it: {"aten.add.Tensor": "any-layout"}.

    With a `mixture`, return the operators whose tensors may have this mixture of dtypes.
    """
    rows = (line.split() for line in FILES[mixture].read_text().splitlines() if line and not line.startswith("#"))
    return {f"{packet}.{overload}": layout for layout, packet, *own in rows for overload in own}


def mixtures_of(name: str, given: Mapping[str, Any]) -> list[str]:
    """Return the mixtures of dtypes among a call's tensors: [], or one or both of MIXTURES.

    For example, float32 with bfloat16 is FLOATS, float32 with int64 is KINDS, and all three together have both
    mixtures. `given` has the call's arguments by name.
    """
    dtypes = _dtypes_of(name, given)
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    # For KINDS, all real dtypes together count as one.
    sizes = {FLOATS: len(floats), KINDS: len(dtypes - floats) + bool(floats)}
    return [mixture for mixture in MIXTURES if sizes[mixture] > 1]


def mixes_as_tried(target: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a call with tensors of several dtypes is like the calls that the scan tried.

    True for every in-place call. Any other call must meet these conditions (`given` has its arguments by name):

    - Its tensors have two dtypes.
    - The tensors are all row-major, or all have the same shape and strides. Operators of MIXES_FLOATS_IN_ANY_LAYOUT may
      have any layouts.
    - Scalar tensors do not occur together with other tensors, except in operators of TAKES_NUMBERS_AS_TENSORS.
    """
    name, tensors = str(target), [*_tensors(given)]
    # An in-place call returns its argument, whose dtype and layout are known.
    if written_names(target):
        return True
    if len(_dtypes_of(name, given)) > 2:
        return False
    # torch promotes tensors without dims differently from others.
    if name not in known.TAKES_NUMBERS_AS_TENSORS and len({x.dim() == 0 for x in tensors}) > 1:
        return False
    # With other layouts, kernels order the result's dims by the strides of the original operands, but some fakes by
    # those of the operands after the cast.
    lies = {(tuple(map(str, x.shape)), tuple(map(str, x.stride()))) for x in tensors}
    return name in known.MIXES_FLOATS_IN_ANY_LAYOUT or len(lies) == 1 or layout_of(given) == ROWS


def _dtypes_of(name: str, given: Mapping[str, Any]) -> set[torch.dtype]:
    # Indices, offsets and masks do not affect the result's dtype.
    chosen = known.CHOOSES.get(name, ())
    held = [(key, x) for key, value in given.items() for x in _tensors(value)]
    return {x.dtype for key, x in held if not (key in chosen and x.dtype in CHOOSING)}


def write(found: Mapping[str, str], mixture: str = ALIKE) -> None:
    rows: dict[str, list[str]] = {}
    for name, layout in sorted(found.items(), key=lambda item: (LAYOUTS.index(item[1]), item[0])):
        packet, _, overload = name.rpartition(".")
        # A line has a layout, an operator and its overloads: `any-layout aten.add Tensor Scalar`.
        rows.setdefault(f"{layout} {packet}", []).append(overload)
    lines = [" ".join([row, *overloads]) for row, overloads in rows.items()]
    text = f" --mixture {mixture}" if mixture else ""
    FILES[mixture].write_text(
        "\n".join([f"# Written by tests/benchmarks/scan_operators.py{text} --write.", *lines, ""])
    )
    names.cache_clear()


def layout_of(given: Mapping[str, Any]) -> str:
    """Return the strictest of LAYOUTS that covers all tensor arguments of a call.

    The result is `any-layout` or a looser layout in two cases:

    - a tensor's stride, or a size other than the first, depends on data;
    - the argument `input_dtype` names a dtype that none of the tensors has.
    """
    tensors = [*_tensors(given)]
    if given.get("input_dtype", None) not in {None, *(x.dtype for x in tensors)}:
        return ANY
    # A call without tensors counts as row-major.
    found = {_layout_of(x) for x in tensors}
    return next(layout for layout in reversed(LAYOUTS) if layout in found | {ROWS})


def _layout_of(x: Tensor) -> str:
    shape, strides = tuple(x.shape), tuple(x.stride())
    if not all(isinstance(n, int) for n in (*shape[1:], *strides)):
        return ANY
    # Without elements, strides have no effect.
    if any(isinstance(n, int) and n == 0 for n in shape):
        return ROWS
    inner = row_major((1, *shape[1:])) if shape else ()
    dims = [*zip(shape, strides, inner, strict=True)]
    # Would other strides in dims of size 1 change whether torch regards the tensor as channels-last?
    if is_channels_last(shape, strides) != is_channels_last(
        shape, [t if isinstance(n, int) and n == 1 else s for n, s, t in dims]
    ):
        return LOOSE
    if all(s == t for n, s, t in dims if not isinstance(n, int) or n != 1):
        return ROWS
    return INNER if all(s == 1 for n, s, _ in dims[-1:] if not isinstance(n, int) or n != 1) else ANY


def is_channels_last(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Return whether torch regards a tensor as channels-last: dim 1 is the innermost in memory.

    See c10/core/MemoryFormat.h. Data-dependent sizes count as more than 1.
    """
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    # From the innermost dim in memory to the outermost: channels, the spatial dims from the last on, the batch.
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * (shape[dim] if isinstance(shape[dim], int) else 2)
    return True


def why_not(target: Any, given: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """Return why a proof does not admit a call of operator `target`; None if it does.

    `given` has the call's arguments by name, with fake tensors.
    """
    if not isinstance(target, OpOverload):
        return None
    name, namespace = str(target), target.namespace
    # The cheap checks by name come first, then those of the call's tensors.
    if namespace in UNKNOWN:
        return f"{name} is not understood: it has not been tested against its schema"
    is_known = name in known.DRAWS | known.REFUSED or name.split(".")[1] in known.UNINITIALIZED
    if namespace not in SCANNED or is_known:
        return None
    if _is_drawn_dropout(name, given) or _is_norm_in_training(name, given) or _is_update(name, given):
        return None
    if sizes_misfit(name, given):
        why = "it reads beyond its tensors, or its result has other strides or another shape than its fake"
        return f"{name} does not check the shapes that it reads, and these do not fit: {why}"
    allowed = names().get(name)
    if allowed is None:
        return f"{name} is not among the operators seen to do what their schemas and fake values say, and no more"
    # For such a call, some fakes have another dtype than torch's results.
    if name not in known.TAKES_ANY_NUMBER and _depends_on_number(target, given):
        return (
            f"{name} with a number of another kind than its tensors of {_dtypes_text(name, given)} "
            "is not among those tried"
        )
    mixtures = mixtures_of(name, given)
    if not all(name in names(mixture) for mixture in mixtures):
        return (
            f"{name} with tensors of {_dtypes_text(name, given)} "
            "is not among the calls of several dtypes that were tried"
        )
    if mixtures and not mixes_as_tried(target, given):
        return (
            f"{name} with tensors of {_dtypes_text(name, given)} is not among the calls of several dtypes "
            "that were tried: "
            "two dtypes, all tensors in rows or all alike, none without dims beside others"
        )
    mixed = [names(mixture)[name] for mixture in mixtures]
    if written_names(target):  # an in-place result keeps its layout
        mixed = [LOOSE if layout == ANY else layout for layout in mixed]
    # The strictest layout of all lists that the operator must be on.
    allowed = min((allowed, *mixed), key=LAYOUTS.index)
    if LAYOUTS.index(layout_of(given)) <= LAYOUTS.index(allowed):
        return None
    odd = ", where dims of one element have strides as in rows" if layout_of(given) == LOOSE else ""
    return f"{name} was seen to do what its schema and fake values say with tensors in {allowed} alone{odd}"


def _depends_on_number(target: OpOverload, given: Mapping[str, Any]) -> bool:
    """Return whether the dtype of a call's result depends on a Python number among its operands, as for `ints + 0.5`.

    False for in-place calls, which keep the dtype of their tensor.
    """
    if written_names(target):
        return False
    values = [x for key in _operands(target) for x in tree_leaves(given.get(key))]
    numbers = {kind for x in values for kind, types in enumerate(NUMBERS) if type(x) in types}
    tensors = {_kind_of(x.dtype) for x in _tensors(given)}
    return bool(numbers and tensors) and (max(numbers) > max(tensors) or max(tensors) == 0)


def _kind_of(dtype: torch.dtype) -> int:
    # the index in NUMBERS
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype != torch.bool)


@functools.cache
def _operands(target: OpOverload) -> tuple[str, ...]:
    return tuple(x.name for x in schema_of(target).arguments if "number" in str(x.type) or "Tensor" in str(x.type))


def _dtypes_text(name: str, given: Mapping[str, Any]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _dtypes_of(name, given)))


def _is_drawn_dropout(name: str, given: Mapping[str, Any]) -> bool:
    if name != "aten.native_dropout.default" or given.get("train") is not True:
        return False
    # In the scan, dropout differed from its fake only when it drew no mask, or for an input without elements. A drawn
    # mask follows from the generator's state, as for any random call.
    p, shape = given["p"], given["input"].shape
    return type(p) is float and 0 < p < 1 and all(isinstance(n, int) and n > 0 for n in shape)


def _is_norm_in_training(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether a call is a batch norm in training that is admitted although it writes its running statistics.

    - Its tensors must be row-major and have the same dtype.
    - The running statistics must share no memory with other arguments, and have an element per channel.
    """
    if name not in {*known.BATCH_NORMS, *known.BATCH_NORMS.values()} or given.get("training") is not True:
        return False
    counted = {storage_key(x) for x in _tensors([given.get(x) for x in known.STATISTICS])}
    others = {storage_key(x) for name, value in given.items() if name not in known.STATISTICS for x in _tensors(value)}
    are_apart = len(counted) == len(known.STATISTICS) and not counted & others
    # The kernel reads past the end of shorter statistics.
    sizes = {tuple(x.shape) for x in _tensors([given.get(x) for x in (*known.STATISTICS, "weight", "bias")])}
    fits = sizes == {tuple(given["input"].shape[1:2])} and 0 not in given["input"].shape
    # Other fakes are wrong. For a 16-bit input with float32 parameters, the fake's statistics are 16-bit. The
    # functional form returns float32 statistics even if all its tensors are 16-bit.
    dtypes = {x.dtype for x in _tensors(given)}
    has_tried_dtypes = len(dtypes) == 1 and (name in known.BATCH_NORMS or dtypes <= {torch.float32, torch.float64})
    # For row-major tensors, the scan found no other hidden effect.
    return has_tried_dtypes and are_apart and fits and layout_of(given) == ROWS and type(given.get("momentum")) is float


def _is_update(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether a call is an optimizer's kernel, such as `_fused_adamw_`, in an admitted form.

    - Its lists must be equally long and have row-major CPU tensors.
    - At each index, all tensors except the step count must have the same dtype and size.
    - It must not scale gradients.
    - The written tensors must share no memory with each other or with other arguments.
    """
    # If it does not scale gradients, the kernel writes only parameters and their state.
    if name not in known.FUSED or not all(given.get(x) is None for x in ("grad_scale", "found_inf")):
        return False
    lists = {key: x for key, x in given.items() if isinstance(x, list | tuple) and x}
    if not all(isinstance(x, Tensor) and x.device.type == "cpu" for items in lists.values() for x in items):
        return False
    # The kernel pairs elements by their position in memory, so with other strides it would pair other elements.
    if len({len(items) for items in lists.values()}) != 1 or layout_of(given) != ROWS:
        return False
    # A step count is a scalar, so it has neither the size nor, maybe, the dtype of its parameter.
    steps = lists.pop("state_steps")
    one_kind = all(len({(x.dtype, tuple(x.shape)) for x in own}) == 1 for own in zip(*lists.values(), strict=True))
    updated = [storage_key(x) for key, items in lists.items() if key != "grads" for x in items]
    others = {storage_key(x) for x in (*lists["grads"], *steps)}
    return one_kind and len({*updated}) == len(updated) and not others.intersection(updated)


def unstated_effect(target: Any, given: Mapping[str, Any], results: Any) -> str | None:
    """Return an effect of a call on memory that its schema does not state, in words; None if there is none.

    `given` has the call's arguments by name, and `results` has its results. All tensors are fake.
    """
    if not isinstance(target, OpOverload):
        return None
    says = {x.name for x in schema_of(target).arguments if x.alias_info is not None}
    memory = {name: {storage_key(x) for x in _tensors(value)} for name, value in given.items()}
    stated = set().union(*(memory.get(name, set()) for name in says))
    # The arguments that no result may share memory with, by the schema.
    hidden = set().union(*memory.values()) - stated
    if str(target) not in known.SHARES_UNSTATED and any(storage_key(x) in hidden for x in _tensors(results)):
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

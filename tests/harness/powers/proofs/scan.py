"""One operator's calls, run on real values and on fake ones: does it do what its schema says, as its fake says?

A call is tried with its tensors laid out in several ways and its flags and optional arguments changed. What a proof
rests on is held against what happened: dtypes, shapes, strides and offsets of results; whose memory they lie in; what
was written; whether random numbers were drawn; and whether the result follows from the arguments' values alone, so that
neither memory that nobody wrote nor two arguments that are one tensor change it.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bitproof.harness.graph.operators import written_names
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.powers.proofs.prover.graphs.admitted import (
    ALIKE,
    LAYOUTS,
    LOOSE,
    ROWS,
    layout_of,
    mixes_as_tried,
    mixtures_of,
)
from bitproof.harness.powers.proofs.prover.graphs.size_checks import sizes_misfit
from bitproof.harness.torch_compat import OpOverload
from tests.harness.powers.proofs.scan_layouts import difference, fake_lay_of, lay_of
from tests.harness.powers.proofs.scan_variants import (
    Arguments,
    Mixes,
    by_name,
    mixed_variants,
    replaced,
    tensors_of,
    variants,
)

GARBAGE = (0x11, 0xEE)
"""What freed memory is filled with before either of two runs."""

GUARD = 1 << 14
"""Bytes of garbage on either side of what a call reads: what reads them gives another result for other garbage."""

_M_PERTURB = -6
"""glibc's option by which memory is filled when it is freed and when it is handed out."""


SEEDED = torch.Generator().manual_seed(0).get_state()


@dataclass
class Scanned:
    """What a scan saw of one operator: calls tried, those that ran, each kind of misbehaviour with its first call."""

    tried: int = 0
    ran: int = 0
    fakes_fail: int = 0
    layouts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, dict[str, str]] = field(default_factory=dict)
    in_layout: dict[str, int] = field(default_factory=dict)
    crashed: bool = False

    def add(self, fault: str, layout: str, call: str) -> None:
        """Note a misbehaviour, by the layout of what the call reads. Its first call says enough."""
        self.faults.setdefault(fault, {}).setdefault(layout, call)

    def honest_in(self, least: int) -> str | None:
        """The widest layouts in which nothing was wrong, with `least` calls or more; None for none."""
        ran, found = 0, None
        wrong = {layout for calls in self.faults.values() for layout in calls}
        for layout in LAYOUTS:
            if self.crashed or layout in wrong:
                break
            ran += self.in_layout.get(layout, 0)
            if ran >= least and self.in_layout.get(layout, 0) >= {ROWS: 0, LOOSE: 2 * least}.get(layout, 1):
                found = layout
        return found


# -- calls --------------------------------------------------------------------------------------------


def copied(x: Tensor) -> Tensor:
    """The tensor with the same layout, in memory of its own that holds the same bytes."""
    own = torch.empty(0, dtype=x.dtype)
    memory = x.untyped_storage().clone()
    return own.set_(memory, x.storage_offset(), x.size(), x.stride())


def guarded(args: Arguments, garbage: int) -> Arguments:
    """The same within memory that is full of garbage on both sides: what reads beyond it reads that. Tensors that
    share memory do so still."""
    own: dict[int, torch.UntypedStorage] = {}

    def within(x: Tensor) -> Tensor:
        held = x.untyped_storage()
        if held._cdata not in own:
            size = held.nbytes()
            outer = torch.full((GUARD + -(-size // 64) * 64 + GUARD,), garbage, dtype=torch.uint8)
            own[held._cdata] = torch.from_numpy(outer.numpy()[GUARD : GUARD + size]).untyped_storage()
            own[held._cdata].copy_(held)
        return torch.empty(0, dtype=x.dtype).set_(own[held._cdata], x.storage_offset(), x.size(), x.stride())

    return replaced(args, within)


def described(op: OpOverload, args: Arguments) -> str:
    """A call in words, for whoever wants to make it again."""

    def description(x: Any) -> Any:
        if isinstance(x, Tensor):
            layout = f"{list(x.stride())}" + (f"+{x.storage_offset()}" if x.storage_offset() else "")
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}@{layout}"
        if isinstance(x, (list, tuple)):
            return "[" + ", ".join(map(str, map(description, x))) + "]"
        return x

    parts = [*(str(description(x)) for x in args[0]), *(f"{name}={description(x)}" for name, x in args[1].items())]
    return f"{op}({', '.join(parts)})"


# -- one call -----------------------------------------------------------------------------------------


def scan(
    op: OpOverload,
    calls: Sequence[Arguments],
    *,
    at_most: int,
    chance: random.Random,
    mixture: str = ALIKE,
    layouts: int = 0,
) -> Scanned:
    """Try variants of an operator's calls, in turns, until `at_most` ran or four times as many were tried. Those that
    mix dtypes are tried if a proof takes such, and the operator is listed for it; with `mixture`, those alone, listed
    or not. Of `layouts` more it is only compared how results and fake ones lie."""
    seen = Scanned()
    mixes = Mixes(op, mixture, chance) if mixture else None
    turns = [mixed_variants(op, call, chance, mixes) if mixes else variants(op, call, chance) for call in calls]
    ends = at_most + layouts
    with torch.no_grad():
        while turns and seen.ran < ends and seen.tried < 4 * ends and (seen.ran or seen.tried < 4 * at_most):
            for turn in turns:
                if seen.ran >= ends:
                    break
                seen.tried += 1
                try:
                    layout, args = next(turn)
                except Exception:  # a layout that a tensor cannot have
                    continue
                if not is_to_be_tried(op, by_name(op, args), mixture):
                    continue
                if try_call(op, args, seen, is_whole=seen.ran < at_most):
                    seen.layouts[layout] = seen.layouts.get(layout, 0) + 1
    return seen


def is_to_be_tried(op: OpOverload, given: Mapping[str, Any], mixture: str) -> bool:
    """Whether a scan tries a call: one that mixes dtypes only if it does so as a proof takes it."""
    mixed = mixtures_of(str(op), given)
    fits = mixture in mixed if mixture else all(str(op) in admitted.names(each) for each in mixed)
    return fits and (not mixed or mixes_as_tried(op, given))


def try_call(op: OpOverload, args: Arguments, seen: Scanned, *, is_whole: bool = True) -> bool:
    """Run a call, and note what it does besides what a proof believes; unless `is_whole`, only how its results lie.
    Returns whether it ran on real values."""
    if any(x.layout != torch.strided or x.is_conj() or x.is_neg() or x.is_quantized for x in tensors_of(args)):
        return False
    if sizes_misfit(str(op), by_name(op, args)) or any(x.numel() > 100_000 for x in tensors_of(args)):
        return False
    call = described(op, args)
    try:
        first = _run(op, args, GARBAGE[0], [])
    except Exception:
        return False
    if not all(_is_plain(x) for x in first.results):
        return False  # a proof refuses results that are not plain memory
    seen.ran += 1
    layout = layout_of(by_name(op, args))
    seen.in_layout[layout] = seen.in_layout.get(layout, 0) + 1
    for fault in first.faults:
        seen.add(fault, layout, call)
    # The sizes are only known after the first run: memory that it did not fill may hold the other garbage already.
    if is_whole and not all(_same(first, _run(op, args, garbage, first.sizes)) for garbage in GARBAGE):
        seen.add("it does not give one result of the same arguments", layout, call)
    if is_whole and not first.written and len({id(x) for x in tensors_of(args)}) > 1 and _depends_on_identity(op, args):
        seen.add("its bits depend on whether two arguments are one tensor", layout, call)
    shares = len({x.untyped_storage()._cdata for x in tensors_of(args)}) < len(tensors_of(args))
    if shares and not first.written and not _gives(op, replaced(args, copied), first):
        seen.add("its bits depend on whether two arguments share memory", layout, call)
    if is_whole and _is_of_values(op, args) and not _gives(op, replaced(args, lambda x: x.contiguous()), first):
        seen.add("its bits depend on how its arguments lie", layout, call)
    try:
        fake = fake_lay_of(op, args)
    except Exception:
        seen.fakes_fail += 1
        return True
    if fault := difference(op, first.lay, fake):
        seen.add(fault, layout, call)
    return True


@dataclass
class _Outcome:
    results: list[Any]
    held: list[Tensor]
    lay: list[Any]
    written: tuple[str, ...]
    faults: list[str]

    @property
    def sizes(self) -> list[int]:
        return [x.untyped_storage().nbytes() for x in self.results if isinstance(x, Tensor)]


def _is_plain(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return all(map(_is_plain, x))
    return not isinstance(x, Tensor) or (
        x.layout == torch.strided and not x.is_conj() and not x.is_neg() and not x.is_quantized
    )


def _run(op: OpOverload, args: Arguments, garbage: int, sizes: Sequence[int]) -> _Outcome:
    own = guarded(args, garbage)
    before = [(copied(x), _layout(x)) for x in tensors_of(own)]
    names, declared = _names(op, own), written_names(op)
    torch.set_rng_state(SEEDED)
    with _polluted(garbage, sizes):
        given = op(*own[0], **own[1])
    results = pytree.tree_leaves(given)
    faults = []
    if not torch.equal(SEEDED, torch.get_rng_state()) and not draws(op, args):
        faults.append("it draws random numbers and is not tagged so")
    memory = {x.untyped_storage()._cdata for x, name in zip(tensors_of(own), names, strict=True) if name in declared}
    for x, (old, layout), name in zip(tensors_of(own), before, names, strict=True):
        if _layout(x)[:4] != layout[:4] or x.untyped_storage().data_ptr() != layout[4]:
            faults.append(f"it changes the layout of {name}")
        elif x.untyped_storage()._cdata not in memory and not _same_bytes(x, old):
            faults.append(f"it writes {name}, which its schema does not say")
    return _Outcome(results, tensors_of(own), lay_of(results, tensors_of(own)), tuple(declared), faults)


def draws(op: OpOverload, args: Arguments) -> bool:
    """Whether a proof takes a call for a random one."""
    tagged = torch.Tag.nondeterministic_seeded in op.tags and by_name(op, args).get("dropout_p") != 0.0
    return tagged or str(op) in known.DRAWS


def _names(op: OpOverload, args: Arguments) -> list[str]:
    """The argument that each tensor stands in, in the order of `tensors_of`."""
    names = [argument.name for argument in op._schema.arguments]
    held = [*zip(names, args[0], strict=False), *args[1].items()]
    return [name for name, value in held for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().data_ptr()


@contextlib.contextmanager
def _polluted(garbage: int, sizes: Sequence[int]) -> Iterator[None]:
    """Leave freed memory of these sizes, and of others, full of garbage. glibc fills fresh memory, too, if asked."""
    perturb = getattr(ctypes.CDLL(None), "mallopt", lambda option, pattern: None)
    perturb(_M_PERTURB, garbage)
    # In deterministic mode torch itself fills fresh memory, with NaN.
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        for size in {*sizes, 16, 64, 128, 256, 512, 1024, 4096}:
            junk = [torch.full((max(size, 1),), garbage, dtype=torch.uint8) for _ in range(4)]
            del junk
        yield
    finally:
        perturb(_M_PERTURB, 0)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)


def _same_bytes(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(_bytes(x), _bytes(y))


def _same_values(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (x == y or x != x)
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if _same_bytes(x, y):
        return True
    return (x.is_floating_point() or x.is_complex()) and bool(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all())


def _same(one: _Outcome, other: _Outcome) -> bool:
    pairs = [*zip(one.results, other.results, strict=True), *zip(one.held, other.held, strict=True)]
    return all(_same_values(x, y) for x, y in pairs)


def _gives(op: OpOverload, args: Arguments, expected: _Outcome) -> bool:
    found = _run(op, args, GARBAGE[0], []).results
    return all(_same_values(x, y) for x, y in zip(found, expected.results, strict=True))


def _is_of_values(op: OpOverload, args: Arguments) -> bool:
    """Whether a proof takes a call's results for a function of its tensors' values, however they lie."""
    own = [str(x.dtype).removeprefix("torch.") for x in tensors_of(args)]
    name = known.EXACT.get(str(op))
    is_plain = by_name(op, args).keys() <= {"condition", "self", "other"}
    return str(op) in known.CARRIES or (name is not None and is_plain and known.is_exact(name, own[-1], own))


def _depends_on_identity(op: OpOverload, args: Arguments) -> bool:
    """Whether two arguments of one layout, made one tensor, give other bits than made two with the same values."""
    flat, tree = pytree.tree_flatten(args)
    places: dict[Any, list[int]] = {}
    for place, x in enumerate(flat):
        if isinstance(x, Tensor) and x.numel():
            places.setdefault(_layout(x)[:4], []).append(place)
    for alike in (found for found in places.values() if len(found) > 1):
        one, two = list(flat), list(flat)
        for place in alike:
            one[place] = flat[alike[0]]
            two[place] = copied(flat[alike[0]])
        try:
            outcomes = [_run(op, pytree.tree_unflatten(x, tree), GARBAGE[0], []) for x in (one, two)]
        except Exception:
            continue
        if not all(_same_values(x, y) for x, y in zip(outcomes[0].results, outcomes[1].results, strict=True)):
            return True
    return False

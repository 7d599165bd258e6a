"""One operator's calls, run on real values and on fake ones: does it do what its schema says, as its fake says?

A call is tried with its tensors laid out in several ways and its flags and optional arguments changed. What a proof
rests on is held against what happened: dtypes, shapes, strides and offsets of results; whose memory they lie in; what
was written; whether random numbers were drawn; and whether the result follows from the arguments' values alone, so that
neither memory that nobody wrote nor two arguments that are one tensor change it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from bitproof.harness.graph.operators import written_names
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.prove import known_operators as known
from bitproof.harness.prove.graphs import admitted
from bitproof.harness.prove.graphs.admitted import ALIKE, FLOATS, LAYOUTS, ROWS, layout_of, mixtures_of
from bitproof.harness.prove.graphs.fitting import misfits
from bitproof.harness.torch_compat import FakeTensorMode, OpOverload

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

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
            if ran >= least and (layout == ROWS or self.in_layout.get(layout)):
                found = layout
        return found


# -- calls --------------------------------------------------------------------------------------------


def tensors_of(args: Arguments) -> list[Tensor]:
    """The tensors among the arguments, in order, each as often as it stands there."""
    return [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]


def replaced(args: Arguments, change: Callable[[Tensor], Any]) -> Arguments:
    """The arguments with each tensor changed; one that stands twice is changed once."""
    known_: dict[int, Any] = {}
    return pytree.tree_map_only(Tensor, lambda x: known_.setdefault(id(x), change(x)), args)


def copied(x: Tensor) -> Tensor:
    """The tensor with the same layout, in memory of its own that holds the same bytes."""
    own = torch.empty(0, dtype=x.dtype)
    memory = x.untyped_storage().clone()
    return own.set_(memory, x.storage_offset(), x.size(), x.stride())


def guarded(x: Tensor, garbage: int) -> Tensor:
    """The same within memory that is full of garbage on both sides: what reads beyond it reads that."""
    held = x.untyped_storage()
    size = held.nbytes()
    outer = torch.full((GUARD + -(-size // 64) * 64 + GUARD,), garbage, dtype=torch.uint8)
    inner = torch.from_numpy(outer.numpy()[GUARD : GUARD + size]).untyped_storage()
    inner.copy_(held)
    return torch.empty(0, dtype=x.dtype).set_(inner, x.storage_offset(), x.size(), x.stride())


def described(op: OpOverload, args: Arguments) -> str:
    """A call in words, for whoever wants to make it again."""

    def told(x: Any) -> Any:
        if isinstance(x, Tensor):
            layout = f"{list(x.stride())}" + (f"+{x.storage_offset()}" if x.storage_offset() else "")
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}@{layout}"
        if isinstance(x, (list, tuple)):
            return "[" + ", ".join(map(str, map(told, x))) + "]"
        return x

    parts = [*(str(told(x)) for x in args[0]), *(f"{name}={told(x)}" for name, x in args[1].items())]
    return f"{op}({', '.join(parts)})"


# -- variants -----------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    return x.contiguous()


def _columns(x: Tensor) -> Tensor:
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def _sliced(x: Tensor) -> Tensor:
    """Every other element of something larger, not from its beginning."""
    larger = torch.zeros([n * 2 + 2 for n in x.shape], dtype=x.dtype)
    part = larger[tuple(slice(1, 1 + 2 * n, 2) for n in x.shape)]
    return part.copy_(x)


def _offset(x: Tensor) -> Tensor:
    memory = torch.zeros(x.numel() + 3, dtype=x.dtype)
    return memory[3:].view(x.shape).copy_(x)


def _expanded(x: Tensor) -> Tensor:
    """Its first row, over and over, in the memory of one."""
    return x[:1].expand(x.shape) if x.dim() and x.shape[0] else x


def _channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else _swapped(x)


def _swapped(x: Tensor) -> Tensor:
    """The last two dims change places in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def _padded(x: Tensor) -> Tensor:
    """Rows of something wider, not from its beginning."""
    if not x.dim():
        return x
    wider = torch.zeros([*x.shape[:-1], x.shape[-1] + 3], dtype=x.dtype)
    return wider[..., 2 : 2 + x.shape[-1]].copy_(x)


def _outer_swapped(x: Tensor) -> Tensor:
    """All dims but the last in another order in memory."""
    if x.dim() < 3:
        return x
    order = [*range(x.dim() - 2, -1, -1), x.dim() - 1]
    return x.permute(order).contiguous().permute(order)


WAYS = {
    "rows": _rows,
    "padded": _padded,
    "outer_swapped": _outer_swapped,
    "columns": _columns,
    "sliced": _sliced,
    "offset": _offset,
    "expanded": _expanded,
    "channels_last": _channels_last,
    "swapped": _swapped,
}

DTYPES = (torch.float64, torch.bfloat16, torch.float16)


def variants(op: OpOverload, base: Arguments, chance: random.Random) -> Iterator[tuple[str, Arguments]]:
    """The call as it is, then with all tensors in one layout, or at random: dtypes, flags, what is left out."""
    if chance.random() < 0.5:
        yield "as it is", base
    plain = replaced(base, lambda x: x.detach())
    lays, alike = list(WAYS.values()), list(WAYS.items())
    chance.shuffle(alike)
    while True:
        if alike and chance.random() < 0.5:
            name, lay = alike.pop()
            yield name, replaced(plain, lay)
            continue
        mixed = replaced(plain, lambda x: chance.choice(lays)(x))
        if chance.random() < 0.15:
            mixed = _misfit(mixed, chance)
        if chance.random() < 0.3:
            dtype = chance.choice(DTYPES)
            share = chance.choice([1.0, 1.0, 0.5])  # of the operands: all, or each by chance
            is_other = lambda x: x.is_floating_point() and chance.random() < share  # noqa: E731
            mixed = replaced(mixed, lambda x: x.to(dtype) if is_other(x) else x)
        yield "mixed", _with_flags(op, mixed, chance)


def _misfit(args: Arguments, chance: random.Random) -> Arguments:
    """The call with one tensor larger, smaller or of other dims, as its operator may not expect."""
    flat, tree = pytree.tree_flatten(args)
    places = [place for place, x in enumerate(flat) if isinstance(x, Tensor) and x.numel() and x.dim()]
    if len(places) < 2:
        return args
    place = chance.choice(places)
    x = flat[place]
    half = [max(1, n // 2) for n in x.shape]
    changes = (
        lambda: torch.cat([x, x], chance.choice([0, -1])),
        lambda: x[: half[0]].contiguous(),
        lambda: x[..., : half[-1]].contiguous(),
        lambda: x.flatten().clone(),
        lambda: x.flatten()[0].clone(),
        lambda: x.unsqueeze(0).contiguous(),
    )
    flat[place] = chance.choice(changes)()
    return pytree.tree_unflatten(flat, tree)


NUMBERS = (torch.float32, *DTYPES)
KINDS_TRIED = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


def _in_rows_or_otherwise(chance: random.Random) -> Callable[[Tensor], Tensor]:
    return lambda x: (_rows if chance.random() < 0.5 else chance.choice([*WAYS.values()]))(x)


def mixed_variants(
    op: OpOverload, base: Arguments, chance: random.Random, mixture: str
) -> Iterator[tuple[str, Arguments]]:
    """The call in other layouts with one tensor of another dtype than it had, each in turn, or with several; and with
    its own dtypes, where it mixes them so."""
    plain = replaced(base, lambda x: x.detach())
    dtypes = NUMBERS if mixture == FLOATS else KINDS_TRIED
    places = list(range(len(tensors_of(plain))))
    is_mixed = mixture in mixtures_of(_by_name(op, plain))
    turn = chance.choices(places, k=len(places)) if len(places) > 8 else places
    for round_ in itertools.count() if len(places) > 1 else ():
        for place in turn:
            if is_mixed and chance.random() < 0.5:
                yield "as it is", _with_flags(op, replaced(plain, _in_rows_or_otherwise(chance)), chance)
            first, other = chance.sample(dtypes, 2) if mixture == FLOATS else (None, chance.choice(dtypes))
            chosen = {place} if round_ % 3 < 2 else {place for place in places if chance.random() < 0.5}
            number = itertools.count()

            def change(x: Tensor, first=first, other=other, chosen=chosen, number=number) -> Tensor:
                is_chosen = next(number) in chosen
                if mixture == FLOATS and not x.is_floating_point():
                    return x
                x = x.to(other) if is_chosen else x if first is None else x.to(first)
                return _in_rows_or_otherwise(chance)(x)

            yield "mixed", _with_flags(op, pytree.tree_map_only(Tensor, change, plain), chance)


def _with_flags(op: OpOverload, args: Arguments, chance: random.Random) -> Arguments:
    given = _by_name(op, args)
    for argument in op._schema.arguments:
        name, kind = argument.name, str(argument.type)
        value = given.get(name, argument.default_value)
        if isinstance(value, bool) and chance.random() < 0.4:
            given[name] = chance.random() < 0.5
        elif kind.startswith("Optional[Tensor") and isinstance(value, Tensor) and chance.random() < 0.15:
            given[name] = None
        elif isinstance(value, float) and chance.random() < 0.3:
            given[name] = chance.choice([0.0, 1.0, 0.5])
    return (), given


def _by_name(op: OpOverload, args: Arguments) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args[0], strict=False)) | args[1]


# -- one call -----------------------------------------------------------------------------------------


def scan(
    op: OpOverload, calls: Sequence[Arguments], *, at_most: int, chance: random.Random, mixture: str = ALIKE
) -> Scanned:
    """Try variants of an operator's calls, in turns, until `at_most` ran or four times as many were tried. Those that
    mix dtypes are tried if the operator is listed for it; with `mixture`, those alone, listed or not."""
    seen = Scanned()
    turns = [mixed_variants(op, call, chance, mixture) if mixture else variants(op, call, chance) for call in calls]
    with torch.no_grad():
        while turns and seen.ran < at_most and seen.tried < 4 * at_most:
            for turn in turns:
                if seen.ran >= at_most:
                    break
                seen.tried += 1
                try:
                    layout, args = next(turn)
                except Exception:  # a layout that a tensor cannot have
                    continue
                mixed = mixtures_of(_by_name(op, args))
                if mixture not in mixed if mixture else not all(str(op) in admitted.names(each) for each in mixed):
                    continue
                if try_call(op, args, seen):
                    seen.layouts[layout] = seen.layouts.get(layout, 0) + 1
    return seen


def try_call(op: OpOverload, args: Arguments, seen: Scanned) -> bool:
    """Run a call, and note what it does besides what a proof believes. Returns whether it ran on real values."""
    if any(x.layout != torch.strided or x.is_conj() or x.is_neg() or x.is_quantized for x in tensors_of(args)):
        return False
    if misfits(str(op), _by_name(op, args)) or any(x.numel() > 100_000 for x in tensors_of(args)):
        return False
    call = described(op, args)
    try:
        first = _run(op, args, GARBAGE[0], [])
    except Exception:
        return False
    if not all(_is_plain(x) for x in first.results):
        return False  # a proof refuses results that are not plain memory
    seen.ran += 1
    layout = layout_of(_by_name(op, args))
    seen.in_layout[layout] = seen.in_layout.get(layout, 0) + 1
    for fault in first.faults:
        seen.add(fault, layout, call)
    second = _run(op, args, GARBAGE[1], first.sizes)
    if not _same(first, second):
        seen.add("it does not give one result of the same arguments", layout, call)
    if not first.written and len({id(x) for x in tensors_of(args)}) > 1 and _depends_on_identity(op, args):
        seen.add("its bits depend on whether two arguments are one tensor", layout, call)
    try:
        fake = _lay_of(*_fake(op, args))
    except Exception:
        seen.fakes_fail += 1
        return True
    if fault := _difference(op, first.lay, fake):
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


def _leaves(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _is_plain(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return all(map(_is_plain, x))
    return not isinstance(x, Tensor) or (
        x.layout == torch.strided and not x.is_conj() and not x.is_neg() and not x.is_quantized
    )


def _run(op: OpOverload, args: Arguments, garbage: int, sizes: Sequence[int]) -> _Outcome:
    own = replaced(args, lambda x: guarded(x, garbage))
    before = [(copied(x), _layout(x)) for x in tensors_of(own)]
    names, declared = _names(op, own), written_names(op)
    torch.set_rng_state(SEEDED)
    with _polluted(garbage, sizes):
        given = op(*own[0], **own[1])
    results = [x for x in pytree.tree_leaves(_leaves(given))]
    faults = []
    if not torch.equal(SEEDED, torch.get_rng_state()) and not draws(op, args):
        faults.append("it draws random numbers and is not tagged so")
    memory = {x.untyped_storage()._cdata for x, name in zip(tensors_of(own), names, strict=True) if name in declared}
    for x, (old, layout), name in zip(tensors_of(own), before, names, strict=True):
        if _layout(x)[:4] != layout[:4] or x.untyped_storage().data_ptr() != layout[4]:
            faults.append(f"it changes the layout of {name}")
        elif x.untyped_storage()._cdata not in memory and not _same_bytes(x, old):
            faults.append(f"it writes {name}, which its schema does not say")
    return _Outcome(results, tensors_of(own), _lay_of(results, tensors_of(own)), tuple(declared), faults)


def draws(op: OpOverload, args: Arguments) -> bool:
    """Whether a proof takes a call for a random one."""
    tagged = torch.Tag.nondeterministic_seeded in op.tags and _by_name(op, args).get("dropout_p") != 0.0
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
    try:
        for size in {*sizes, 16, 64, 128, 256, 512, 1024, 4096}:
            junk = [torch.full((max(size, 1),), garbage, dtype=torch.uint8) for _ in range(4)]
            del junk
        yield
    finally:
        perturb(_M_PERTURB, 0)


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


# -- layouts, real and fake ---------------------------------------------------------------------------


def _lay_of(results: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
    """Each result's dtype, shape, strides, offset, and the first input or result that it shares memory with."""
    owners: dict[Any, str] = {}
    for number, x in enumerate(inputs):
        owners.setdefault(_memory(x), f"input {number}")
    found: list[Any] = []
    for number, x in enumerate(results):
        if isinstance(x, Tensor):
            owner = owners.setdefault(_memory(x), f"result {number}")
            found.append((x.dtype, tuple(x.shape), tuple(x.stride()), x.storage_offset(), owner))
        else:
            found.append(type(x).__name__.removeprefix("Sym").lower())
    return found


def _memory(x: Tensor) -> Any:
    storage = x.untyped_storage()
    return storage._cdata if x.device.type == "meta" or _is_fake(x) or not storage.nbytes() else storage.data_ptr()


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


@functools.cache
def _mode() -> FakeTensorMode:
    return step_fake_mode(ShapeEnv(), remembers=False)


def _fake(op: OpOverload, args: Arguments) -> tuple[list[Any], list[Tensor]]:
    mode = _mode()
    memories: dict[int, Tensor] = {}
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols():

        def fake(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in memories:
                memories[key] = torch.empty(storage.nbytes() // x.element_size(), dtype=x.dtype)
            return memories[key].as_strided(x.shape, x.stride(), x.storage_offset())

        own = replaced(args, fake)
        given = op(*own[0], **own[1])
        return list(pytree.tree_leaves(_leaves(given))), tensors_of(own)


def _difference(op: OpOverload, real: Sequence[Any], fake: Sequence[Any]) -> str | None:
    """How real results lie otherwise than fake ones; None where they do not, as far as sizes are numbers."""
    if len(real) != len(fake):
        return "it gives another number of results than its fake"
    for mine, other in zip(real, fake, strict=True):
        if not isinstance(mine, tuple) or not isinstance(other, tuple):
            if mine != other:
                return f"it gives a {mine if isinstance(mine, str) else 'tensor'} where its fake does not"
            continue
        if mine[0] != other[0]:
            return "its dtype is another than its fake's"
        if not all(isinstance(n, int) for n in (*other[1], *other[2], other[3])):
            continue
        if mine[1] != other[1]:
            return "its shape is another than its fake's"
        if 0 in mine[1]:
            continue  # no element lies anywhere
        if any(n > 1 and s != t for n, s, t in zip(mine[1], mine[2], other[2], strict=True)):
            return "its strides are others than its fake's"
        if (mine[3:] != other[3:]) and str(op) not in known.SHARES_UNTOLD:
            return "it shares memory otherwise than its fake" if mine[4] != other[4] else "its offset is another"
    return None

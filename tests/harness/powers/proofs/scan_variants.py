"""Variants of an operator's call: its tensors laid out in several ways, of other dtypes, its flags changed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bitproof.harness.graph.operators import written_names
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.graphs.admitted import FLOATS, mixtures_of
from bitproof.harness.torch_compat import OpOverload

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Lay = Callable[[Tensor], Tensor]


def tensors_of(args: Arguments) -> list[Tensor]:
    """The tensors among the arguments, in order, each as often as it stands there."""
    return [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]


def replaced(args: Arguments, change: Callable[[Tensor], Any]) -> Arguments:
    """The arguments with each tensor changed; one that stands twice is changed once."""
    known_: dict[int, Any] = {}
    return pytree.tree_map_only(Tensor, lambda x: known_.setdefault(id(x), change(x)), args)


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

LOOSE_CALLS = 60
"""Calls whose dims of one element have odd strides."""

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


REAL = (torch.float32, *DTYPES)
OTHER = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


def pairs_of_dtypes(mixture: str) -> list[tuple[torch.dtype, torch.dtype]]:
    """Every ordered pair of dtypes that mix so."""
    found = itertools.permutations(REAL if mixture == FLOATS else (*REAL, *OTHER), 2)
    return [pair for pair in found if mixture == FLOATS or not {*pair} <= {*REAL}]


def every_mix(op: OpOverload, base: Arguments, mixture: str, chance: random.Random) -> Iterator[Arguments]:
    """The call with its tensors in every pair of layouts, or, with a mixture, in rows and of every pair of dtypes, in
    every way to share the two out among up to four tensors, among more for each tensor alone."""
    plain = replaced(base, lambda x: x.detach().contiguous())
    places = range(len(tensors_of(plain)))
    sizes = range(1, len(places) if len(places) <= 4 else 2)
    parts = [part for size in sizes for part in itertools.combinations(places, size)]
    if not mixture:
        yield from _that_share_memory(plain, chance)
        yield from (_with_flags(op, args, chance) for args in _loosened(plain, chance))
    for mix in _dtypes_shared_out(parts, places, mixture) if mixture else _layouts_shared_out(parts, places, chance):
        try:
            args = mix.apply(plain)
        except Exception:  # a dtype that its values cannot have, or a layout that a tensor cannot have
            continue
        yield _with_flags(op, args, chance)


def _loosened(plain: Arguments, chance: random.Random) -> Iterator[Arguments]:
    """The call with some dims of one element, of any stride, for all its tensors or for each by chance."""
    most = max((x.dim() for x in tensors_of(plain)), default=0)
    for _ in range(LOOSE_CALLS if most else 0):
        dims = chance.sample(range(most), chance.randint(1, most))
        share, lays = chance.choice([1.0, 1.0, 0.5]), chance.choices([*WAYS.values()], k=2)

        def loose(x: Tensor, dims: Sequence[int] = dims, share: float = share, lays: Sequence[Lay] = lays) -> Tensor:
            if chance.random() < share:
                for dim in dims:
                    x = x.narrow(dim, 0, 1) if dim < x.dim() and x.numel() else x
            x = chance.choice(lays)(x)
            odd = (1, 0, 7, x.numel())
            strides = [
                chance.choice(odd) if n == 1 and chance.random() < 0.6 else s
                for n, s in zip(x.shape, x.stride(), strict=True)
            ]
            return x.as_strided(x.shape, strides)

        yield replaced(plain, loose)


def _that_share_memory(plain: Arguments, chance: random.Random) -> Iterator[Arguments]:
    """The call with one tensor that shows elements of another, the first ones, the last ones or those of columns."""
    flat, tree = pytree.tree_flatten(plain)
    places = [at for at, x in enumerate(flat) if isinstance(x, Tensor) and x.numel() > 1]
    for at, of in itertools.permutations(chance.sample(places, min(len(places), 4)), 2):
        x, y = flat[of].flatten(), flat[at]
        if x.dtype == y.dtype and x.numel() >= y.numel():
            for shown in (x[: y.numel()], x[x.numel() - y.numel() :]):
                for lay in (shown.view(y.shape), shown.view(y.shape[::-1]).permute([*range(y.dim())][::-1])):
                    yield pytree.tree_unflatten([*flat[:at], lay, *flat[at + 1 :]], tree)


def _dtypes_shared_out(parts: Sequence[Sequence[int]], places: Sequence[int], mixture: str) -> Iterator[_Mix]:
    """Every pair of dtypes; and one dtype for some, while the others keep theirs."""
    pairs = pairs_of_dtypes(mixture)
    for part, (first, other) in itertools.product(parts, [*pairs, *((None, x) for x in {other for _, other in pairs})]):
        dtypes = {at: other if at in part else first for at in places if at in part or first}
        yield _Mix(dtypes, dict.fromkeys(places, _rows), {})


def _layouts_shared_out(parts: Sequence[Sequence[int]], places: Sequence[int], chance: random.Random) -> Iterator[_Mix]:
    """Every pair of layouts; some with one tensor cut, so that it is broadcast, or with all cut to nothing; and of more
    than two tensors, some with each in a layout of its own."""
    parts = chance.sample(parts, 4) if len(places) > 4 else parts
    found = [(part, pair) for part in parts for pair in itertools.permutations(WAYS.values(), 2)]
    found += [((), (lay, lay)) for lay in WAYS.values()]
    cut = chance.sample(found, len(found) // 3)
    for number, (part, (one, rest)) in enumerate([*found, *cut]):
        cuts = _cuts(places, chance) if places and number >= len(found) else {}
        yield _Mix({}, {at: one if at in part else rest for at in places}, cuts)
    for _ in range(len(WAYS) ** 2 if len(places) > 2 else 0):
        yield _Mix({}, {at: chance.choice([*WAYS.values()]) for at in places}, {})


def _cuts(places: Sequence[int], chance: random.Random) -> dict[int, Lay]:
    cut = chance.choice([*FEWER, _nothing])
    return dict.fromkeys(places, cut) if cut is _nothing else {chance.choice(places): cut}


def _nothing(x: Tensor) -> Tensor:
    return x[:0] if x.dim() else x


class Mixes:
    """What an operator's calls of several dtypes mix, each in turn, in an order of chance: every ordered pair of
    dtypes, and every layout of all tensors, or every pair of layouts where a proof asks for none."""

    def __init__(self, op: OpOverload, mixture: str, chance: random.Random) -> None:
        found = pairs_of_dtypes(mixture)
        chance.shuffle(found)
        is_free = written_names(op) or str(op) in known.MIXES_FLOATS_IN_ANY_LAYOUT or str(op) in known.CHOOSES
        self.mixture = mixture
        self.dtypes = itertools.cycle(found)
        self.lays = pairs_of_layouts(chance) if is_free else _alike(chance)


@dataclass(frozen=True)
class _Mix:
    """How one call's tensors change, by place: their dtypes, layouts, and which is cut."""

    dtypes: dict[int, torch.dtype]
    lays: dict[int, Lay]
    cuts: dict[int, Lay]

    def apply(self, args: Arguments) -> Arguments:
        """The call with its tensors changed; raises where one cannot lie so."""
        number = itertools.count()

        def change(x: Tensor) -> Tensor:
            at = next(number)
            x = x.to(self.dtypes.get(at, x.dtype))
            x = self.cuts[at](x) if at in self.cuts and x.numel() else x
            return self.lays[at](x)

        return pytree.tree_map_only(Tensor, change, args)


def mixed_variants(
    op: OpOverload, base: Arguments, chance: random.Random, mixes: Mixes
) -> Iterator[tuple[str, Arguments]]:
    """The call with one tensor of another dtype than the others, each in turn, or with several; and with its own
    dtypes, where it mixes them so. That tensor lies as the first of two layouts says, the others as the second; among
    rows one is a number now and then, or is broadcast."""
    plain = replaced(base, lambda x: x.detach())
    tensors = tensors_of(plain)
    places = range(len(tensors))
    usual = max((x.dtype for x in tensors), key=[x.dtype for x in tensors].count, default=None)
    is_mixed = mixes.mixture in mixtures_of(str(op), by_name(op, plain))
    for round_ in itertools.count() if len(places) > 1 else ():
        for place in chance.sample(places, min(len(places), 8)):
            first, other = next(mixes.dtypes)
            chosen = {place} if round_ % 3 < 2 else {at for at in places if chance.random() < 0.5}
            dtypes = {at: other if at in chosen else first for at in places if tensors[at].dtype == usual}
            if mixes.mixture != FLOATS and round_ % 2:  # the others keep theirs: an index has to be one
                dtypes = {place: other}
            keeps = is_mixed and chance.random() < 0.2
            one, rest = next(mixes.lays)
            cuts = (
                {chance.choice(places): chance.choice(FEWER)} if one is rest is _rows and chance.random() < 0.4 else {}
            )
            mix = _Mix({} if keeps else dtypes, {at: one if at == place else rest for at in places}, cuts)
            try:
                args = mix.apply(plain)
            except Exception:  # a layout that a tensor cannot have
                continue
            yield "as it is" if keeps else "mixed", _with_flags(op, args, chance)


FEWER = (
    lambda x: x.flatten()[0].clone(),
    lambda x: x[:1].contiguous() if x.dim() else x,
    lambda x: x[..., :1].contiguous() if x.dim() else x,
    lambda x: x[0].contiguous() if x.dim() else x,
)
"""Parts of a tensor that are broadcast where an operator broadcasts."""


def pairs_of_layouts(chance: random.Random) -> Iterator[tuple[Lay, Lay]]:
    """Every pair of layouts, in an order of chance, over and over; every third is of rows."""
    found = list(itertools.product(WAYS.values(), repeat=2))
    while True:
        chance.shuffle(found)
        for number, pair in enumerate(found):
            if number % 3 == 0:
                yield _rows, _rows
            yield pair


def _alike(chance: random.Random) -> Iterator[tuple[Lay, Lay]]:
    """Every layout for all tensors, in an order of chance, over and over; every other is of rows."""
    found = [*WAYS.values()]
    while True:
        chance.shuffle(found)
        for lay in found:
            yield _rows, _rows
            yield lay, lay


def _with_flags(op: OpOverload, args: Arguments, chance: random.Random) -> Arguments:
    given = by_name(op, args)
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


def by_name(op: OpOverload, args: Arguments) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args[0], strict=False)) | args[1]

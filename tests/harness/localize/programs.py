"""Random programs on several ranks, with one wrong call whose place is known, as logs of calls. Loads no torch.

A tensor is a few tokens over a storage; an operator makes new tokens of those that it reads, so every value is exact:
a bucket that is taken apart again has the parts that were put in, and sums do not depend on the order of ranks.
`generate` makes one program twice: as the reference runs it, and as the candidate does, whose calls are reordered,
renamed, split, joined, bucketed and repeated, and of which one gives a wrong value.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.records import Role

Site = tuple[int, int]
"""A rank, and a call's index in its log."""

ELEMENTWISE = ("neg", "exp", "silu", "tanh")
PAIRWISE = ("add", "mul", "sub", "div")
COMMUTATIVE = ("add", "mul")
MASK = (1 << 61) - 1


def mixed(*parts: int) -> int:
    """One token of several."""
    return hash(parts) & MASK


def number_of(name: str) -> int:
    """A number for an operator's name, the same in each process."""
    return int.from_bytes(name.encode(), "big")


@dataclass(frozen=True)
class Op:
    """One operator call of a program. `reads` and `gives` are variables; what is written in place is both.

    `sizes` are the elements of each output; `group` has the ranks of each group of a collective, and `only` the one
    rank that makes a call, where it is not made by all. `gives_as` is the operator whose value a call gives by another
    way.
    """

    name: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    place: CallSite
    sizes: tuple[int, ...] = ()
    kind: str = "mix"
    scalar: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    only: int | None = None
    gives_as: str = ""
    node: str | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class Shown:
    """A record: a variable that is shown once `after` operators of the program have run."""

    name: str
    variable: int


@dataclass
class Program:
    """Calls in order, the variables that a step is given, with their sizes, and what is shown."""

    ranks: int
    ops: list[Op]
    input_producers: dict[int, tuple[int, bool]]
    shown: list[Shown]


class Tensor(NamedTuple):
    """A variable on a rank: which elements of which storage it shows, and in which shape."""

    storage: int
    elements: tuple[int, ...]
    shape: int
    made_by: Site | None


@dataclass
class Trace:
    """What running a program left: logs, what is shown, and by call what it depends on."""

    calls: list[list[Call]]
    shown: dict[tuple[str, int], str] = field(default_factory=dict)
    shown_by: dict[tuple[str, int], tuple[Site, ...]] = field(default_factory=dict)
    depends: dict[Site, tuple[Site, ...]] = field(default_factory=dict)
    sites: dict[tuple[int, int], Site] = field(default_factory=dict)
    """The site of an operator of the program on a rank."""

    def upstream(self, key: tuple[str, int]) -> set[Site]:
        """Every call that a path of values leads from to what is shown."""
        return self.before(self.shown_by[key])

    def before(self, sites: Iterable[Site]) -> set[Site]:
        """These calls, and every call that a path of values leads from to one of them."""
        pending, seen = list(sites), set[Site]()
        while pending:
            site = pending.pop()
            if site not in seen:
                seen.add(site)
                pending += self.depends[site]
        return seen


class Wrong(NamedTuple):
    """Which operator of a program is wrong, on which ranks, and what it reads there, where that is what is wrong.

    One that is `left_out` gives what it reads, and no log has it.
    """

    op: int
    ranks: tuple[int, ...]
    reads: tuple[int, ...] | None = None
    left_out: bool = False


Known = dict[str, tuple[int, list[int]]]
"""The shape and the tokens of each value by its digest."""


class Machine:
    """Runs a program on all ranks in step. `known` gets every value."""

    def __init__(self, program: Program, wrong: Wrong | None = None, known: Known | None = None) -> None:
        self.program, self.wrong = program, wrong
        self.known: Known = {} if known is None else known
        ranks = range(program.ranks)
        self.trace = Trace([[] for _ in ranks])
        self.stores: list[dict[int, list[int]]] = [{} for _ in ranks]
        self.writers: list[dict[int, list[Site]]] = [{} for _ in ranks]
        self.tensors: list[dict[int, Tensor]] = [{} for _ in ranks]
        self.over: list[dict[int, list[int]]] = [{} for _ in ranks]
        self.left: list[dict[tuple[int, str], int]] = [{} for _ in ranks]
        self.fresh = 0
        for variable, (size, is_own) in program.input_producers.items():
            for rank in ranks:
                tokens = [mixed(variable, i, rank if is_own else -1) for i in range(size)]
                self.make(rank, variable, tokens, size, None)

    def run(self) -> Trace:
        for number, op in enumerate(self.program.ops):
            ranks = range(self.program.ranks) if op.only is None else (op.only,)
            if op.groups:
                for group in op.groups:
                    self.collective(number, op, group)
                for rank in set(ranks).difference(*op.groups):  # one that takes no part keeps what it has
                    self.bind(rank, op.gives[0], self.tensors[rank][op.reads[0]])
            else:
                for rank in ranks:
                    self.call(number, op, rank)
        for shown in self.program.shown:
            for rank in range(self.program.ranks):
                key, tensor = (shown.name, rank), self.tensors[rank][shown.variable]
                self.trace.shown[key] = self.digest(rank, tensor)
                self.trace.shown_by[key] = self.origins_of(rank, tensor)
        return self.trace

    def make(self, rank: int, variable: int, tokens: list[int], shape: int, by: Site | None) -> None:
        self.fresh += 1
        self.stores[rank][self.fresh] = tokens
        self.writers[rank][self.fresh] = [] if by is None else [by]
        self.bind(rank, variable, Tensor(self.fresh, tuple(range(len(tokens))), shape, by))

    def bind(self, rank: int, variable: int, tensor: Tensor) -> None:
        self.tensors[rank][variable] = tensor
        self.over[rank].setdefault(tensor.storage, []).append(variable)

    def tokens(self, rank: int, tensor: Tensor) -> list[int]:
        store = self.stores[rank][tensor.storage]
        return [store[i] for i in tensor.elements]

    def digest(self, rank: int, tensor: Tensor) -> str:
        tokens = self.tokens(rank, tensor)
        digest = f"{mixed(tensor.shape, *tokens):x}"
        self.known.setdefault(digest, (tensor.shape, tokens))
        return digest

    def origins_of(self, rank: int, tensor: Tensor) -> tuple[Site, ...]:
        made = () if tensor.made_by is None else (tensor.made_by,)
        return (*made, *self.writers[rank][tensor.storage])

    def call(self, number: int, op: Op, rank: int) -> None:
        if self.wrong is not None and self.wrong.left_out and self.is_wrong(number, rank):
            self.bind(rank, op.gives[0], self.tensors[rank][op.reads[0]])
            return
        read = self.read_by(number, op, rank)
        tokens = [self.tokens(rank, tensor) for tensor in read]
        self.log(number, op, rank, read, [result_of(op, tokens)] if op.kind not in VIEWS else None)

    def is_wrong(self, number: int, rank: int) -> bool:
        return self.wrong is not None and self.wrong.op == number and rank in self.wrong.ranks

    def read_by(self, number: int, op: Op, rank: int) -> list[Tensor]:
        other = self.wrong.reads if self.wrong is not None and self.is_wrong(number, rank) else None
        return [self.tensors[rank][variable] for variable in other or op.reads]

    def collective(self, number: int, op: Op, group: tuple[int, ...]) -> None:
        read = {rank: self.read_by(number, op, rank) for rank in group}
        tokens = {rank: self.tokens(rank, read[rank][0]) for rank in group}
        sites = [(rank, len(self.trace.calls[rank])) for rank in group]
        depends = tuple({site for rank in group for x in read[rank] for site in self.origins_of(rank, x)})
        for turn, rank in enumerate(group):
            result = exchanged(op, [tokens[peer] for peer in group], turn)
            if op.kind == "send" and turn == 0:
                self.log(number, replace(op, gives=(), sizes=()), rank, read[rank], [[]])
                self.bind(rank, op.gives[0], self.tensors[rank][op.reads[0]])  # whatever it has sent
            else:
                self.log(number, replace(op, name="recv_") if op.kind == "send" else op, rank, read[rank], [result])
        for site in sites:
            self.trace.depends[site] = (*depends, *sites)

    def log(self, number: int, op: Op, rank: int, read: Sequence[Tensor], results: list[list[int]] | None) -> None:
        site = (rank, len(self.trace.calls[rank]))
        inputs = tuple(self.digest(rank, tensor) for tensor in read)
        keys = zip((tensor.storage for tensor in read), inputs, strict=True)
        producers = tuple(self.left[rank].get(key) for key in keys)
        self.trace.depends[site] = tuple({origin for tensor in read for origin in self.origins_of(rank, tensor)})
        self.trace.sites[number, rank] = site
        is_wrong = self.wrong is not None and self.wrong.reads is None and self.is_wrong(number, rank)
        aliases: list[tuple[int, str]] = []
        if results is None:
            outputs = self.view(op, rank, read[0], site)
            if is_wrong:
                for variable in op.gives:  # a view that shows other elements
                    tensor = self.tensors[rank][variable]
                    self.tensors[rank][variable] = tensor._replace(elements=tensor.elements[::-1], shape=tensor.shape)
                outputs = [self.tensors[rank][variable] for variable in op.gives]
        elif op.kind == "in_place":
            target, [result] = read[0], results
            if is_wrong:
                result = [mixed(result[0], 666), *result[1:]]
            store = self.stores[rank][target.storage]
            for position, token in zip(target.elements, result, strict=True):
                store[position] = token
            self.writers[rank][target.storage].append(site)
            others = [v for v in self.over[rank][target.storage] if v != op.reads[0]]
            left = [(target.storage, self.digest(rank, self.tensors[rank][v])) for v in others]
            aliases = [each for each in left if each not in self.left[rank]]
            self.bind(rank, op.gives[0], target._replace(made_by=site))
            outputs = [target]
        else:
            [result] = results
            if is_wrong and result:
                result = [mixed(result[0], 666), *result[1:]]
            begin, outputs = 0, []
            for variable, size in zip(op.gives, op.sizes, strict=True):
                keeps_shape = op.kind == "copy" and op.name != "clone"  # as a product with one does
                self.make(rank, variable, result[begin : begin + size], read[0].shape if keeps_shape else size, site)
                outputs.append(self.tensors[rank][variable])
                begin += size
        values = tuple(self.digest(rank, tensor) for tensor in outputs)
        self.left[rank] |= dict.fromkeys(aliases, site[1])
        self.left[rank] |= {(x.storage, v): site[1] for x, v in zip(outputs, values, strict=True)}
        self.trace.calls[rank].append(
            Call(
                op.place,
                op.name,
                inputs,
                values,
                node=op.node,
                collective=bool(op.groups),
                aliases=tuple(value for _, value in aliases),
                view=op.kind in VIEWS,
                producers=producers,
                scalars=(("number", number),) if (number := HALVES.get(op.kind, str(op.scalar or ""))) else (),
                peers=next((group for group in op.groups if rank in group), ()),
                micro_batch=op.micro_batch,
                draws=op.kind == "drawn",
            )
        )

    def view(self, op: Op, rank: int, tensor: Tensor, site: Site) -> list[Tensor]:
        begin, found = op.scalar if op.kind == "slice" else 0, []
        for variable, size in zip(op.gives, op.sizes, strict=True):
            elements = tensor.elements[begin : begin + size]
            shape = size if op.kind != "view" else 1000 + size
            self.bind(rank, variable, Tensor(tensor.storage, elements, shape, site))
            found.append(self.tensors[rank][variable])
            begin += size
        return found


VIEWS = ("view", "slice", "split")
HALVES = {"first_half": "first", "second_half": "second"}
"""What tells a half from a call of its operator that is given the same: that gives another value."""


def result_of(op: Op, tokens: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that a call gives, of all outputs in a row."""
    code = number_of(op.name.removesuffix("_").removeprefix("my_"))
    if op.kind in ("elementwise", "in_place"):
        return [mixed(code, op.scalar, token) for token in tokens[0]]
    if op.kind == "first_half":
        return half_way(tokens[0])
    if op.kind == "second_half":  # of what the first gave, and what that read
        due = replace(op, name=op.gives_as, kind="elementwise" if len(tokens) == 2 else "pairwise", gives_as="")
        is_right = list(tokens[0]) == half_way(tokens[1])
        return result_of(due, tokens[1:]) if is_right else [mixed(code, *each) for each in zip(*tokens, strict=True)]
    if op.kind == "both":  # two elementwise calls in one
        first, second = (number_of(part) for part in op.name.split("+"))
        return [mixed(second, 0, mixed(first, 0, token)) for token in tokens[0]]
    if op.kind == "pairwise":
        pairs = zip(*tokens, strict=True)
        ordered = (sorted(pair) if op.name.removeprefix("my_") in COMMUTATIVE else pair for pair in pairs)
        return [mixed(code, op.scalar, *pair) for pair in ordered]
    if op.kind == "drawn":  # the values, then the generator's next state
        [state] = tokens[1]
        return [*(mixed(code, token, state) for token in tokens[0]), mixed(99, state)]
    if op.kind == "cat":
        return [token for each in tokens for token in each]
    if op.kind == "copy":
        return list(tokens[0])
    parts = [mixed(*each) for each in tokens]
    everything = mixed(code, op.scalar, *(sorted(parts) if op.kind == "norm" else parts))
    return [mixed(everything, i) for i in range(sum(op.sizes))]


def half_way(tokens: Sequence[int]) -> list[int]:
    """What the first of two calls gives that come to a value by another way than the reference: it has that nowhere."""
    return [mixed(token, 1) for token in tokens]


def exchanged(op: Op, tokens: Sequence[Sequence[int]], turn: int) -> list[int]:
    """What one rank of a group gets of a collective, by what each rank gave."""
    ranks, size = len(tokens), len(tokens[0])
    if op.kind == "all_reduce":
        return [mixed(7, *sorted(column)) for column in zip(*tokens, strict=True)]
    if op.kind == "all_gather":
        return [token for each in tokens for token in each]
    if op.kind in ("broadcast", "send"):
        return list(tokens[0])
    share = size // ranks
    if op.kind == "reduce":
        return [mixed(7, *sorted(column)) for column in zip(*tokens, strict=True)] if turn == 0 else list(tokens[turn])
    if op.kind == "scatter":
        return list(tokens[0][turn * share : (turn + 1) * share])
    if op.kind == "reduce_scatter":
        summed = [mixed(7, *sorted(column)) for column in zip(*tokens, strict=True)]
        return summed[turn * share : (turn + 1) * share]
    return [token for each in tokens for token in each[turn * share : (turn + 1) * share]]


KINDS = (
    "elementwise",
    "elementwise",
    "pairwise",
    "pairwise",
    "mix",
    "in_place",
    "halves",
    "view",
    "sum",
    "gather",
    "exchange",
)
"""What a program is made of, for seeds below `WIDE`: tests name some of those."""

WIDE = 1_000_000
ALL_KINDS = (*KINDS, "mix", "one's", "sent", "shown in part")
"""The same from there on."""

WIDEST = 3_000_000
WIDEST_KINDS = (*ALL_KINDS, "drawn", "drawn", "scattered", "one's sum")
"""The same from there on: also draws from a generator. There a bucket may hold what is scattered as it is summed, and
a candidate's calls may not say where they belong."""

WITH_DETOURS = 10_000_000
"""The same from there on: also multiplies by one, and comes to right values by other ways. There gradients may share a
bucket in the reference, too, of which the candidate's may be packed in another order, and be shown behind what scales
each by a norm of all, which does not know their order."""


class Writer:
    """Writes a random program: forward of some micro-batches and chunks, backward, and an update."""

    def __init__(self, rng: random.Random, kinds: Sequence[str], *, has_detours: bool = False) -> None:
        self.rng, self.kinds, self.has_detours = rng, kinds, has_detours
        self.ranks = rng.choice((2, 2, 3, 4))
        self.ops: list[Op] = []
        self.sizes: dict[int, int] = {}
        self.input_producers: dict[int, tuple[int, bool]] = {}
        self.shown: list[Shown] = []
        self.place = CallSite("layers.0", "forward")
        self.spent: set[int] = set()
        self.storage: dict[int, int] = {}
        self.micro_batch: int | None = None
        self.state: int | None = None
        self.count = 0

    def new(self, size: int, storage: int | None = None) -> int:
        self.count += 1
        self.sizes[self.count] = size
        self.storage[self.count] = self.count if storage is None else storage
        return self.count

    def give(self, size: int, *, is_own: bool) -> int:
        variable = self.new(size)
        self.input_producers[variable] = (size, is_own)
        return variable

    def add(self, name: str, reads: Sequence[int], sizes: Sequence[int], kind: str, **more: object) -> tuple[int, ...]:
        base = self.storage[reads[0]] if kind in (*VIEWS, "in_place") else None
        gives = tuple(self.new(size, base) for size in sizes)
        place = self.place._replace(module=f"layers.{self.rng.randrange(3)}")
        more |= {"micro_batch": self.micro_batch}
        self.ops.append(Op(name, tuple(reads), gives, place, tuple(sizes), kind, **more))  # type: ignore[arg-type]
        return gives

    def program(self) -> Program:
        rng = self.rng
        size = self.ranks * rng.choice((1, 2))
        weights = [self.give(size, is_own=rng.random() < 0.3) for _ in range(rng.randint(2, 4))]
        micro_batches, num_chunks = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
        gradients: list[int] | None = None
        for number in range(micro_batches):
            self.micro_batch = number + 1 if micro_batches > 1 else None
            x = self.give(size, is_own=True)
            self.place = CallSite("layers.0", "forward")
            pool = [x, *weights]
            for chunk in range(num_chunks):
                self.place = CallSite("layers.0", "forward", chunk if num_chunks > 1 else None)
                self.stretch(pool, rng.randint(2, 5))
            [loss] = self.add("mm", self.some(pool, 2), [size], "mix")
            self.show("loss", loss)
            self.place = CallSite("layers.0", "backward")
            pool += [loss, self.give(size, is_own=False)]
            self.stretch(pool, rng.randint(2, 5))
            mine = [self.add("mm_backward", [loss, *self.some(pool, 2), w], [size], "mix")[0] for w in weights]
            if gradients is None:
                gradients = mine
            else:
                gradients = [
                    self.add("add", [a, b], [size], "pairwise")[0] for a, b in zip(gradients, mine, strict=True)
                ]
        assert gradients is not None
        self.micro_batch = None
        is_bucketed = self.has_detours and rng.random() < 0.4
        gradients = self.bucket(gradients) if is_bucketed else [self.reduce(gradient) for gradient in gradients]
        shown_late = is_bucketed and rng.random() < 0.7
        for gradient in gradients if not shown_late else ():
            self.show("grad", gradient)
        self.place = CallSite("layers.0", "update")
        if shown_late or rng.random() < 0.3:  # clipping: one norm of all gradients
            [norm] = self.add("norm", gradients, [self.sizes[gradients[0]]], "norm" if self.has_detours else "mix")
            for by in [norm, *(self.give(size, is_own=False) for _ in range(rng.randrange(3) if shown_late else 0))]:
                gradients = [self.add("scale", [g, by], [self.sizes[g]], "mix")[0] for g in gradients]
        for gradient in gradients if shown_late else ():
            self.show("grad", gradient)
        for weight, gradient in zip(weights, gradients, strict=True):
            [update] = self.add("adamw", [weight, gradient], [size], "mix", scalar=rng.randint(1, 3))
            self.show("param", update)
        return Program(self.ranks, self.ops, self.input_producers, self.shown)

    def show(self, kind: str, variable: int) -> None:
        self.shown.append(Shown(f"{kind} {len(self.shown)}", variable))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        ways: list[tuple[tuple[int, ...], ...]] = [(tuple(range(self.ranks)),)]
        if self.ranks == 4:
            ways += [((0, 1), (2, 3)), ((0, 2), (1, 3))]
        return self.rng.choice(ways)

    def reduce(self, gradient: int) -> int:
        every = (tuple(range(self.ranks)),)
        if self.rng.random() < 0.5:
            [summed] = self.add(
                "reduce_scatter", [gradient], [self.sizes[gradient] // self.ranks], "reduce_scatter", groups=every
            )
        else:
            [summed] = self.add("all_reduce", [gradient], [self.sizes[gradient]], "all_reduce", groups=every)
        return summed

    def bucket(self, gradients: Sequence[int]) -> list[int]:
        """All of them summed over ranks at once, in one bucket."""
        sizes = [self.sizes[gradient] for gradient in gradients]
        packed = self.add("cat", gradients, [sum(sizes)], "cat")
        summed = self.add("all_reduce", packed, [sum(sizes)], "all_reduce", groups=(tuple(range(self.ranks)),))
        return list(self.add("split", summed, sizes, "split"))

    def some(self, pool: Sequence[int], number: int) -> list[int]:
        live = [variable for variable in pool if variable not in self.spent]
        recent = live[-4:]
        return [self.rng.choice(recent if self.rng.random() < 0.7 else live) for _ in range(number)]

    def stretch(self, pool: list[int], length: int) -> None:
        """Some calls, each of which reads what there is; what they give has the pool's size, or is joined to it."""
        rng = self.rng
        size = self.sizes[pool[0]]
        for _ in range(length):
            kind = rng.choice(self.kinds)
            [x] = self.some(pool, 1)
            if kind == "elementwise":
                pool += self.add(rng.choice(ELEMENTWISE), [x], [size], kind, scalar=rng.randrange(2))
            elif kind == "pairwise":
                pool += self.add(rng.choice(PAIRWISE), [x, *self.some(pool, 1)], [size], kind)
            elif kind == "mix":
                pool += self.add("mm", [x, *self.some(pool, 1)], [size], kind)
            elif kind == "view":
                [shown] = self.add("view", [x], [size], kind)
                pool += self.add(rng.choice(ELEMENTWISE), [shown], [size], "elementwise", scalar=rng.randrange(2))
            elif kind == "in_place" and x not in self.input_producers:
                [copied] = self.add("clone", [x], [size], "copy")
                views = self.add("slice", [copied], [size - 1], "slice", scalar=1) if rng.random() < 0.3 else ()
                pool += self.add("mul_", [copied], [size], "in_place", scalar=rng.randint(1, 2))
                if views:
                    [wide] = self.add("mm", [*views, pool[-1]], [size], "mix")
                    pool.append(wide)
                self.spent |= {copied}
            elif kind == "halves" and size > 1:
                parts = self.add("split", [x], [size // 2, size - size // 2], "split")
                made = [
                    self.add(rng.choice(ELEMENTWISE), [part], [self.sizes[part]], "elementwise")[0] for part in parts
                ]
                pool += self.add("cat", made, [size], "cat")
            elif kind == "sum":
                pool += self.add("all_reduce", [x], [size], "all_reduce", groups=self.groups())
            elif kind == "gather":
                groups = self.groups()
                [gathered] = self.add("all_gather", [x], [size * len(groups[0])], "all_gather", groups=groups)
                pool += self.add("mm", [gathered, x], [size], "mix")
            elif kind == "one's":
                pool += self.add("broadcast", [x], [size], "broadcast", groups=self.groups())
            elif kind == "drawn":
                state = self.give(1, is_own=True) if self.state is None else self.state
                drawn, self.state = self.add("bernoulli", [x, state], [size, 1], kind)
                pool.append(drawn)
            elif kind == "scattered":
                groups = self.groups()
                [part] = self.add("scatter", [x], [size // len(groups[0])], "scatter", groups=groups)
                pool += self.add("mm", [part, x], [size], "mix")
            elif kind == "one's sum":
                pool += self.add("reduce", [x], [size], "reduce", groups=self.groups())
            elif kind == "sent":
                sender, receiver = rng.sample(range(self.ranks), 2)
                pool += self.add("send", [x], [size], "send", groups=((sender, receiver),))
            elif kind == "shown in part" and size > 1:  # two that read overlapping views of one tensor
                first = self.add("slice", [x], [size - 1], "slice", scalar=1)
                second = self.add("slice", [x], [size - 1], "slice", scalar=0)
                pool += self.add("mm", [*second, *first], [size], "mix")
            elif kind == "exchange" and size % self.ranks == 0:
                every = (tuple(range(self.ranks)),)
                pool += self.add("all_to_all", [x], [size], "all_to_all", groups=every)


class Noise:
    """Rewrites a program into another one that gives the same values: what a candidate may do."""

    def __init__(
        self, rng: random.Random, program: Program, *, is_widest: bool = False, has_detours: bool = False
    ) -> None:
        self.rng, self.program, self.is_widest, self.has_detours = rng, program, is_widest, has_detours
        self.count = 1 + max((*program.input_producers, *(v for op in program.ops for v in op.gives)))
        self.sizes = {v: size for v, (size, _) in program.input_producers.items()}
        self.sizes |= {v: size for op in program.ops for v, size in zip(op.gives, op.sizes, strict=True)}

    def new(self) -> int:
        self.count += 1
        return self.count

    def rewritten(self) -> Program:
        ops = self.bucketed(list(self.program.ops)) if self.rng.random() < 0.4 else list(self.program.ops)
        ops = self.joined(ops) if self.rng.random() < 0.3 else ops
        ops = [new for op in ops for new in self.split(op)]
        ops = [new for op in ops for new in self.detour(op)] if self.has_detours else ops
        return replace(self.program, ops=self.shuffled(ops))

    def detour(self, op: Op) -> Iterable[Op]:
        """The same after a product with one, or by way of a value that the reference has nowhere."""
        way, names, between = self.rng.random(), (*PAIRWISE, *ELEMENTWISE, "square"), self.new()
        size = self.sizes.get(op.reads[0])
        if way < 0.1 and size is not None and op.kind not in (*VIEWS, "in_place", "send", "drawn"):
            yield Op(self.rng.choice(("mul", "div")), op.reads[:1], (between,), op.place, (size,), "copy")
            yield replace(op, reads=(between, *op.reads[1:]))
        elif way < 0.2 and op.kind in ("elementwise", "pairwise"):
            first, second = self.rng.choice(names), self.rng.choice(PAIRWISE)
            yield Op(first, op.reads[:1], (between,), op.place, op.sizes, "first_half")
            yield replace(op, name=second, reads=(between, *op.reads), kind="second_half", gives_as=op.name)
        else:
            yield op

    def split(self, op: Op) -> Iterable[Op]:
        """The same by other calls: a call in two, under another name, after a copy, with one that nobody reads."""
        way = self.rng.random()
        if op.kind == "elementwise" and way < 0.1:
            yield replace(op, name=f"my_{op.name}")
        elif op.kind in ("elementwise", "mix") and way < 0.15:
            copied = self.new()
            yield Op("clone", op.reads[:1], (copied,), op.place, (self.sizes[op.reads[0]],), "copy")
            yield replace(op, reads=(copied, *op.reads[1:]))
        elif way < 0.2 and not op.groups and op.kind == "pairwise" and op.name in COMMUTATIVE:
            yield replace(op, reads=op.reads[::-1])
        elif way < 0.26:
            yield op
            yield Op(
                "exp",
                op.gives[:1],
                (self.new(),),
                op.place,
                op.sizes[:1],
                "elementwise",
                scalar=9,
                only=self.rng.choice((None, *range(self.program.ranks))),
            )
        else:
            yield op

    def joined(self, ops: list[Op]) -> list[Op]:
        """Two elementwise calls of which only the second's value is read, as one."""
        reads = [v for op in ops for v in op.reads] + [shown.variable for shown in self.program.shown]
        makers = {v: op for op in ops for v in op.gives}
        for op in ops:
            first = makers.get(op.reads[0]) if op.kind == "elementwise" and not op.scalar else None
            if first is not None and first.kind == "elementwise" and not first.scalar and reads.count(op.reads[0]) == 1:
                both = replace(op, name=f"{first.name}+{op.name}", reads=first.reads, kind="both")
                return [both if each is op else each for each in ops if each is not first]
        return ops

    def bucketed(self, ops: list[Op]) -> list[Op]:
        """Neighbouring reduces of one kind and group as one, of what a `cat` packs and a `split` takes apart."""
        found: list[Op] = []
        kinds = ("all_reduce", "reduce_scatter") if self.is_widest else ("all_reduce",)
        while ops:
            run = [ops.pop(0)]
            while ops and run[0].kind in kinds and (ops[0].kind, ops[0].groups) == (run[0].kind, run[0].groups):
                if ops[0].reads[0] in {v for op in run for v in op.gives}:
                    break
                run.append(ops.pop(0))
            if len(run) == 1:
                found += run
                continue
            sizes = tuple(op.sizes[0] for op in run)
            packed, summed, place = self.new(), self.new(), run[0].place
            if run[0].kind == "reduce_scatter":
                found += self.scattered_bucket(run, packed, summed)
                continue
            found += [
                Op("cat", tuple(op.reads[0] for op in run), (packed,), place, (sum(sizes),), "cat"),
                Op("all_reduce", (packed,), (summed,), place, (sum(sizes),), "all_reduce", groups=run[0].groups),
                Op("split", (summed,), tuple(op.gives[0] for op in run), place, sizes, "split"),
            ]
        return found

    def scattered_bucket(self, run: list[Op], packed: int, summed: int) -> Iterable[Op]:
        """One reduce-scatter of several: each rank's parts of all of them lie together."""
        place, num_ranks, shares = run[0].place, len(run[0].groups[0]), tuple(op.sizes[0] for op in run)
        parts = [tuple(self.new() for _ in range(num_ranks)) for _ in run]
        for op, mine in zip(run, parts, strict=True):
            yield Op("split", op.reads, mine, place, (op.sizes[0],) * num_ranks, "split")
        together = tuple(part for each in zip(*parts, strict=True) for part in each)
        yield Op("cat", together, (packed,), place, (sum(shares) * num_ranks,), "cat")
        yield Op("reduce_scatter", (packed,), (summed,), place, (sum(shares),), "reduce_scatter", groups=run[0].groups)
        yield Op("split", (summed,), tuple(op.gives[0] for op in run), place, shares, "split")

    def shuffled(self, ops: list[Op]) -> list[Op]:
        """Another order: collectives keep theirs, and what reads or writes one storage keeps its order."""
        position, rng = 0, self.rng
        root = {v: v for v in self.sizes}
        for op in ops:
            for v in op.gives:
                root[v] = root.get(op.reads[0], op.reads[0]) if op.kind in (*VIEWS, "in_place") else v
        touched = [{root.get(v, v) for v in (*op.reads, *op.gives)} for op in ops]
        written = [{root[v] for v in op.gives} for op in ops]
        order = list(range(len(ops)))
        for _ in range(rng.choice((0, 3, 20))):
            position = rng.randrange(len(order) - 1)
            a, b = order[position], order[position + 1]
            if ops[a].groups and ops[b].groups:
                continue
            if written[a] & touched[b] or written[b] & touched[a]:
                continue
            order[position], order[position + 1] = b, a
        return [ops[i] for i in order]


@dataclass
class Scene:
    """One program, both logs, and what is wrong: `planted` are the wrong call's sites; `without` runs it without.

    `sides` has what each side runs: its program, and what is wrong in it. `known` has every value of both.
    `place` is that of the wrong call, also where the candidate's calls do not say theirs.
    """

    seed: int
    sides: dict[Role, tuple[Program, Wrong | None]]
    reference: Trace
    candidate: Trace
    without: Machine
    planted: tuple[Site, ...]
    first: tuple[str, int]
    differing: dict[int, list[tuple[str, str]]]
    way: str
    known: Known
    place: CallSite

    @cached_property
    def right(self) -> Trace:
        """What the candidate does without the wrong call; made only where it is asked for, as it takes its time."""
        trace = self.without.run()
        assert trace.shown == self.reference.shown, f"seed {self.seed}: the candidate's noise changes values"
        return trace

    def is_determined(self) -> bool:
        """Whether values tell: the reference has what the call reads, and what it should give, but not what it gives.

        Of a view of what is written later, a log does not have who made it.
        """
        for rank, index in self.planted:
            calls = self.candidate.calls[rank]
            if calls[index].view and any(
                each.operator.endswith("_") and each.inputs == calls[index].inputs for each in calls[index + 1 :]
            ):
                return False
            values = {v for call in self.reference.calls[rank] for v in (*call.inputs, *call.outputs)}
            right = self.right.calls[rank][index]
            if not values.issuperset((*calls[index].inputs, *right.inputs, *right.outputs)):
                return False
            if self.way == "reads" and (values.issuperset(calls[index].outputs) or self.has_rivals()):
                return False
        return True

    def has_rivals(self) -> bool:
        """Whether another call before the record reads right values, and gives what leads to no right one.

        So does the first of two calls that would come to a right value by another way, had the second read nothing
        wrong beside: a call that the reference does not make may be as wrong as one that reads another value.
        """
        upstream = self.candidate.upstream(self.first)
        for rank, calls in enumerate(self.candidate.calls):
            values = {v for call in self.reference.calls[rank] for v in (*call.inputs, *call.outputs)}
            here = [i for r, i in upstream if r == rank]
            for index in here:
                call = calls[index]
                packs = call.view or call.operator in ("cat", "clone")
                if packs or call.collective or (rank, index) in self.planted or not values.issuperset(call.inputs):
                    continue
                readers = [calls[i] for i in here if i > index and set(call.outputs) & set(calls[i].inputs)]
                right = (values.issuperset(reader.outputs) for reader in readers)
                if not values.issuperset(call.outputs) and not any(right):
                    return True
        return False


def wrong_of(rng: random.Random, program: Program) -> Wrong:
    """What to do wrong, where: give another value, or read another one that is there by then."""
    ops = program.ops
    number = rng.choice([n for n, op in enumerate(ops) if op.kind != "view"])  # which gives what it has
    op = ops[number]
    everywhere = tuple(range(program.ranks)) if op.only is None else (op.only,)
    ranks = everywhere if rng.random() < 0.3 else (rng.choice(everywhere),)
    if op.kind == "send":  # what the receiver gets is wrong, or what the sender reads
        everywhere = op.groups[0]
        ranks = everywhere[1:]
    if rng.random() < 0.5 or op.kind in (*VIEWS, "in_place"):
        return Wrong(number, ranks)
    if op.kind == "send":
        ranks = everywhere[:1]
    sizes = {v: size for v, (size, _) in program.input_producers.items()}
    sizes |= {
        v: size for each in ops[:number] if each.only is None for v, size in zip(each.gives, each.sizes, strict=True)
    }
    position = rng.randrange(len(op.reads))
    others = [v for v, size in sizes.items() if size == sizes.get(op.reads[position]) and v not in op.reads]
    if not others:
        return Wrong(number, ranks)
    return Wrong(number, ranks, (*op.reads[:position], rng.choice(others), *op.reads[position + 1 :]))


def packed_wrong(rng: random.Random, program: Program) -> Wrong | None:
    """At times, a bucket that is packed in another order, on all ranks or on one; None where there is none."""
    packed = [n for n, op in enumerate(program.ops) if op.kind == "cat" and len(set(op.reads)) > 1]
    if not packed or rng.random() < 0.7:
        return None
    number, everywhere = rng.choice(packed), tuple(range(program.ranks))
    reads = list(program.ops[number].reads)
    while tuple(reads) == program.ops[number].reads:
        rng.shuffle(reads)
    return Wrong(number, everywhere if rng.random() < 0.7 else (rng.choice(everywhere),), tuple(reads))


def generate(seed: int) -> Scene | None:
    """The program of a seed; None where its wrong call reaches nothing that is shown."""
    rng = random.Random(seed)
    kinds = WIDEST_KINDS if seed >= WIDEST else ALL_KINDS if seed >= WIDE else KINDS
    has_detours = seed >= WITH_DETOURS
    program = Writer(rng, kinds, has_detours=has_detours).program()
    candidate = Noise(rng, program, is_widest=seed >= WIDEST, has_detours=has_detours).rewritten()
    places = [op.place for op in candidate.ops]
    if seed >= WIDEST and rng.random() < 0.1:
        candidate = replace(candidate, ops=[replace(op, place=CallSite(None, None)) for op in candidate.ops])
    planted = packed_wrong(rng, candidate) if has_detours else None
    planted = planted or wrong_of(rng, candidate)
    known: Known = {}
    reference = Machine(program, None, known).run()
    without = Machine(candidate)
    wrong = Machine(candidate, planted, known).run()
    keys = [key for key in reference.shown if reference.shown[key] != wrong.shown[key]]
    if not keys:
        return None
    differing: dict[int, list[tuple[str, str]]] = {}
    for key in keys:
        differing.setdefault(key[1], []).append((reference.shown[key], wrong.shown[key]))
    sites = tuple(wrong.sites[planted.op, rank] for rank in planted.ranks)
    way = "computes" if planted.reads is None else "reads"
    sides: dict[Role, tuple[Program, Wrong | None]] = {"reference": (program, None), "candidate": (candidate, planted)}
    return Scene(seed, sides, reference, wrong, without, sites, keys[0], differing, way, known, places[planted.op])

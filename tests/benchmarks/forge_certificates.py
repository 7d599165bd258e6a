"""Is every forged certificate rejected? `python tests/benchmarks/forge_certificates.py [FORGERIES] [SEED] [--untyped]`.

A forgery is made by combining rules of the checker as they stand; no byte of it is damaged. There are two kinds:

Certificates. Two small graphs whose outputs differ, which is told by computing what they mean, are proved by the
prover's own rules but for one, which joins neighbours without looking at the shapes of what it joins. Every step of
such a proof follows by its rule, and every output is PROVED.

Steps. Random terms, many of which do not fit together, are put down one after the other, each rewritten by any rule
that says something of it. A step that is accepted must have a meaning, of the type that was derived, and must mean what
it is said to equal.

With --untyped the checker takes the shape of an exact operator's first operand, whatever the others have, as it was
before: every forged certificate must be accepted then, or these would show nothing.
"""

from __future__ import annotations

import ast
import functools
import math
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


from bitproof.harness import certificate_checker as checker
from bitproof.harness.certificate_checker import ASSUMPTIONS, TWO, RejectedError, rejecting
from bitproof.harness.powers.proofs.prover import rules as prover
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.proof_data import Call, Certificate, Graph, Tensor, Term
from bitproof.harness.powers.proofs.prover.terms import Table
from bitproof.harness.powers.proofs.prover.windows import joined
from tests.figures import figure
from tests.harness.certificate.samples import check

Array = torch.Tensor
"""What a tensor means: its values on each rank (the first dim)."""

GATHER, WAIT = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"
ARITY = {"cast": 1, "where": 3, "neg": 1, "bitwise_not": 1} | dict.fromkeys(TWO, 2)
SHARE_STEPS = 0.9
"""Of the forgeries those that are steps."""


# -- what things mean --------------------------------------------------------------------------------


def _exactly(operator: str, dtype: str, operands: Sequence[Array]) -> Array:
    """What torch computes. Raises ValueError where no call of this form gives the dtype."""
    if len({x.shape for x in operands}) != 1 or ARITY.get(operator) != len(operands):
        raise ValueError("operands do not fit")
    if operator == "cast":
        return operands[0].to(getattr(torch, dtype))
    if len({x.dtype for x in operands[operator == "where" :]}) != 1:
        raise ValueError("operands have several dtypes")
    try:
        found: Array = getattr(torch, operator)(*operands)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if found.dtype != getattr(torch, dtype):
        raise ValueError(f"{operator} gives {found.dtype}")
    return found


def _input(name: str, dtype: str, shape: Sequence[int], ranks: int) -> Array:
    """Numbers far apart, zeros of either sign, denormals and infinities."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {dtype} {shape}".encode()))
    draw = lambda: torch.randn((ranks, *shape), generator=generator, dtype=torch.float64)  # noqa: E731
    found = draw() * torch.exp(2 * draw())
    for value, above in ((0.0, 1.6), (-0.0, 1.6), (2.0**-149, 2.2), (2.0**-24, 2.2), (float("inf"), 2.6), (-1.0, 2.2)):
        found = torch.where(draw() > above, value, found)
    if dtype in ("int64", "bool"):
        return (found.clamp(-9, 9) * 3).to(getattr(torch, dtype))
    return found.to(getattr(torch, dtype))


def _gathered(x: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Every rank's, along a new first dim."""
    if sorted(rank for group in groups for rank in group) != [*range(len(x))] or len({*map(len, groups)}) != 1:
        raise ValueError("groups do not fit")
    by_rank = {rank: group for group in groups for rank in group}
    return torch.stack([x[list(by_rank[rank])] for rank in range(len(x))])


def _reduced(x: Array, operation: str, groups: Sequence[Sequence[int]]) -> Array:
    """Row i of (W, n), over ranks in order, on rank i."""
    rows = _gathered(x, groups)  # rank, member, row, column
    if x.ndim != 3 or rows.shape[1] != rows.shape[2]:
        raise ValueError("rows are not ranks")
    place = {rank: i for group in groups for i, rank in enumerate(group)}
    return torch.stack([_folded(rows[rank, :, place[rank]], operation) for rank in range(len(x))])


def _folded(rows: Array, operation: str) -> Array:
    return functools.reduce(torch.add, rows)


def _shown(x: Array, shape: Sequence[int], strides: Sequence[int], offset: int) -> Array:
    places = torch.full(tuple(shape), offset)
    for dim, stride in enumerate(strides):
        places = places + (torch.arange(shape[dim]) * stride).reshape(
            [-1 if d == dim else 1 for d in range(len(shape))]
        )
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    if places.numel() and (places.min() < 0 or places.max() >= flat.shape[1]):
        raise ValueError("a window shows what is not there")
    return flat[:, places]


# -- certificates ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A call of a draft: its number, layout and meaning."""

    index: int
    tensor: Tensor
    means: Array


class Draft:
    """A graph that is written call by call, and computed at once."""

    def __init__(self, groups: tuple[tuple[int, ...], ...], ranks: int) -> None:
        self.calls: list[Call] = []
        self.groups, self.ranks = groups, ranks

    def add(
        self, op: str, args: Sequence[tuple[str, Any]], means: Array, dtype: str, like: Tensor | None = None
    ) -> Node:
        """A call with memory of its own, unless it lies `like` something."""
        shape, name = tuple(means.shape[1:]), f"c{len(self.calls)}"
        tensor = like or Tensor(dtype, "cpu", shape, tuple(checker.row_major([*shape])), 0, len(self.calls))
        self.calls.append(Call(name, op, tuple(args), tensor))
        return Node(len(self.calls) - 1, tensor, means)

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Node:
        """An input of the step."""
        found = self.add("input", (), _input(name, dtype, shape, self.ranks), dtype)
        self.calls[-1] = Call(name, "input", (), found.tensor)
        return found

    def rows(self, x: Node, begin: int, end: int) -> Node:
        """Rows of a tensor, in its memory."""
        t = x.tensor
        shape = (end - begin, *t.shape[1:])
        tensor = Tensor(t.dtype, t.device, shape, t.strides, t.offset + begin * t.strides[0], t.storage)
        return self.add("view", [("self", ("node", x.index))], x.means[:, begin:end], t.dtype, tensor)

    def exact(self, operator: str, *operands: Node, dtype: str | None = None) -> Node:
        """An operator, or a cast to `dtype`."""
        dtype = dtype or operands[0].tensor.dtype
        op = (
            "aten._to_copy.default"
            if operator == "cast"
            else f"aten.{operator}.{'Tensor' if operands[1:] else 'default'}"
        )
        args = [(name, ("node", x.index)) for name, x in zip(("self", "other"), operands, strict=False)]
        return self.add(op, args, _exactly(operator, dtype, [x.means for x in operands]), dtype)

    def cat(self, parts: Sequence[Node]) -> Node:
        """Parts, one after the other."""
        args = [("tensors", ("list", *(("node", x.index) for x in parts)))]
        return self.add("aten.cat.default", args, torch.cat([x.means for x in parts], 1), parts[0].tensor.dtype)

    def gather(self, x: Node) -> Node:
        """Every rank's rows, one after the other, waited for."""
        shape = (len(self.groups[0]) * x.means.shape[1], *x.means.shape[2:])
        means = _gathered(x.means, self.groups).reshape(self.ranks, *shape)
        group = [("group_size", len(self.groups[0])), ("group_name", ("ranks", self.groups))]
        launched = self.add(GATHER, [("input", ("node", x.index)), *group], means, x.tensor.dtype)
        return self.add(WAIT, [("tensor", ("node", launched.index))], means, x.tensor.dtype, launched.tensor)

    def graph(self, outputs: Sequence[Node]) -> Graph:
        """The calls, with outputs by number."""
        return Graph(tuple(self.calls), tuple((f"out {i}", x.index) for i, x in enumerate(outputs)))


Formula = tuple[Any, ...]
"""("x", number) or (operator, formula, ...), or ("cast", formula, dtype)."""


def _formula(chance: random.Random, leaves: list[int], dtype: str) -> Formula:
    """A formula that has these leaves in this order."""
    if len(leaves) == 1:
        leaf: Formula = "x", leaves[0]
        return chance.choice([leaf, leaf, leaf, ("neg", leaf), ("cast", ("cast", leaf, "bfloat16"), dtype)])
    cut = chance.randrange(1, len(leaves))
    sides = _formula(chance, leaves[:cut], dtype), _formula(chance, leaves[cut:], dtype)
    return (chance.choice(["add", "sub", "mul"]), *sides)


def _computed(draft: Draft, formula: Formula, leaves: Sequence[Node]) -> Node:
    match formula:
        case ("x", place):
            return leaves[place]
        case ("cast", inner, dtype):
            return draft.exact("cast", _computed(draft, inner, leaves), dtype=dtype)
    return draft.exact(formula[0], *(_computed(draft, inner, leaves) for inner in formula[1:]))


def forged_certificate(chance: random.Random) -> tuple[Certificate, bool]:
    """Two graphs, proved by rules that trust shapes, and whether their outputs are equal.

    The reference computes a formula part by part, joins the parts and gathers them. The candidate gathers operands,
    some longer than what is read of them, and computes the formula once, of as many rows of each as the result has.
    """
    ranks, several = chance.choice([(2, 1), (3, 1), (4, 1), (4, 2)])
    size = ranks // several
    groups = tuple(tuple(range(begin, begin + size)) for begin in range(0, ranks, size))
    if chance.random() < 0.3:
        groups = tuple(group[::-1] for group in groups)
    row = chance.choice([(), (1,), (2,), (3,), (2, 2)])
    dtype = chance.choice(["float32", "float64", "float16"])
    parts = [chance.choice([0, 1, 1, 2, 3]) for _ in range(chance.randint(1, 3))] + [chance.randint(1, 2)]
    length, num_operands = sum(parts), chance.randint(2, 4)
    leaves_in_order = chance.sample(range(num_operands), num_operands)
    formula = _formula(chance, leaves_in_order, dtype)
    order = [leaves_in_order[0], *chance.sample(leaves_in_order[1:], num_operands - 1)]
    lengths = [length + (chance.randint(1, 4) if chance.random() < 0.6 else 0) for _ in range(num_operands)]
    lengths[order[0]] = length  # whose shape was once taken for that of all
    names = ["parameter 0", *(f"input {i}" for i in range(num_operands - 1))]
    both = [Draft(groups, ranks), Draft(groups, ranks)]
    inputs = [[draft.input(names[i], dtype, (lengths[x], *row)) for i, x in enumerate(order)] for draft in both]
    by_number = [[side[order.index(x)] for x in range(num_operands)] for side in inputs]
    one, two = both
    pieces, begin = [], 0
    for part in parts:
        leaves = [one.rows(x, begin, begin + part) for x in by_number[0]]
        pieces.append(_computed(one, formula, leaves))
        begin += part
    result = one.gather(one.cat(pieces))
    gathered = [two.gather(x) for x in by_number[1]]
    other = _computed(two, formula, [two.rows(x, 0, length * size) for x in gathered])
    sides = one.graph([result]), two.graph([other])
    proof = prove_graphs(*sides, rules=trusting_rules())
    answers = tuple((answer.output, answer.verdict) for answer in proof.answers)
    texts = tuple(text for _, text in ASSUMPTIONS)
    found = Certificate("forged", *sides, tuple(proof.table.steps), answers, texts)
    return found, same_bits(result.means, other.means)


def trusting_rules() -> dict[str, list[Any]]:
    """The prover's rules, but neighbours are joined to the whole of what each operand shows."""

    def cat_of_neighbours(table: Table, term: Term) -> int | None:
        _, parts, dim = term
        for index in range(len(parts) - 1):
            pair = parts[index : index + 2]
            both = _joined(table, *pair, dim, len(parts) == 2)
            sizes = [table.shape(part)[dim] for part in pair]
            if both is not None and prover._consecutive_views(table, both, dim, sizes) == pair:
                result = table.make(("cat", (*parts[:index], both, *parts[index + 2 :]), dim))
                table.hint = (index, both)
                return result
        return prover.cat_of_neighbours(table, term)

    return {**prover.RULES, "cat": [prover.cat_of_nothing, prover.cat_of_cat, cat_of_neighbours]}


def _joined(table: Table, first: int, second: int, dim: int, is_last: bool) -> int | None:
    """Two neighbours as one; all that they show a part of, where no more parts follow."""
    one, two = table[first], table[second]
    if one[0] == two[0] == "exact" and one[:4] == two[:4]:
        pairs = [_joined(table, a, b, dim, is_last) for a, b in zip(one[4], two[4], strict=True)]
        return None if None in pairs else table.make((*one[:4], tuple(pairs)))
    (base, a), (other, b) = table.as_window(first), table.as_window(second)
    window = joined(a, b, dim) if base == other else None
    if window is None:
        return None
    is_begin = dim == window.offset == 0 and window.shape[1:] == table.shape(base)[1:]
    return base if is_last and is_begin else table.view(base, window)


# -- steps -------------------------------------------------------------------------------------------

DTYPES = ("float32", "float32", "bfloat16", "float16", "int64")
NUMBERS = tuple(x.hex() for x in (0.0, -0.0, 1.0, 1.0, -1.0, 2.0, -2.0, 1.5, 2.0**-149, 65536.0, 2.0**31))
GROUPS = (((0, 1),), ((0, 1),), ((1, 0),), ((0,), (1,)), ((0, 0),), ((0,), (1, 0)))


class Trial:
    """The checker's state, of terms with meanings. Whatever a rule looks up is put down first, if the checker takes it.

    Its columns hold terms and types as tuples, to be keys.
    """

    def __init__(self) -> None:
        self.state = checker.new_state()
        self.state["at"] = _PutDown(self)
        self.terms: list[Term] = []
        self.places: dict[Term, int] = {}
        self.types: list[tuple[str, tuple[int, ...]]] = []
        self.means: list[Array | None] = []

    @property
    def equals(self) -> list[int]:
        """Each term's last form."""
        found: list[int] = self.state["last"]
        return found

    def put(self, term: Term, rule: str = "", equals: int | None = None, hint: tuple[Any, ...] = ()) -> None:
        """Add a step with its meaning. Raises RejectedError if the checker does."""
        step = [term, rule, len(self.terms) if equals is None else equals, *([hint] if hint else [])]
        with rejecting():
            checker.take_step(self.state, as_json(step))
        dtype, shape = self.state["types"][-1]
        self.places[term] = len(self.terms)
        self.terms.append(term)
        self.types.append((dtype, tuple(shape)))
        self.means.append(self.meaning(term))

    def gives(self, rule: str, term: Term, hint: tuple[Any, ...]) -> int | None:
        """What a rule makes of a term, None where it says nothing. Raises RejectedError if the checker does."""
        with rejecting():
            return checker.RULES[rule](self.state, as_json(term), *as_json(hint))

    def meaning(self, term: Term) -> Array | None:
        """What a term means; None where it means nothing."""
        try:
            match term:
                case ("input", name, dtype, shape):
                    return _input(name, dtype, shape, 2)
                case ("view", base, *w):
                    return _shown(self._means(base), *w)
                case ("cat", parts, dim):
                    if len({self._dtype(x) for x in parts}) != 1 or dim < 0:
                        return None
                    return torch.cat([self._means(x) for x in parts], dim + 1)
                case ("exact", operator, dtype, _, operands):
                    return _exactly(operator, dtype, [self._means(x) for x in operands])
                case ("number", dtype, text):
                    found = torch.full((2,), float.fromhex(text), dtype=torch.float64).to(getattr(torch, dtype))
                    return (
                        found
                        if same_bits(found.double(), torch.full((2,), float.fromhex(text), dtype=torch.float64))
                        else None
                    )
                case ("move", "aten.flip.default", (("self", (_, below)), ("dims", (_, *dims))), _, _):
                    x = self._means(below)
                    return x.flip([1 + dim % (x.ndim - 1) for dim in dims])
                case ("gather", below, ranks):
                    return _gathered(self._means(below), ranks)
                case ("reduce", below, operation, ranks):
                    fits = f" in {self._dtype(below)} on" in operation
                    return _reduced(self._means(below), operation, ranks) if fits else None
        except (ValueError, IndexError, TypeError, RuntimeError):
            pass
        return None

    def is_false(self, term: Term, found: int | None) -> bool:
        """Whether a term that was not accepted means nothing, or something else than what it was said to equal."""
        own = self.meaning(term)
        if own is None or found is None or found >= len(self.means):
            return own is None
        other = self.means[found]
        return other is None or not same_bits(own, other)

    def _means(self, place: int) -> Array:
        if (found := self.means[place]) is None:
            raise ValueError(f"{place} means nothing")
        return found

    def _dtype(self, place: int) -> str:
        return self.types[place][0]


class _PutDown(dict[str, int]):
    """The places of terms by their texts, where a term that is looked up is put down first."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial

    def get(self, line: str, default: Any = None) -> Any:
        """The place of a term, which has one from now on."""
        if line not in self:
            self.trial.put(_as_tuples(ast.literal_eval(line)))
        return self[line]


def as_json(value: Any) -> Any:
    """Tuples as the lists that JSON has."""
    return [*map(as_json, value)] if isinstance(value, tuple | list) else value


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _window(shape: Sequence[int], strides: Sequence[int], offset: int) -> tuple[Any, ...]:
    return tuple(_as_tuples(checker.normal([*shape], [*strides], offset)))


def _random_term(trial: Trial, chance: random.Random) -> Term:
    """A term of last forms, most of which do not fit."""
    last = [x for x in range(len(trial.terms)) if trial.equals[x] == x]
    pick = lambda: chance.choice(last)  # noqa: E731
    place = pick()
    dtype, shape = trial.types[place]
    like = [x for x in last if trial.types[x] == (dtype, shape)]
    other = chance.choice(like) if chance.random() < 0.5 else pick()
    match chance.randrange(9):
        case 0:
            sizes = tuple(chance.randint(0, 3) for _ in range(chance.randint(0, 3)))
            strides = tuple(chance.choice([0, 1, 1, 2, 3, 4, 6, -1]) for _ in sizes)
            return ("view", place, *_window(sizes, strides, chance.choice([0, 0, 0, 1, 2, 3])))
        case 1:
            return ("view", place, *_window((math.prod(shape),), (1,), 0))
        case 2:
            dim = chance.choice([0, 0, 1, -1]) if shape else 0
            return ("cat", tuple(chance.choice([place, other, pick()]) for _ in range(chance.randint(1, 3))), dim)
        case 3:
            operator = chance.choice(["eq", "lt", "bitwise_and", "bitwise_not", "where", "where", "neg", "cast", "div"])
            chosen = chance.choice([place, pick()]), chance.choice(like), other
            several = chosen[: ARITY.get(operator, 2) if chance.random() < 0.9 else 2]
            return ("exact", operator, chance.choice([dtype, dtype, "bool", "bfloat16"]), "cpu", several)
        case 6 | 7:
            operator = chance.choice(["add", "add", "mul", "mul", "sub", "neg", "cast"])
            several = (place,) if operator in ("neg", "cast") and chance.random() < 0.9 else (place, other)
            return ("exact", operator, chance.choice([dtype, dtype, dtype, *DTYPES]), "cpu", several)
        case 8 if chance.random() < 0.5 and shape:
            dims = tuple(chance.sample(range(-len(shape), len(shape)), 1))
            return ("move", "aten.flip.default", (("self", ("value", place)), ("dims", ("list", *dims))), dtype, shape)
        case 8:
            number = "number", chance.choice([dtype, "bool", *DTYPES]), chance.choice(NUMBERS)
            known = number in trial.places and shape
            return ("view", trial.places[number], shape, (0,) * len(shape), 0) if known else number
        case 4:
            return ("gather", place, chance.choice(GROUPS))
    return ("reduce", place, f"sum in {chance.choice([dtype, dtype, 'float32'])} on cpu", chance.choice(GROUPS))


def _hints(trial: Trial, rule: str, term: Term, chance: random.Random) -> list[tuple[Any, ...]]:
    if rule == "cat_of_neighbours":
        return [(chance.randrange(max(len(term[1]) - 1, 1)), chance.randrange(len(trial.terms))) for _ in range(6)]
    if rule != "view_of_cat":
        return [()]
    found: list[tuple[Any, ...]] = []
    inner = trial.terms[term[1]]
    if inner[0] == "cat":
        for _ in range(4):
            pieces = []
            for _ in range(chance.randint(1, 2)):
                number = chance.randrange(len(inner[1]))
                pieces.append((number, _window(term[2], term[3], chance.choice([term[4], 0, 0, 1]))))
            found.append((tuple(pieces),) if len(pieces) == 1 else (tuple(pieces), chance.choice([0, 1])))
    return found


def forged_steps(chance: random.Random, attempts: int = 40) -> Iterator[tuple[str, str | None]]:
    """Of each step that was tried what became of it, "rejected" where it is false or means nothing; and what is
    false of one that was accepted."""
    trial = Trial()
    for name in "abcd":
        shape = tuple(chance.randint(0, 4) for _ in range(chance.randint(0, 2)))
        trial.put(("input", f"input {name}", chance.choice([*DTYPES, "bool"]), shape))
    for _ in range(attempts):
        term = _random_term(trial, chance)
        if term in trial.places or len(trial.terms) > 400:
            continue
        tried: list[tuple[str, tuple[Any, ...]]] = [
            (rule, hint)
            for rule in checker.RULES
            if rule.split("_")[0] == term[0]
            for hint in _hints(trial, rule, term, chance)
        ]
        chance.shuffle(tried)
        for rule, hint in [*tried, ("", ())]:
            before, found = len(trial.terms), None
            try:
                found = trial.gives(rule, term, hint) if rule else len(trial.terms)
                if found is None:
                    continue
                if rule and chance.random() < 0.1:
                    found = chance.randrange(len(trial.terms))
                trial.put(term, rule, found, hint)
            except RejectedError:
                yield "rejected" if trial.is_false(term, found) else "that say nothing", None
            flaws = [flaw for place in range(before, len(trial.terms)) if (flaw := _flaw_at(trial, place))]
            if len(trial.terms) > before:
                yield "accepted", flaws[0] if flaws else None
            if flaws or term in trial.places:
                break
        if any(x is None for x in trial.means):
            return


def _flaw_at(trial: Trial, place: int) -> str | None:
    own, other = trial.means[place], trial.means[trial.equals[place]]
    if own is None or other is None:
        return f"{trial.terms[place]} means nothing"
    if trial.types[place] != (trial.types[place][0], tuple(own.shape[1:])):
        return f"{trial.terms[place]} is not of type {trial.types[place]}"
    if trial.types[place][0] != trial.types[trial.equals[place]][0] or not same_bits(own, other):
        return f"{trial.terms[place]} is not {trial.terms[trial.equals[place]]}"
    return None


# -- the checker without types -----------------------------------------------------------------------


@contextmanager
def untyped() -> Iterator[None]:
    """The checker as it was: an exact operator has its first operand's shape, whatever the others have."""
    was = checker.TYPES["exact"]
    checker.TYPES["exact"] = lambda types, operator, dtype, device, operands: [dtype, types[operands[0]][1]]
    try:
        yield
    finally:
        checker.TYPES["exact"] = was


def is_rejected(certificate: Certificate) -> bool:
    """Whether the checker finds something wrong."""
    try:
        check(certificate)
    except RejectedError:
        return True
    return False


def _follows(certificate: Certificate) -> bool:
    """Whether each step follows by its rule, and nothing but types is wrong."""
    with untyped():
        return not is_rejected(certificate)


def fuzz_certificates(forgeries: int, seed: int, counts: Counter[str]) -> None:
    """Forge until there are so many; true certificates that come out on the way must be accepted."""
    number = 0
    while counts["certificates rejected"] + counts["certificates ACCEPTED"] < forgeries:
        found, is_equal = forged_certificate(random.Random(seed * 1_000_003 + number))
        number += 1
        if {verdict for _, verdict in found.answers} != {"PROVED"}:
            counts["pairs that nothing proves"] += 1
        elif is_equal:
            refused = is_rejected(found)
            counts[
                "pairs that are equal, by an ill step, rejected" if refused else "pairs that are equal, accepted"
            ] += 1
        elif not _follows(found):
            counts["pairs whose proof does not follow"] += 1
        else:
            counts["certificates rejected" if is_rejected(found) else "certificates ACCEPTED"] += 1


def fuzz_steps(forgeries: int, seed: int, counts: Counter[str]) -> list[str]:
    """Try steps until so many were rejected; what is false of accepted ones."""
    flaws: list[str] = []
    number = 0
    while counts["steps rejected"] + counts["false steps ACCEPTED"] < forgeries:
        for kind, flaw in forged_steps(random.Random(seed * 1_000_003 + number)):
            counts["false steps ACCEPTED" if flaw else f"steps {kind}"] += 1
            flaws += [flaw] if flaw else []
        number += 1
    return flaws


def main(forgeries: int, seed: int) -> int:
    """Run, print, and return 1 where a forgery is accepted."""
    start, counts = time.process_time(), Counter[str]()
    num_steps = int(forgeries * SHARE_STEPS)
    fuzz_certificates(forgeries - num_steps, seed, counts)
    flaws = fuzz_steps(num_steps, seed, counts)
    rejected = counts["certificates rejected"] + counts["steps rejected"]
    accepted = counts["certificates ACCEPTED"] + counts["false steps ACCEPTED"]
    seconds = time.process_time() - start
    print(f"forgeries from seed {seed}, {seconds:.0f} s of this process: {rejected} rejected, {accepted} accepted")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:48} {count:7}")
    for flaw in flaws[:5]:
        print(f"  {flaw}")
    missed = figure("fuzz.forge", rejected / (rejected + accepted) if rejected else math.nan)
    return int(accepted > 0 or bool(flaws) or missed)


if __name__ == "__main__":
    given = [text for text in sys.argv[1:] if text != "--untyped"]
    numbers = [int(text) for text in given]
    forgeries, seed = numbers + [100_000, 0][len(numbers) :]
    if "--untyped" in sys.argv:
        with untyped():
            status = main(forgeries, seed)
    else:
        status = main(forgeries, seed)
    sys.exit(status)

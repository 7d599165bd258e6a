"""Random programs of operators that trace: what a proof may meet besides the models of this project.

A program is a list of calls over a pool of tensors. Operators come from the project's table and from the list of those
that proofs admit, in equal shares; arguments follow schemas, and a call that torch refuses is drawn again. Some calls
write in place, some show memory of others, some draw random numbers.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from bitproof.harness.operators import ROWS
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.torch_compat import OpOverload
from bitproof.harness.torch_operators import schema_of
from tests.harness.powers.proofs.toy_graphs import trace

NAMES = ("parameter w", "parameter v", "input x", "input y", "input indices", "input mask")
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
WRITES = ("add_.Tensor", "mul_.Tensor", "sub_.Tensor", "neg_.default", "copy_.default", "zero_.default", "fill_.Scalar")
NUMBERS = (0.5, 1.0, 2.0, -1.0, 0.1, 3.0, 0.0)
RANDOM = ("rand_like.default", "randn_like.default", "bernoulli.default", "bernoulli.p", "multinomial.default")
LARGEST = 4096
"""Elements of a value; a call that gives more is drawn again."""


@dataclass(frozen=True)
class RandomProgram:
    """A graph, and tensors that lie as its inputs do."""

    module: GraphModule
    like: list[Tensor]


@functools.cache
def operators() -> tuple[tuple[OpOverload, ...], ...]:
    """Those of the project's table, those that are admitted, those that write, and those that draw."""
    table = [row.overload(end) for row in ROWS.values() for end in row.allowed if row.name.startswith("aten.")]
    found = [[_overload(name) for name in names] for names in (table, sorted(admitted.names()))]
    found += [[_overload(f"aten.{name}") for name in names] for names in (WRITES, RANDOM)]
    return tuple(tuple(op for op in ops if op is not None and _is_drawable(op)) for ops in found)


def _overload(name: str) -> OpOverload | None:
    namespace, packet, end = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), end, None) if namespace == "aten" else None


def _is_drawable(op: OpOverload) -> bool:
    schema = schema_of(op)
    is_out = any(x.is_out for x in schema.arguments)
    return not is_out and bool(schema.returns) and any("Tensor" in str(x.type) for x in schema.arguments)


def inputs(chance: random.Random, dtype: torch.dtype) -> list[Tensor]:
    """Real numbers, indices and a mask: in rows, in columns, or a part of larger memory."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    found = [torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    found[chance.randrange(4)] = found[0][: chance.choice([1, 4]), :]
    laid = [chance.choice([_in_rows, _in_rows, _in_columns, _in_part])(x) for x in found]
    indices = torch.randint(0, 4, (chance.choice([3, 6]),), generator=generator)
    return [*laid, indices, torch.randn(4, 6, generator=generator) > 0]


def _in_rows(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _in_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _in_part(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def random_program(chance: random.Random) -> RandomProgram:
    """A program of three to nine calls, which returns the last real values."""
    like = inputs(chance, chance.choice(DTYPES))
    with torch.no_grad():
        tape = _tape([x.clone() for x in like], chance, chance.randint(3, 9))
    module = trace(functools.partial(_replayed, tape), like)
    return RandomProgram(module, like)


Step = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Ref:
    """A value of the pool, by its place."""

    place: int


def _tape(pool: list[Tensor], chance: random.Random, length: int) -> list[Step]:
    tape: list[Step] = []
    for _ in range(length * 60):
        op = chance.choice(chance.choices(operators(), (45, 35, 14, 6))[0])
        try:
            args, kwargs = _arguments(op, pool, chance)
            results = _tensors(_called(op, args, kwargs, pool))
        except Exception:  # torch refuses it
            continue
        if not results or any(x.numel() > LARGEST or x.layout != torch.strided or x.is_complex() for x in results):
            continue
        pool += results
        tape.append((op, args, kwargs))
        if len(tape) == length:
            break
    return tape


def _called(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], pool: list[Tensor]) -> Any:
    def held(x: Any) -> Any:
        return pool[x.place] if isinstance(x, Ref) else [held(each) for each in x] if isinstance(x, list) else x

    return op(*map(held, args), **{name: held(x) for name, x in kwargs.items()})


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for each in value for x in _tensors(each)] if isinstance(value, list | tuple) else []


def _replayed(tape: list[Step], *given: Tensor) -> list[Tensor]:
    pool = list(given)
    for op, args, kwargs in tape:
        pool += _tensors(_called(op, args, kwargs, pool))
    made = pool[len(given) :]
    return [pool[2] + pool[3] if not made else made[-1], *made[-3:-1], made[0] if made else pool[0]]


def _arguments(op: OpOverload, pool: list[Tensor], chance: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = [], {}
    for argument in schema_of(op).arguments:
        if argument.has_default_value() and chance.random() < 0.7:
            if argument.kwarg_only:
                continue
            value = argument.default_value
        else:
            value = _argument(str(argument.type), argument.name, pool, chance)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _argument(kind: str, name: str, pool: list[Tensor], chance: random.Random) -> Any:
    last = len(pool) - 1
    match kind:
        case "Tensor":
            if "ind" in name or name == "repeats":
                return Ref(4)
            if name in ("mask", "condition"):
                return Ref(5)
            return Ref(chance.choice([chance.randint(0, last), last, chance.randint(0, 3)]))
        case "List[Tensor]":
            place = chance.randint(0, last)
            return [Ref(place), *(Ref(chance.choice([place, chance.randint(0, last)])) for _ in range(2))]
        case "List[Optional[Tensor]]":
            return [Ref(4)]
        case "int" if "dtype" in name:  # as a number, -1 say, it ends the process in torch 2.13
            return chance.choice([*DTYPES, torch.int64, torch.bool])
        case "int" | "SymInt":
            return chance.choice([0, 1, -1, 0, 1, 2])
        case "List[int]" | "List[SymInt]":
            shapes = [[*pool[chance.randint(0, last)].shape], [0], [1], [1, 0], [0, 1], [-1], [6, 4], [2, 12], [2, 2]]
            return chance.choice(shapes)
        case "float":
            return chance.choice(NUMBERS)
        case "number":
            return chance.choice([*NUMBERS, 1, 2])
        case "bool":
            return chance.random() < 0.5
        case "str":
            return chance.choice(["sum", "mean", "none"])
        case optional if optional.startswith("Optional[Tensor"):
            return Ref(chance.randint(0, last)) if chance.random() < 0.5 else None
    return None

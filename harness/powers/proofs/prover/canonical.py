"""Turns each call of a graph into a term for the value that it computes, such as `neg(x)`.

1. If a call only views, copies or moves elements, or computes exactly, rules may rewrite its term.
2. Any other call becomes a term that no rule rewrites ("opaque"). It includes the layout of each tensor argument,
   because kernels may choose a code path by layouts.
3. An in-place write gives a new value to all tensors that have exactly the written elements. Other tensors in this
   memory become stale: a call that reads them is refused.
4. Each random call reads the state of the generator after the previous random call.
5. A symbolic size, such as `u0`, is replaced by the term that defines its number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bitproof.harness.powers.proofs.prover import known_operators
from bitproof.harness.powers.proofs.prover.data_dependent_sizes import Symbols, symbols_in
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, refuse
from bitproof.harness.powers.proofs.prover.layouts import alignment_of, expanded, shows, windows_of
from bitproof.harness.powers.proofs.prover.memory import GraphMemory
from bitproof.harness.powers.proofs.prover.proof_data import SIDES, Call, Graph, Size, Tensor, Term
from bitproof.harness.powers.proofs.prover.terms import Table
from bitproof.harness.powers.proofs.prover.windows import whole

Arguments = Mapping[str, Any]


class Canonicalizer:
    """Computes the term of each call in a graph.

    - `side`: 0 for the reference's graph, 1 for the candidate's.
    - `values`: for each call, the index of the term of its result. After an in-place write, this is the term of the new
      value. A call with several results has a list of indices, and a refused call has None.
    """

    def __init__(self, table: Table, graph: Graph, side: int) -> None:
        self.table = table
        self.graph = graph
        self.side = side
        self.values: list[Any] = []
        self.refused: dict[int, RefusedError] = {}
        self.symbols = Symbols(table)
        self.memory = GraphMemory(graph)
        self.generator: Term = ("seed",)  # the generator's state before the next random call
        # (operators, the method for their term; it returns None for operands that it cannot handle)
        self._of_elements = (
            (known_operators.FILLS, self._filling),
            ({*known_operators.EXACT, *known_operators.DIVISIONS, known_operators.POWER}, self._exact),
            ({known_operators.PAD}, self._padded),
        )

    def run(self) -> None:
        # A refused call does not end the proof: outputs that do not depend on it can still be proved.
        for index, call in enumerate(self.graph.calls):
            self.values.append(None)
            try:
                self.values[index] = self._value(index, call)
            except RefusedError as error:
                self.refused[index] = error
                self._distrust(index, call)
            # Also for a refused call, since a later write may overwrite its result.
            self.memory.hold(index)

    def output(self, index: int) -> int:
        """Return the index of an output's term. The output is the value of call `index` at the end of the step.

        If this call is an input, its value is the last value written into it. Raises RefusedError if the term is
        unknown.
        """
        self._refuse_unreadable(index, self.graph.calls[index])
        if self.memory.is_in_flight(index):
            raise refuse(self.graph.calls[index], "an output that is never waited for")
        return int(self.values[index])

    def written_inputs(self) -> list[int]:
        """Return the indices of the inputs and constants whose value changes during the step."""
        inputs = [index for index, call in enumerate(self.graph.calls) if call.op in ("input", "constant")]
        return [i for i in inputs if self.memory.is_stale(i) or self.values[i] != self._input(self.graph.calls[i])]

    def _input(self, call: Call) -> int:
        # An input is the same on both sides if its name is, and a constant if its content is.
        identity = call.name if call.op == "input" else dict(call.args)["digest"][1]
        # A symbolic number counts as the item of an input without dims.
        if not isinstance(call.value, Tensor):
            return self.table.make(("item", self.table.make((call.op, identity, "int64", ()))))
        return self.table.make((call.op, identity, call.value.dtype, _known_sizes(call.value.shape)))

    def _input_with_symbols(self, call: Call) -> int:
        term = self._input(call)
        # A tensor introduces the new symbols in its sizes, and a symbolic number introduces its own symbol.
        if isinstance(call.value, Tensor):
            self.symbols.name_extents(call, term, call.value.shape)
        else:
            self.symbols.name_item(call, term)
        return term

    @functools.cached_property
    def computed(self) -> set[int]:
        """The indices of all terms that the graph computes, and of all terms inside these terms."""
        values = (value if isinstance(value, list) else [value] for value in self.values)
        return self.table.reachable(place for places in values for place in places if place is not None)

    @functools.cached_property
    def reads(self) -> list[list[int]]:
        """A list with an entry per call: the indices of the earlier calls on which its arguments depend.

        An argument depends on the call that computed it. If its size has a symbol such as `u0`, it also depends on the
        first call whose result has the symbol.
        """
        brought: dict[str, int] = {}
        found = []
        for index, call in enumerate(self.graph.calls):
            values = (*(x for _, x in call.args), *(self.graph.calls[read].value for read in call.reads))
            found.append([*call.reads, *(brought[name] for name in symbols_in(values) if name in brought)])
            for name in symbols_in(call.value):
                # Later results may have the symbol, too, but the first one defines it.
                brought.setdefault(name, index)
        return found

    # -- one call ---------------------------------------------------------------------------------

    def _value(self, index: int, call: Call) -> Any:
        args = dict(call.args)
        awaited = args[known_operators.WAITS[call.op]][1] if call.op in known_operators.WAITS else None
        # Refusals first: a call with unknown inputs must not become a term.
        for read in call.reads:
            self._refuse_unreadable(read, call)
        self.memory.refuse_read_in_flight(call)
        is_higher_order = call.op.startswith("higher_order.")
        if call.op in known_operators.REFUSED or (is_higher_order and call.op not in known_operators.HIGHER_ORDER):
            raise refuse(call, f"{call.op} is not understood")
        if call.op.split(".")[0] in known_operators.FAMILIES and call.op not in (
            *known_operators.COLLECTIVES,
            *known_operators.WAITS,
        ):
            raise refuse(call, f"collective {call.op} is not understood")
        # Its result may be read before it is complete, so it has no defined value.
        if "non_blocking" in args:
            raise refuse(call, "a copy to another device that nothing waits for")
        if call.writes:
            return self._write(index, call, args)
        if call.op in ("input", "constant"):
            return self._input_with_symbols(call)
        if call.op == known_operators.NUMBER:
            return self.table.make(("rows", self.symbols.sizes((call.value,))))
        if call.op == "getitem":
            held, place = self.values[args["0"][1]], args["1"]
            if not isinstance(held, list) or not isinstance(place, int):
                raise refuse(call, "a part of a tensor that no operator takes")
            return held[place]
        self.memory.run(index, call, awaited)
        if call.op in known_operators.COPIES:
            return self._copy(call, args)
        return self._computed(index, call, args)

    def _computed(self, index: int, call: Call, args: Arguments) -> Any:
        if known_operators.is_unwritten(call.op):
            # Without elements there is no uninitialized memory: all such tensors are equal.
            if math.prod(x for x in call.value.shape if isinstance(x, int)) == 0:
                return self._opaque(call, ())
            return self.table.make(("fresh", SIDES[self.side], index, call.value.dtype, _known_sizes(call.value.shape)))
        if call.op in known_operators.JOINS:
            return self._cat(call, args)
        # Exact operators first: if their operands do not fit, they are opaque below.
        for operators, term_of in self._of_elements:
            if call.op in operators and (found := term_of(call, args)) is not None:
                return found
        if call.op == "aten._local_scalar_dense.default":
            term = self.table.make(("item", self.values[args["self"][1]]))
            self.symbols.name_item(call, term)
            return term
        if shows(call, self.graph.calls):
            return self._view(call, call.reads[0])
        self._refuse_open_pairs(call)
        if call.op in known_operators.COLLECTIVES:
            return self._collective(call, args)
        if call.op in known_operators.CARRIES or call.op in known_operators.UPDATES:
            return self._results(call, "move", call.op, self._arguments(call, call.args, layouts=False))
        return self._opaque(call, call.args)

    # -- calls that move elements ------------------------------------------------------------------

    def _copy(self, call: Call, args: Arguments) -> Any:
        read = args[known_operators.COPIES[call.op]][1]
        # A term stands for elements in any layout. Calls that depend on a layout have it among their arguments.
        if call.value.dtype == self.graph.calls[read].value.dtype:
            return self.values[read]
        found = self._exact(call, args) if call.op == known_operators.CAST else None
        return self._opaque(call, call.args) if found is None else found

    def _view(self, call: Call, read: int) -> Any:
        source, place = self.graph.calls[read].value, self.values[read]
        # A term has one dtype; bits of another would need a model of memory.
        if any(x.dtype != source.dtype for x in call.results):
            raise refuse(call, f"{call.op} is not understood: it reads memory as another dtype")
        if call.op in known_operators.WAITS and call.value == source:
            return place
        # A window consists of numbers. A view of data-dependent size becomes a `move` term instead, which no rule
        # rewrites: it only equals the same operator on the same value, or for a reshape any to the same shape.
        if not all(x.is_closed for x in (source, *call.results)):
            if not call.op.startswith(("aten.", "bitproof.")):
                raise refuse(call, f"{call.op} gives a view, whose place is unknown where a size depends on data")
            if call.op not in known_operators.RESHAPES:
                return self._results(call, "move", call.op, self._arguments(call, call.args, layouts=False))
            shape = ("list", *self.symbols.sizes(call.value.shape))
            return self._results(call, "move", "reshape", (("self", ("value", place)), ("shape", shape)))
        found = []
        for w in windows_of(call, source):
            if w is None:
                raise refuse(call, f"{call.op} shows what is no part of what it reads")
            found.append(place if w == whole(source.shape) else self.table.view(place, w))
        return found if isinstance(call.value, tuple) else found[0]

    def _refuse_open_pairs(self, call: Call) -> None:
        # A view of real numbers as complex numbers, or the reverse, is an opaque term, but only if no size depends on
        # data.
        read = [x for i in call.reads[:1] for x in self.graph.calls[i].results]
        shared = read and call.results and all(read[0].storage == x.storage for x in call.results)
        if shared and not all(x.is_closed for x in (*read, *call.results)):
            raise refuse(call, f"{call.op} is not understood: it reads memory as another dtype")

    def _cat(self, call: Call, args: Arguments) -> Any:
        reads = [item[1] for item in args["tensors"][1:]]
        tensors = [self.graph.calls[read].value for read in reads]
        if not all(x.dtype == call.value.dtype and all(isinstance(n, int) for n in x.shape) for x in tensors):
            return self._opaque(call, call.args)
        dim = args.get("dim", 0) % len(call.value.shape)
        parts = []
        for read, tensor in zip(reads, tensors, strict=True):
            part = self.values[read]
            if call.op == "aten.stack.default":
                shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
                part = self.table.view(part, whole(shape))
            elif tensor.shape == (0,) and len(call.value.shape) != 1:
                continue  # `cat` ignores these, whatever the shape of the others
            parts.append(part)
        return self.table.make(("cat", tuple(parts), dim))

    # -- calls that compute -----------------------------------------------------------------------------

    def _exact(self, call: Call, args: Arguments) -> int | None:
        own, tensors = call.value, [self.graph.calls[read].value for read in call.reads]
        name = known_operators.EXACT.get(call.op, "cast")
        # A division by a power of 2 and a square become products, so that either form is proved equal to the other:
        # `x / 4` to `x * 0.25`, and `x ** 2` to `x * x`.
        if call.op in known_operators.DIVISIONS:
            name, args = "mul", {**args, "other": known_operators.inverse(args["other"], own.dtype)}
        if call.op == known_operators.POWER:
            is_square = (
                known_operators.number_in(args["exponent"], own.dtype) == 2 and own.dtype in known_operators.FLOATS
            )
            name, args = "mul", {"self": args["self"], "other": args["self"] if is_square else None}
        # Any further argument, such as the factor `alpha` of `add`, changes the result.
        fits = (*args,) in _OPERANDS and all(x.device == own.device for x in tensors)
        if not fits or not known_operators.is_exact(name, own.dtype, [x.dtype for x in tensors]):
            return None
        # A number among the operands becomes a tensor filled with this number.
        operands = tuple(self._operand(value, tensors[0].dtype, own.shape) for value in args.values())
        return None if None in operands else self.table.make(("exact", name, own.dtype, own.device, operands))

    def _operand(self, value: Any, dtype: str, shape: tuple[Size, ...]) -> int | None:
        if isinstance(value, tuple) and value[:1] == ("node",):
            place, own = self.values[value[1]], self.graph.calls[value[1]].value.shape
            if own == shape:
                return int(place)
            return self.table.view(place, expanded(own, shape)) if _is_closed((*own, *shape)) else None
        is_kept = isinstance(value, int) or dtype in known_operators.FLOATS  # integers combined with 2.0 become floats
        return self._filled(value, dtype, shape) if is_kept else None

    def _filled(self, value: Any, dtype: str, shape: tuple[Size, ...]) -> int | None:
        number = known_operators.number_in(value, dtype)
        return None if number is None or not _is_closed(shape) else self.table.filled(shape, dtype, number)

    def _filling(self, call: Call, args: Arguments) -> int | None:
        return self._filled(known_operators.number_filled(call), call.value.dtype, call.value.shape)

    def _padded(self, call: Call, args: Arguments) -> int | None:
        read, pads = args["self"][1], args["pad"][1:]
        source, place = self.graph.calls[read].value, self.values[read]
        if not _is_closed((*source.shape, *pads)) or min(pads, default=0) < 0:
            return None
        shape = list(source.shape)
        # A padded tensor is a concatenation with filled tensors, along each padded dim.
        # Paddings are listed from the last dim on.
        for count, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
            dim = len(shape) - 1 - count
            shapes = [(*shape[:dim], n, *shape[dim + 1 :]) for n in (before, after)]
            ends = [self._filled(args.get("value", 0), source.dtype, x) for x in shapes]
            if None in ends:
                return None
            place = self.table.make(("cat", (ends[0], place, ends[1]), dim))
            shape[dim] += before + after
        return int(place)

    def _collective(self, call: Call, args: Arguments) -> Any:
        read = args["input"][1]
        source, ranks = self.graph.calls[read].value, self._ranks(call, args)
        if call.op not in (known_operators.GATHER, known_operators.REDUCE):
            return self._opaque(call, call.args)
        if not all(isinstance(size, int) for size in source.shape):  # whatever its strides: torch sends it row-major
            raise refuse(call, "a collective of a tensor whose size depends on data")
        # The size is an argument of its own, so a wrong pass may change it alone.
        if args["group_size"] != len(ranks[0]):
            raise refuse(call, f"a collective among {args['group_size']} ranks of a group of {len(ranks[0])}")
        if call.op == known_operators.GATHER:
            gathered = self.table.make(("gather", self.values[read], ranks))
            return self.table.view(gathered, whole(call.value.shape))
        # Rank r receives the sum of the r-th row of every rank, so the input is viewed as a row for each rank.
        columns = len(ranks[0]), math.prod(source.shape) // len(ranks[0])
        rows = self.table.view(self.values[read], whole(columns))
        operation = f"{args['reduce_op'][1]} in {source.dtype} on {source.device}"
        reduced = self.table.make(("reduce", rows, operation, ranks))
        return self.table.view(reduced, whole(call.value.shape))

    def _ranks(self, call: Call, args: Arguments) -> Any:
        kind, ranks = args["group_name"]
        if kind != "ranks":
            raise refuse(call, f"a collective in process group {ranks}, which is not in the table of groups")
        return ranks

    def _opaque(self, call: Call, given: tuple[tuple[str, Any], ...]) -> Any:
        arguments = self._arguments(call, given, layouts=True)
        # The generator's state is an argument: two draws are equal only if all draws before them are.
        if call.random:
            own = ("value", self.table.make(self.generator))  # instead of the None that an overload takes
            arguments = tuple((dict(arguments) | {"generator": own}).items())
        found = self._results(call, "op", call.op, arguments)
        if call.random:
            self.generator = ("draws", found if isinstance(found, int) else found[0])
        return found

    def _results(self, call: Call, kind: str, op: str, arguments: Any) -> Any:
        # The rows that an all-to-all delivers follow from its split sizes, so these name its symbol, not the call.
        if call.op == "_c10d_functional.all_to_all_single.default":
            self.symbols.name_rows(call)
        one = call.value if isinstance(call.value, Tensor) else None
        if not call.results or not all(isinstance(x, Tensor | None) for x in _listed(call.value)):
            raise refuse(call, f"{call.op} gives what is no tensor")
        term = self.table.make((kind, op, arguments, one and one.dtype, one and _known_sizes(one.shape)))
        # Data-dependent sizes of the results get terms as well.
        self.symbols.name_extents(call, term, tuple(size for x in call.results for size in x.shape))
        if one is not None:
            return term
        return [
            None if x is None else self.table.make(("out", term, place, x.dtype, _known_sizes(x.shape)))
            for place, x in enumerate(call.value)
        ]

    # -- arguments and sizes --------------------------------------------------------------------------

    def _arguments(self, call: Call, given: tuple[tuple[str, Any], ...], *, layouts: bool) -> Any:
        return tuple((name, self._argument(call, value, layouts)) for name, value in given)

    def _argument(self, call: Call, value: Any, layouts: bool) -> Any:
        match value:
            case ("node", index):
                place, tensor = self.values[index], self.graph.calls[index].value
                if not isinstance(tensor, Tensor):
                    raise refuse(call, "an argument that is no tensor")
                return self._laid_out(place, tensor) if layouts else ("value", place)
            case ("list", *items):
                return ("list", *(self._argument(call, item, layouts) for item in items))
            case ("size", *_):
                return self.symbols.size(value)
        return value

    def _laid_out(self, place: int, x: Tensor) -> Term:
        # Kernels choose vector instructions by alignment, so only its class counts, not the offset itself.
        offset = self.symbols.size(x.offset)
        alignment = alignment_of(x.dtype, offset, x.device) if isinstance(offset, int) else offset
        return (
            "tensor",
            place,
            x.dtype,
            x.device,
            self.symbols.sizes(x.shape),
            self.symbols.sizes(x.strides),
            alignment,
        )

    # -- writes and refusals ------------------------------------------------------------------------

    def _write(self, index: int, call: Call, args: Arguments) -> Any:
        target = self.memory.written(call, args)
        value = self._written_value(call, args, [self.graph.calls[read].value for read in call.reads])
        for owner in self.memory.overwrite(index, target):
            self.values[owner] = value
        return value

    def _written_value(self, call: Call, args: Arguments, read: list[Tensor]) -> Any:
        # A `copy_` from another dtype or shape casts or broadcasts: that is an opaque term, below.
        if call.op == known_operators.COPY_INTO and len({(x.dtype, x.shape) for x in read}) == 1:
            return self.values[dict(call.args)["src"][1]]
        if call.op in known_operators.FILLS and (found := self._filling(call, args)) is not None:
            return found
        if call.op in known_operators.IN_PLACE:
            plain = replace(call, op=known_operators.IN_PLACE[call.op])
            if (found := self._exact(plain, args)) is not None:
                return found
            # So `x.add_(y)` on one side equals `x = x + y` on the other, even where the sum is not exact.
            if len(read) == len(args) and {x.dtype for x in read} <= known_operators.FLOATS | known_operators.WHOLE:
                return self._opaque(plain, call.args)
        return self._opaque(call, call.args)

    def _refuse_unreadable(self, index: int, reader: Call) -> None:
        if index in self.refused:
            raise self.refused[index]
        self.memory.refuse_stale(index, reader)

    def _distrust(self, index: int, call: Call) -> None:
        # A refused call may have written its arguments and drawn random numbers.
        # A call that returns nothing must have some effect, even if its schema states no write.
        if call.writes or call.value is None or call.op.startswith("higher_order."):
            self.memory.distrust(index)
        if call.random:
            self.generator = ("fresh", SIDES[self.side], index, "generator", ())


_OPERANDS = (("self",), ("self", "other"), ("condition", "self", "other"))
"""The names of the arguments that an exact operator may have. With any other argument, no rule rewrites its term."""


def _is_closed(sizes: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _known_sizes(shape: tuple[Size, ...]) -> tuple[int | None, ...]:
    # A term needs no data-dependent sizes, because its operator and arguments determine them.
    return tuple(size if isinstance(size, int) else None for size in shape)


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)

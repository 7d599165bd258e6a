"""The term of each call of a graph, derived by the checker from the graph as data.

docs/explanation/proving.md describes each kind of call. Any other call is opaque, with the layouts of all tensors that
it reads. A call that cannot be derived has no term, and neither have its readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import frexp, isfinite, prod
from typing import Any

from bitproof.harness.certificate import operator_names as known
from bitproof.harness.certificate import windows
from bitproof.harness.certificate.data import FLOATS, Call, Graph, Size, Tensor, Term, nodes_in
from bitproof.harness.certificate.errors import RejectedError, require
from bitproof.harness.certificate.in_flight import InFlight
from bitproof.harness.certificate.rules import Terms
from bitproof.harness.certificate.types import ARITY, NUMBER, has, is_exact, nearest


class UnderivableError(Exception):
    """A call that is not supported, or that reads an unknown value."""


class Walk:
    """One graph, walked from its first call to its last. `values` are indices of terms, None for refused calls."""

    def __init__(self, terms: Terms, graph: Graph, side: str) -> None:
        self.terms, self.graph, self.side = terms, graph, side
        self.values: list[Any] = []
        self.stale: set[int] = set()  # calls whose values were overwritten, in part or with unknown values
        self.in_flight = InFlight(graph)
        self.inputs: dict[str, tuple[int, int]] = {}  # and constants: their calls, and the terms that they come with
        self.symbols: dict[str, int] = {}
        self.owners: dict[int, tuple[int, ...]] = {}  # by storage, the calls whose values are in it
        self.generator: Term = ("seed",)

    def take(self, call: Call) -> None:
        """Process the next call: its term, and its writes."""
        index, value = len(self.values), None
        try:
            value = self._derive(index, call, dict(call.args))
        except UnderivableError:
            if call.random:
                self.generator = ("fresh", self.side, index, "generator", ())
        if call.writes or (value is None and (call.value is None or call.op.startswith("higher_order."))):
            self._overwrite(call, value)
        self.values.append(value)
        several = _listed(call.value) if call.results else (call.value,)  # a size is a tuple, but no list of values
        for x, place in zip(several, _listed(value), strict=value is not None):
            told = (x.dtype, _pattern(x.shape)) if isinstance(x, Tensor) else NUMBER
            if place is not None and self.terms.types[place] != told:
                raise RejectedError(f"{call.name} gives {told}, which its term is not")
        for x in call.results:
            self.owners[x.storage] = (*self.owners.get(x.storage, ()), index)

    def outputs(self) -> dict[str, tuple[Any, int]]:
        """The terms of returned values and of inputs at the end, with those at the start (-1 for none)."""
        found = {f"written {name}": place for name, place in self.inputs.items()}
        found |= {name: (index, -1) for name, index in self.graph.outputs}
        require(len(found) == len(self.inputs) + len(self.graph.outputs), "a name stands for two outputs")
        return {name: (self._output(index), before) for name, (index, before) in found.items()}

    def _output(self, index: int) -> Any:
        """The final value of a call; None if it is unknown or still in flight."""
        value = self._known(index)
        return None if self.in_flight.is_filling(index) else value

    def _known(self, index: int) -> Any:
        """The value of a call; None if it is refused or was overwritten."""
        require(0 <= index < len(self.values), lambda: f"call {index} is read before it runs")
        return None if index in self.stale else self.values[index]

    def _derive(self, index: int, call: Call, args: Mapping[str, Any]) -> Any:
        op, own, find = call.op, call.value, self.terms.find
        places = [self._known(read) for read in call.reads]
        read = [self.graph.calls[index].value for index in call.reads]
        is_known = op in known.UNDERSTOOD or not op.startswith(known.REFUSED)
        is_known &= args.get("group_name", ("ranks",))[0] == "ranks" and "non_blocking" not in args
        if None in places or not is_known or self.in_flight.races(call):
            raise UnderivableError
        if call.writes:
            self._check_write(call, args)
        if self.in_flight.run(index, call, call.reads[_source(call)] if op in known.WAITS else None):
            raise UnderivableError
        match op, call.args:
            case ("input", ()) | ("constant", (("digest", ("str", _)),)):
                require(call.name not in self.inputs, f"{call.name} is two inputs")
                before = {self.graph.calls[owner].op for owner in self.owners.get(own.storage, ())}
                require(not before or before == {op} == {"constant"}, f"{call.name} lies where another call does")
                self.inputs[call.name] = index, find(op, args["digest"][1] if args else call.name, own.dtype, own.shape)
                return self.inputs[call.name][1]
            case "getitem", (("0", _), ("1", place)):
                if not isinstance(places[0], list):
                    raise UnderivableError
                require(place >= 0 and own == read[0][place], f"{call.name} is not what it takes")
                return places[0][place]
            case "aten._local_scalar_dense.default", (("self", _),):
                self._name((own,), lambda _: ("item", places[0]))
                return find("item", places[0])
        source = _source(call) if op in known.SOURCES else 0
        is_copy = op in known.COPIES and (own.dtype, own.shape) == (read[source].dtype, read[source].shape)
        if is_copy or (op in known.WAITS and own == read[source]):
            return places[source]
        term = None
        if op in known.EXACT or op in known.DIVISIONS or op == known.POWER:
            term = self._exact(call, args, read)
        elif op in known.FILLS or op == known.PAD:
            term = self._pad(places[source], read[source], args) if op == known.PAD else self._fill(call, args)
        if term is not None:
            return term
        if op in ("aten.cat.default", "aten.stack.default"):
            if all(x.dtype == own.dtype and _is_closed(x.shape) for x in read):
                return self._cat(call, args, places, read)
        elif op in (known.GATHER, known.REDUCE):
            return self._collective(call, args, places[source], read[source])
        elif known.is_unwritten(op):
            fresh = "fresh", self.side, index, own.dtype, _pattern(own.shape)
            return self._opaque(call, {}) if 0 in own.shape else find(*fresh)
        elif call.results and read and isinstance(read[0], Tensor) and not call.writes:
            is_open = not all(x.is_closed for x in (read[0], *call.results))
            if op in known.SHOWING or (is_open and all(x.storage == read[0].storage for x in call.results)):
                require(_source(call) == 0, f"{call.name} reads another tensor before what it shows")
                return self._view(call, args, None if is_open else places[0], read[0])
        if op in known.CARRIES or (op in known.UPDATES and all(map(_is_in_rows, read))):
            return self._results(call, "move", op, args)
        return self._opaque(call, args)

    # -- what moves elements ------------------------------------------------------------------------

    def _view(self, call: Call, args: Mapping[str, Any], place: int | None, x: Tensor) -> Any:
        """Results in the memory of `x`, or copies of its parts or of the whole. With a data-dependent size (then
        `place` is None) the operator's name determines the elements."""
        is_told = place is not None or call.op.startswith(("aten.", "bitproof."))
        if any(y.dtype != x.dtype for y in call.results) or not is_told:
            raise UnderivableError
        if place is None and call.op in known.RESHAPES:
            return self._results(call, "move", "reshape", {"self": args["self"], "shape": ("list", *call.value.shape)})
        if place is None:
            return self._results(call, "move", call.op, args)
        if all(y.storage == x.storage for y in call.results):
            lie = (windows.normal(y.shape, y.strides, y.offset - x.offset) for y in call.results)
            shown = [windows.translated(x.shape, x.strides, windows.steps_of(x.shape), w) for w in lie]
        elif call.op == known.SPLIT:
            dim = _dim(call, len(x.shape))
            shown = [*windows.parts(windows.full(x.shape), dim, (y.shape[dim] for y in call.results))]
        else:
            require(call.op in known.RESHAPES, f"{call.name} shows nothing")
            return self._whole(place, call.value.shape)
        if not shown or None in shown:
            raise UnderivableError
        found = [place if w == windows.full(x.shape) else self.terms.view(place, w) for w in shown if w]
        return found if isinstance(call.value, tuple) else found[0]

    def _whole(self, place: int, shape: Sequence[int]) -> int:
        """All elements of a term in their order, in another shape."""
        require(prod(shape) == prod(self.terms.shape(place)), lambda: f"{shape} is not as many elements as there are")
        return self.terms.view(place, windows.full(shape))

    def _cat(self, call: Call, args: Mapping[str, Any], places: Sequence[int], read: Sequence[Tensor]) -> int:
        dim, rank = _dim(call, len(call.value.shape)), len(call.value.shape)
        if call.op == "aten.stack.default":
            shapes = ((*x.shape[:dim], 1, *x.shape[dim:]) for x in read)
            return self.terms.find("cat", tuple(map(self._whole, places, shapes)), dim)
        # `cat` ignores empty vectors, whatever the shape of the others
        parts = (place for place, x in zip(places, read, strict=True) if rank == 1 or x.shape != (0,))
        return self.terms.find("cat", tuple(parts), dim)

    def _collective(self, call: Call, args: Mapping[str, Any], place: int, x: Tensor) -> int:
        ranks, size = args["group_name"][1], args["group_size"]
        if not _is_closed(x.shape) or size != len(ranks[0]):
            raise UnderivableError
        if call.op == known.GATHER:
            return self._whole(self.terms.find("gather", place, ranks), call.value.shape)
        require(args["reduce_op"][0] == "str", f"{call.name} reduces by no name")
        rows = self._whole(place, (size, prod(x.shape) // size))
        reduced = self.terms.find("reduce", rows, f"{args['reduce_op'][1]} in {x.dtype} on {x.device}", ranks)
        return self._whole(reduced, call.value.shape)

    # -- what computes at each place by itself -------------------------------------------------------

    def _exact(self, call: Call, args: Mapping[str, Any], read: Sequence[Tensor]) -> int | None:
        """The result of an exact operator, from tensors on one device and at most one number; None for other dtypes or
        arguments."""
        own, name, operands = call.value, known.EXACT.get(call.op, "mul"), []
        if call.op == known.POWER:
            if own.dtype not in FLOATS or _number(args["exponent"], own.dtype) != 2:
                return None
            args, read = {"self": args["self"], "other": args["self"]}, (*read, *read)
        dtypes = tuple(x.dtype for x in read)
        fits = [*args] in known.OPERANDS and len(args) == ARITY[name] and dtypes and is_exact(name, own.dtype, dtypes)
        if not fits or any(x.device != own.device or not _are_alike(x.shape, own.shape) for x in read):
            return None
        shapes = {x.shape for x in read}
        require(shapes == {own.shape} or windows.broadcast(shapes) == own.shape, f"{call.name} gives another shape")
        if call.op in known.DIVISIONS and nodes_in(args["other"]):
            return None
        for value in args.values():
            if isinstance(value, tuple) and value[0] == "node":
                place, shape = self.values[value[1]], self.graph.calls[value[1]].value.shape
                place = place if shape == own.shape else self.terms.view(place, windows.repeated(shape, own.shape))
            else:
                number = _number(value, dtypes[0]) if isinstance(value, int) or dtypes[0] in FLOATS else None
                if call.op in known.DIVISIONS and number is not None:
                    number = 1 / number if abs(frexp(number)[0]) == 0.5 else None
                place = self._everywhere(number, dtypes[0], own.shape)
            if place is None:
                return None
            operands.append(place)
        return self.terms.find("exact", name, own.dtype, own.device, tuple(operands))

    def _everywhere(self, number: float | None, dtype: str, shape: Sequence[Size]) -> int | None:
        """A tensor filled with a number; None if the dtype does not have it."""
        if number is None or not has(dtype, number) or not _is_closed(shape):
            return None
        place = self.terms.find("number", dtype, number.hex())
        return self.terms.view(place, windows.normal(shape, (0,) * len(shape), 0)) if shape else place

    def _fill(self, call: Call, args: Mapping[str, Any]) -> int | None:
        number: Any = known.FILLS[call.op]
        own = call.value
        number = _number(args[number] if isinstance(number, str) else number, own.dtype)
        return self._everywhere(number, own.dtype, own.shape)

    def _pad(self, place: int, x: Tensor, args: Mapping[str, Any]) -> int | None:
        """A tensor padded with a number, starting with the last dim."""
        pads, shape = args["pad"][1:], x.shape
        number = _number(args.get("value", 0), x.dtype)
        if not _is_closed((*shape, *pads)) or min(pads, default=0) < 0 or number is None:
            return None
        for dim, before in zip(range(len(shape) - 1, -1, -1), range(0, len(pads), 2), strict=False):
            ends = [self._everywhere(number, x.dtype, windows.put(shape, dim, n)) for n in pads[before : before + 2]]
            place = self.terms.find("cat", (ends[0], place, ends[1]), dim)
            shape = windows.put(shape, dim, shape[dim] + sum(pads[before : before + 2]))
        return place

    # -- what is equal only of equal arguments ------------------------------------------------------

    def _opaque(self, call: Call, args: Mapping[str, Any]) -> Any:
        if call.random:
            args = {**args, "generator": ("value", self.terms.find(*self.generator))}
        told, read = call.op, [self.graph.calls[index].value for index in call.reads]
        if told in known.EXACT and len(read) == len(args) and {x.dtype for x in read} <= {*FLOATS, "int64", "int32"}:
            told = told.replace("_.", ".")  # each element is converted and rounded once, wherever the result lies
        found = self._results(call, "op", told, args)
        if call.random:
            self.generator = "draws", found if isinstance(found, int) else found[0]
        return found

    def _results(self, call: Call, kind: str, op: str, args: Mapping[str, Any]) -> Any:
        several = _listed(call.value)
        if not call.results or not all(isinstance(x, Tensor | None) for x in several):
            raise UnderivableError
        arguments = tuple((name, self._argument(value, kind == "op")) for name, value in args.items())
        if op == known.EXCHANGE:
            self._name_rows(call.value.shape[0], *args["output_split_sizes"][1:])
        told = [x and (x.dtype, _pattern(x.shape)) for x in several]
        is_one = isinstance(call.value, Tensor)
        term = self.terms.find(kind, op, arguments, *(told[0] if is_one else (None, None)))
        self._name((n for x in call.results for n in x.shape), lambda place: ("extent", term, place))
        self._sizes(n for x in call.results for n in (*x.strides, x.offset))  # of symbols that are known
        return term if is_one else [x and self.terms.find("out", term, i, *x) for i, x in enumerate(told)]

    def _argument(self, value: Any, layouts: bool) -> Any:
        match value:
            case ("node", index):
                x, place = self.graph.calls[index].value, self.values[index]
                require(isinstance(x, Tensor), lambda: f"{value} is no tensor")
                if not layouts:
                    return ("value", place)
                bytes_each = known.BYTES.get(x.dtype, 1)
                lead = x.offset * bytes_each % 64 if isinstance(x.offset, int) else self._size(x.offset)
                return ("tensor", place, x.dtype, x.device, self._sizes(x.shape), self._sizes(x.strides), lead)
            case ("list", *items):
                return ("list", *(self._argument(item, layouts) for item in items))
            case ("size", *_):
                return self._size(value)
        return value

    # -- sizes that depend on data --------------------------------------------------------------------

    def _name(self, sizes: Iterable[Size], brings: Callable[[int], Term]) -> None:
        """Name new symbols by their source: a number read, or a position in a call's result."""
        for place, size in enumerate(sizes):
            match size:
                case ("size", (1, name)) if name not in self.symbols:
                    self.symbols[name] = self.terms.find(*brings(place))
            self._size(size)

    def _name_rows(self, rows: Size, first: Size, *others: Size) -> None:
        """For more than two ranks, received rows are the first split plus one symbol for all others."""
        own = first[1:] if isinstance(first, tuple) else ((first,),) * (first != 0)
        for n, *names in rows[1:] if isinstance(rows, tuple) else ():
            if n == len(names) == 1 and names[0] not in self.symbols and {*rows[1:]} == {*own, (n, *names)}:
                self.symbols[names[0]] = self.terms.find("rows", self._sizes(others))

    def _size(self, size: Size) -> Size:
        """A size with each symbol's term for its name."""
        if isinstance(size, int):
            return size
        require(size[0] == "size", f"{size} is no size")
        if any(name not in self.symbols for _, *names in size[1:] for name in names):
            raise UnderivableError
        named = ((n, *sorted(self.symbols[name] for name in names)) for n, *names in size[1:])
        return ("size", *sorted(named, key=lambda product: (product[1:], product[0])))

    def _sizes(self, sizes: Iterable[Size]) -> tuple[Size, ...]:
        return tuple(map(self._size, sizes))

    # -- memory -------------------------------------------------------------------------------------

    def _check_write(self, call: Call, args: Mapping[str, Any]) -> None:
        """A write must cover all of `self` in its layout, without overlapping elements; no collective may be reading
        the memory, and it must not be one of the graph's constants, which the next step would find changed."""
        if call.writes != ("self",) or not call.op.split(".")[1].endswith("_") or args["self"][:1] != ("node",):
            raise UnderivableError
        target = self.graph.calls[args["self"][1]].value
        others = (self.graph.calls[i] for name, value in args.items() if name != "self" for i in nodes_in(value))
        is_torn = any(x.storage == target.storage and x != target for other in others for x in other.results)
        is_flying = bool(self.in_flight.races_of_write(target.storage))
        is_kept = any(self.graph.calls[owner].op == "constant" for owner in self.owners[target.storage])
        if target != call.value or is_torn or is_flying or is_kept or _overlaps(target):
            raise UnderivableError

    def _overwrite(self, call: Call, value: int | None) -> None:
        """Aliases of exactly the written elements get the new value, others become stale. A refused call may have
        written all its inputs: all aliases become stale, also those of collectives in flight."""
        written = [call] if value is not None else [self.graph.calls[read] for read in call.reads]
        for target in (x for several in written for x in several.results):
            for owner in (*self.owners.get(target.storage, ()), *self.in_flight.touching(target.storage)):
                if value is None or self.graph.calls[owner].value != target:
                    self.stale.add(owner)
                elif self.values[owner] is not None:
                    self.values[owner] = value


def _are_alike(shape: Sequence[Size], own: Sequence[Size]) -> bool:
    """Whether operands have the result's shape, or all sizes are numbers."""
    return shape == own or _is_closed((*shape, *own))


def _number(argument: Any, dtype: str) -> float | None:
    """An argument's number in a dtype, rounded to float32 for that dtype; None for anything else, and for a number that
    the dtype does not have."""
    match argument:
        case int() if abs(argument) <= 1 << 53:
            value = float(argument)
        case ("float", text):
            value = float.fromhex(text)
            value = nearest(value) if dtype == "float32" and isfinite(value) else value
        case ("bool", "True" | "False" as text):
            value = float(text == "True")
        case _:
            return None
    return value if has(dtype, value) else None


def _is_in_rows(x: Any) -> bool:
    """Whether a tensor of the CPU lies in rows, without open sizes."""
    is_cpu = isinstance(x, Tensor) and x.is_closed and x.device == "cpu"
    return is_cpu and windows.normal(x.shape, x.strides, 0) == windows.full(x.shape)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _source(call: Call) -> int:
    """The place among the reads of the argument that SOURCES names; of other operators, of the only read."""
    if call.op not in known.SOURCES:
        if len(call.reads) != 1:
            raise UnderivableError
        return 0
    argument = dict(call.args).get(known.SOURCES[call.op])
    if not isinstance(argument, tuple) or argument[0] != "node":
        raise UnderivableError
    return call.reads.index(argument[1])


def _dim(call: Call, rank: int) -> int:
    args = dict(call.args)
    dim, source = args.get("dim", 0), "self" if call.op == known.SPLIT else "tensors"
    require(0 <= dim < rank and {*args} <= {source, "dim"}, f"{dim} is no dim of {rank}")
    return int(dim)


def _pattern(sizes: Sequence[Size]) -> tuple[int | None, ...]:
    """Sizes, and None for each that depends on data."""
    return tuple(n if isinstance(n, int) else None for n in sizes)


def _is_closed(sizes: Sequence[Size]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _overlaps(x: Tensor) -> bool:
    """Whether two indices may be the same element. With data-dependent sizes, only row-major layouts exclude it."""
    if not _is_closed(x.shape + x.strides):
        return not _is_closed(x.shape[1:] + x.strides) or x.strides != windows.steps_of((1, *x.shape[1:]))
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride <= reach:  # each stride must exceed the extent of all smaller ones
            return True
        reach += (size - 1) * stride
    return False

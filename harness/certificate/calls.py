"""The term of each call of a graph, derived by the checker from the graph as data.

What is said of each kind of call is what docs/proving.md says; a call of no kind here is opaque, with the layouts of
all tensors that it reads. A call that cannot be derived has no term, and so has none that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from harness.certificate import windows
from harness.certificate.data import Call, Graph, Size, Tensor, Term, nodes_in
from harness.certificate.rules import Terms, require

FLOATS = ("float64", "float32", "bfloat16", "float16")
CAST = "aten._to_copy.default"
EXACT = {"aten.add.Tensor": "add", "aten.sub.Tensor": "sub", "aten.mul.Tensor": "mul", "aten.neg.default": "neg"}
COPIES = (CAST, "aten.clone.default", "aten.contiguous.default", "bitproof.offload.default", "bitproof.reload.default")
RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
SPLIT = "aten.split_with_sizes_copy.default"
WAITS = ("_c10d_functional.wait_tensor.default", "bitproof.wait_offload.default", "bitproof.wait_reload.default")
GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
EXCHANGE = "_c10d_functional.all_to_all_single.default"
COLLECTIVES = (GATHER, REDUCE, EXCHANGE, "_c10d_functional.all_reduce.default")
SHOWING = ("view", SPLIT, *RESHAPES, *WAITS)
LAUNCHES = (*COLLECTIVES, *COPIES[3:])
UNDERSTOOD = (*COLLECTIVES, *WAITS, "higher_order.flex_attention", "higher_order.flex_attention_backward")
REFUSED = ("aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default")
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


class RefusedError(Exception):
    """A call that is not understood, or that reads what is not known."""


class Walk:
    """One graph, walked from its first call to its last. `values` are the places of terms, None for what is refused."""

    def __init__(self, terms: Terms, graph: Graph, side: str) -> None:
        self.terms, self.graph, self.side, self.groups = terms, graph, side, dict(graph.groups)
        self.values: list[Any] = []
        self.stale: set[int] = set()  # calls whose values were overwritten, in part or with what is not known
        self.flying: dict[int, set[int]] = {}  # a launch, and the storages that it writes and reads
        self.inputs: dict[str, tuple[int, int]] = {}  # their calls, and the terms that they come with
        self.symbols: dict[str, int] = {}
        self.owners: dict[int, tuple[int, ...]] = {}  # by storage, the calls whose values lie there
        self.generator: Term = ("seed",)

    def take(self, call: Call) -> None:
        """The next call: its term, and what it writes."""
        index, value = len(self.values), None
        try:
            value = self._derive(index, call, dict(call.args))
        except RefusedError:
            if call.random:
                self.generator = ("fresh", self.side, index, "generator", ())
        if call.writes or (value is None and call.op.startswith("higher_order.")):
            self._overwrite(call, value)
        self.values.append(value)
        for x in call.results:
            self.owners[x.storage] = (*self.owners.get(x.storage, ()), index)

    def readable(self, index: int, awaited: int | None = None) -> Any:
        """The value of a call. Raises RefusedError where it is not known, or on its way and not `awaited`."""
        require(0 <= index < len(self.values), f"call {index} is read before it runs")
        if self.values[index] is None or index in self.stale or (index in self.flying and index != awaited):
            raise RefusedError
        return self.values[index]

    def is_written(self, name: str) -> bool:
        """Whether an input holds something else by now."""
        index, term = self.inputs[name]
        return index in self.stale or self.values[index] != term

    def _derive(self, index: int, call: Call, args: Mapping[str, Any]) -> Any:
        op, own, find = call.op, call.value, self.terms.find
        awaited = call.reads[0] if op in WAITS else None
        places = [self.readable(read, awaited) for read in call.reads]
        read = [self.graph.calls[index].value for index in call.reads]
        if op in REFUSED or (op.startswith(("_c10d_functional.", "higher_order.")) and op not in UNDERSTOOD):
            raise RefusedError
        if call.writes:
            self._check_write(call, args)
            return self._opaque(call, args)
        if op in LAUNCHES:
            self.flying[index] = {own.storage, read[0].storage}
        if awaited is not None:
            self.flying.pop(awaited, None)
        match op, call.args:
            case "input", ():
                require(call.name not in self.inputs, f"{call.name} is two inputs")
                term = find("input", call.name, own.dtype, own.shape)
                self.inputs[call.name] = index, term
                return term
            case "constant", (("digest", ("str", digest)),):
                return find("constant", digest, own.dtype, own.shape)
            case "getitem", (_, ("1", place)):
                require(own == read[0][place], f"{call.name} is not what it takes")
                return places[0][place]
            case "aten._local_scalar_dense.default", (("self", _),):
                term = find("item", places[0])
                match own:
                    case ("size", (1, name)):
                        self.symbols.setdefault(name, term)
                self._sizes([own])  # of symbols that are known
                return term
        if op in COPIES and own.dtype == read[0].dtype:
            require(own.shape == read[0].shape, f"{call.name} copies what has another shape")
            if "non_blocking" in args:
                raise RefusedError
            return places[0]
        if _is_exact(call, read):
            name = "cast" if op == CAST else EXACT[op]
            operands = (
                place if x.shape == own.shape else self.terms.view(place, windows.repeated(x.shape, own.shape))
                for place, x in zip(places, read, strict=True)
            )
            return find("exact", name, own.dtype, own.device, tuple(operands))
        if op in ("aten.cat.default", "aten.stack.default"):
            if all(x.dtype == own.dtype and _is_closed(x.shape) for x in read):
                return self._cat(call, args, places, read)
        elif op in (GATHER, REDUCE):
            return self._collective(call, args, places[0], read[0])
        elif op.split(".")[-2:][0] in UNWRITTEN:
            return self._opaque(call, {}) if 0 in own.shape else find("fresh", self.side, index, own.dtype, own.shape)
        elif call.results and read and isinstance(read[0], Tensor):
            is_open = not all(x.is_closed for x in (read[0], *call.results))
            if op in SHOWING or (is_open and read[0].storage == call.results[0].storage):
                return self._open_view(call, args) if is_open else self._view(call, args, places[0], read[0])
        return self._opaque(call, args)

    # -- what moves elements ------------------------------------------------------------------------

    def _open_view(self, call: Call, args: Mapping[str, Any]) -> Any:
        if call.op not in RESHAPES:
            return self._results(call, "move", call.op, args)
        return self._results(call, "move", "reshape", {"self": args["self"], "shape": ("list", *call.value.shape)})

    def _view(self, call: Call, args: Mapping[str, Any], place: int, x: Tensor) -> Any:
        """Results that lie in the memory of `x`; parts of it, or all of it in its order, in memory of their own."""
        shown: list[windows.Window | None]
        if all(y.storage == x.storage for y in call.results):
            lie = [windows.normal(y.shape, y.strides, y.offset - x.offset) for y in call.results]
            shown = [windows.translated(x.shape, x.strides, windows.steps_of(x.shape), w) for w in lie]
        elif call.op == SPLIT:
            dim = _dim(args, len(x.shape))
            ends = accumulate((y.shape[dim] for y in call.results), initial=0)
            shown = [windows.part(x.shape, dim, a, b) for a, b in pairwise(ends)]
            require(windows.put(x.shape, dim, sum(w[0][dim] for w in shown if w)) == x.shape, f"{call.name} differs")
        else:
            shown = [windows.full(call.value.shape)]
            require(call.op in RESHAPES and prod(call.value.shape) == prod(x.shape), f"{call.name} differs")
        if any(y.dtype != x.dtype for y in call.results):
            raise RefusedError
        found = []
        for y, w in zip(call.results, shown, strict=True):
            if w is None:
                raise RefusedError
            require(w[0] == y.shape, f"{call.name} gives another shape")
            found.append(place if w == windows.full(x.shape) else self.terms.view(place, w))
        return found if isinstance(call.value, tuple) else found[0]

    def _cat(self, call: Call, args: Mapping[str, Any], places: Sequence[int], read: Sequence[Tensor]) -> int:
        rank = len(call.value.shape)
        dim, parts = _dim(args, rank), list(places)
        if call.op == "aten.stack.default":
            each = ((*x.shape[:dim], 1, *x.shape[dim:]) for x in read)
            parts = [self.terms.view(place, windows.full(shape)) for place, shape in zip(places, each, strict=True)]
        elif rank > 1:  # `cat` passes over empty vectors, whatever the shape of the others
            parts = [place for place, x in zip(places, read, strict=True) if x.shape != (0,)]
        found = self.terms.find("cat", tuple(parts), dim)
        require(self.terms.shape(found) == call.value.shape, f"{call.name} gives another shape")
        return found

    def _collective(self, call: Call, args: Mapping[str, Any], place: int, x: Tensor) -> int:
        ranks = self._argument(args["group_name"], "group_name")[1]
        lies_in_order = _is_closed(x.shape) and windows.normal(x.shape, x.strides, 0) == windows.full(x.shape)
        if not lies_in_order or args["group_size"] != len(ranks[0]):
            raise RefusedError
        if call.op == GATHER:
            moved = self.terms.find("gather", place, ranks)
        else:
            require(args["reduce_op"][0] == "str", f"{call.name} reduces by no name")
            rows = self.terms.view(place, windows.full((len(ranks[0]), prod(x.shape) // len(ranks[0]))))
            moved = self.terms.find("reduce", rows, f"{args['reduce_op'][1]} in {x.dtype}", ranks)
        return self.terms.view(moved, windows.full(call.value.shape))

    # -- what is equal only of equal arguments ------------------------------------------------------

    def _opaque(self, call: Call, args: Mapping[str, Any]) -> Any:
        if call.random:
            args = {**args, "generator": ("value", self.terms.find(*self.generator))}
        found = self._results(call, "op", call.op, args)
        if call.random:
            self.generator = "draws", found if isinstance(found, int) else found[0]
        return found

    def _results(self, call: Call, kind: str, op: str, args: Mapping[str, Any]) -> Any:
        several = call.value if isinstance(call.value, tuple) else (call.value,)
        if not call.results or not all(isinstance(x, Tensor | None) for x in several):
            raise RefusedError
        arguments = tuple((name, self._argument(value, name, kind == "op")) for name, value in args.items())
        if op == EXCHANGE:
            self._name_rows(call.value.shape[0], *args["output_split_sizes"][1:])
        shapes = [x.shape if x is not None and _is_closed(x.shape) else None for x in several]
        is_one = isinstance(call.value, Tensor)
        told = (call.value.dtype, shapes[0]) if is_one else (None, None)
        term = self.terms.find(kind, op, arguments, *told)
        for place, size in enumerate(n for x in call.results for n in x.shape):
            match size:
                case ("size", (1, name)) if name not in self.symbols:
                    self.symbols[name] = self.terms.find("extent", term, place)
        self._sizes(n for x in call.results for n in (*x.shape, *x.strides, x.offset))  # of symbols that are known
        if is_one:
            return term
        return [
            None if x is None else self.terms.find("out", term, place, x.dtype, shape)
            for place, (x, shape) in enumerate(zip(several, shapes, strict=True))
        ]

    def _name_rows(self, rows: Size, first: Size, *others: Size) -> None:
        """Among more than two ranks rows that arrive are the first split, and one symbol for all others."""
        own = first[1:] if isinstance(first, tuple) else ((first,),) * (first != 0)
        for product in rows[1:] if isinstance(rows, tuple) else ():
            if product[0] == 1 and product[1:][0] not in self.symbols and {*rows[1:]} == {*own, product}:
                self.symbols[product[1]] = self.terms.find("rows", self._sizes(others))

    def _argument(self, value: Any, name: str = "", layouts: bool = True) -> Any:
        match value:
            case ("node", index):
                x, place = self.graph.calls[index].value, self.values[index]
                if not isinstance(x, Tensor):
                    raise RefusedError
                if not layouts:
                    return ("value", place)
                [offset] = self._sizes((x.offset,))
                lead = offset * BYTES.get(x.dtype, 1) % 64 if isinstance(offset, int) else offset
                return ("tensor", place, x.dtype, x.device, self._sizes(x.shape), self._sizes(x.strides), lead)
            case ("list", *items):
                return ("list", *(self._argument(item, "", layouts) for item in items))
            case ("size", *_):
                return self._sizes((value,))[0]
            case ("str", group) if name == "group_name":
                if group not in self.groups:
                    raise RefusedError
                return ("ranks", self.groups[group])
        return value

    def _sizes(self, sizes: Iterable[Size]) -> tuple[Size, ...]:
        """Sizes with each symbol's term for its name."""
        found: list[Size] = []
        for size in sizes:
            if not isinstance(size, int):
                if any(name not in self.symbols for _, *names in size[1:] for name in names):
                    raise RefusedError
                named = ((n, *sorted(self.symbols[name] for name in names)) for n, *names in size[1:])
                size = ("size", *sorted(named, key=lambda product: (product[1:], product[0])))
            found.append(size)
        return tuple(found)

    # -- memory -------------------------------------------------------------------------------------

    def _check_write(self, call: Call, args: Mapping[str, Any]) -> None:
        """A write must be of all of `self` as it lies, to memory that nobody else is reading or walks twice."""
        if call.writes != ("self",) or not call.op.split(".")[1].endswith("_") or args["self"][:1] != ("node",):
            raise RefusedError
        target = self.graph.calls[args["self"][1]].value
        others = (read for name, value in args.items() if name != "self" for read in nodes_in(value))
        is_torn = any(
            x.storage == target.storage and x != target for read in others for x in self.graph.calls[read].results
        )
        is_flying = any(target.storage in storages for storages in self.flying.values())
        if target != call.value or is_torn or is_flying or _overlaps(target):
            raise RefusedError

    def _overwrite(self, call: Call, value: int | None) -> None:
        """Names for exactly what was written get the new value, others for that memory are stale; all where the call
        is refused, which may have written whatever it reads."""
        written = [call] if value is not None else [self.graph.calls[read] for read in call.reads]
        for target in (x for several in written for x in several.results):
            for owner in self.owners.get(target.storage, ()):
                if value is None or self.graph.calls[owner].value != target:
                    self.stale.add(owner)
                elif self.values[owner] is not None:
                    self.values[owner] = value


def _is_exact(call: Call, read: Sequence[Any]) -> bool:
    """Whether a call computes exactly: an operator that does, of tensors alone, on one device, of one dtype but for a
    cast's."""
    own = call.value
    if call.op != CAST and call.op not in EXACT:
        return False
    dtypes = FLOATS if call.op == CAST else {own.dtype} & {*FLOATS}
    return [name for name, _ in call.args] == ["self", "other"][: len(read)] and all(
        x.device == own.device and x.dtype in dtypes and (x.shape == own.shape or _is_closed(x.shape + own.shape))
        for x in (own, *read)
    )


def _dim(args: Mapping[str, Any], rank: int) -> int:
    dim = args.get("dim", 0)
    require(0 <= dim < rank and {*args} <= {"self", "tensors", "dim"}, f"{dim} is no dim of {rank}")
    return int(dim)


def _is_closed(sizes: Sequence[Size]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _overlaps(x: Tensor) -> bool:
    """Whether two indices may mean one element. Where sizes depend on data, only rows in their order never do."""
    if not _is_closed(x.shape + x.strides):
        return not _is_closed(x.shape[1:] + x.strides) or x.strides != windows.steps_of((1, *x.shape[1:]))
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride <= reach:  # strides must grow past all that smaller ones reach
            return True
        reach += (size - 1) * stride
    return False

"""The term of each call of a graph, derived by the checker from the graph as data.

What is said of each kind of call is what docs/proving.md says; a call of no kind here is opaque, with the layouts of
all tensors that it reads. A call that cannot be derived has no term, and so has none that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from harness.certificate import windows
from harness.certificate.data import Call, Graph, Step, Tensor, nodes_in
from harness.certificate.rules import Terms, require

FLOATS = ("float64", "float32", "bfloat16", "float16")
EXACT = {"aten.add.Tensor": "add", "aten.sub.Tensor": "sub", "aten.mul.Tensor": "mul", "aten.neg.default": "neg"}
CAST = "aten._to_copy.default"
SAME = {  # the argument whose values the result has
    "aten.clone.default": "self",
    "aten.detach.default": "self",
    "aten.alias.default": "self",
    "aten.contiguous.default": "self",
    "bitproof.offload.default": "x",
    "bitproof.reload.default": "host",
    "_c10d_functional.wait_tensor.default": "tensor",
    "bitproof.wait_offload.default": "host",
    "bitproof.wait_reload.default": "x",
}
WAITS = ("_c10d_functional.wait_tensor.default", "bitproof.wait_offload.default", "bitproof.wait_reload.default")
GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
EXCHANGE = "_c10d_functional.all_to_all_single.default"
COLLECTIVES = (GATHER, REDUCE, EXCHANGE, "_c10d_functional.all_reduce.default")
LAUNCHES = (*COLLECTIVES, "bitproof.offload.default", "bitproof.reload.default")
PURE = ("higher_order.flex_attention", "higher_order.flex_attention_backward")
REFUSED = ("as_strided.default", "as_strided_copy.default", "as_strided_scatter.default", "view.dtype")
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
FORMATS = ("torch.preserve_format", "torch.contiguous_format", "torch.channels_last", "torch.channels_last_3d")
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


class RefusedError(Exception):
    """A call that is not understood, or that reads what is not known."""


class Walk:
    """One graph, walked from its first call to its last. `values` are the places of terms, None for what is refused."""

    def __init__(self, terms: Terms, graph: Graph, side: str) -> None:
        self.terms, self.graph, self.side = terms, graph, side
        self.values: list[Any] = []
        self.stale: set[int] = set()  # calls whose values were overwritten, in part or with what is not known
        self.flying: dict[int, tuple[int, int]] = {}  # a launch, and the storages that it writes and reads
        self.symbols: dict[str, int] = {}
        self.owners: dict[int, tuple[int, ...]] = {}  # by storage, the calls whose values lie there
        self.generator: tuple[Any, ...] = ("seed",)

    def take(self, steps: Sequence[Step]) -> None:
        """The next call: the steps that its term needs first, then its term, then what it writes."""
        index, call = len(self.values), self.graph.calls[len(self.values)]
        for step in steps:
            self.terms.add(step)
        self.values.append(None)
        value = None
        try:
            value = self._derive(index, call)
        except RefusedError:
            if call.random:
                self.generator = ("fresh", self.side, index, "generator", ())
        is_needed = value is None or not steps or len(self.terms.terms) - 1 in self.terms.used
        require(is_needed, f"call {call.name} does not need the last of its steps")
        if isinstance(value, int) and isinstance(call.value, Tensor) and _is_closed(call.value.shape):
            found = self.terms.dtype(value), self.terms.shape(value)
            require(found == (call.value.dtype, call.value.shape), f"{call.name} gives another dtype or shape")
        if call.writes or (value is None and call.op.startswith("higher_order.")):
            self._overwrite(call, value)
        self.values[index] = value
        for x in _tensors(call.value):
            self.owners[x.storage] = (*self.owners.get(x.storage, ()), index)

    def read(self, index: int) -> Any:
        """The value of a call. Raises RefusedError where it is not known."""
        require(0 <= index < len(self.values), f"call {index} is read before it runs")
        if self.values[index] is None or index in self.stale:
            raise RefusedError
        return self.values[index]

    def _derive(self, index: int, call: Call) -> Any:
        op, args, result, find = call.op, dict(call.args), call.value, self.terms.find
        awaited = _node(args, SAME[op]) if op in WAITS else None
        for source in call.reads:
            self.read(source)
            if source in self.flying and source != awaited:
                raise RefusedError
        is_unknown = op.startswith("_c10d_functional.") and op not in (*COLLECTIVES, *WAITS)
        if is_unknown or op.removeprefix("aten.") in REFUSED or (op.startswith("higher_order.") and op not in PURE):
            raise RefusedError
        if call.writes:
            self._check_write(call, args)
            return self._opaque(call, args)
        if op in LAUNCHES:
            source = self.graph.calls[_node(args, SAME.get(op, "input"))].value
            self.flying[index] = result.storage, source.storage
        if op in (CAST, *SAME):
            require(_is_copy(call), f"{call.name} copies with an argument that none has")
            if awaited is not None:
                self.flying.pop(awaited, None)
            return self._cast(call, args) if op == CAST else self.values[_node(args, SAME[op])]
        if op in EXACT:
            return self._exact(call, EXACT[op], ["self"] if op == "aten.neg.default" else ["self", "other"], args)
        if op in windows.VIEWS:
            return self._view(call, args)
        if op in (GATHER, REDUCE):
            return self._collective(call, args)
        match op, call.args:
            case "input", ():
                return find("input", call.name, result.dtype, result.shape)
            case "constant", (("digest", ("str", digest)),):
                return find("constant", digest, result.dtype, result.shape)
            case "getitem", (("0", ("node", several)), ("1", int(place))):
                return self.values[several][place]
            case "aten._local_scalar_dense.default", (("self", ("node", source)),):
                term = find("item", self.values[source])
                self._bring(call, [(result, term)])
                return term
            case (("aten.cat.default" | "aten.stack.default"), _):
                return self._cat(call, args)
        if op.split(".")[1] in UNWRITTEN:
            if 0 in result.shape:
                return self._opaque(call, {})
            return find("fresh", self.side, index, result.dtype, result.shape)
        return self._opaque(call, args)

    # -- what moves elements, and what computes exactly ---------------------------------------------

    def _view(self, call: Call, args: Mapping[str, Any]) -> Any:
        source, place = self._source(args, "self")
        results = _tensors(call.value)
        if _is_closed(source.shape) and all(_is_closed(x.shape) for x in results):
            shown = windows.shown(call.op, source.shape, args, results[0].shape if results else ())
            require([w[0] for w in shown] == [x.shape for x in results], f"{call.name} shows another shape")
            places = [self.terms.view(place, w) for w in shown]
            return places if isinstance(call.value, tuple) else places[0]
        if windows.VIEWS[call.op][0] in ("size", "shape") and "expand" not in call.op:
            shape = self._sizes(call.value.shape)
            return self.terms.find("move", "reshape", (("self", ("value", place)),), call.value.dtype, shape)
        return self._results(call, "move", tuple((key, self._argument(x, False)) for key, x in args.items()))

    def _cat(self, call: Call, args: Mapping[str, Any]) -> Any:
        reads = nodes_in(args["tensors"])
        tensors = [self.graph.calls[read].value for read in reads]
        if any(x.dtype != call.value.dtype or not _is_closed(x.shape) for x in tensors):
            return self._opaque(call, args)
        require(set(args) <= {"tensors", "dim"}, f"{call.name} joins with an argument that none has")
        rank, parts = len(call.value.shape), []
        dim = windows.index_in(args.get("dim", 0), rank)
        for read, x in zip(reads, tensors, strict=True):
            if call.op == "aten.stack.default":
                parts.append(self.terms.view(self.values[read], windows.full((*x.shape[:dim], 1, *x.shape[dim:]))))
            elif x.shape != (0,) or rank == 1:  # `cat` passes over these, whatever the shape of the others
                parts.append(self.values[read])
        return self.terms.find("cat", tuple(parts), dim)

    def _cast(self, call: Call, args: Mapping[str, Any]) -> Any:
        source, place = self._source(args, "self")
        if call.value.device != source.device and "non_blocking" in args:
            raise RefusedError
        if call.value.dtype == source.dtype:
            return place
        return self._exact(call, "cast", list(args), args)

    def _exact(self, call: Call, name: str, expected: list[str], args: Mapping[str, Any]) -> Any:
        own, reads = call.value, call.reads
        tensors = [self.graph.calls[read].value for read in reads]
        is_plain = list(args) == expected and (name == "cast" or len(reads) == len(args))
        for x in (own, *tensors):
            is_plain &= x.device == own.device and x.dtype in (FLOATS if name == "cast" else {own.dtype} & {*FLOATS})
            is_plain &= x.shape == own.shape or _is_closed(x.shape + own.shape)
        if not is_plain:
            return self._opaque(call, args)
        operands = [
            place if x.shape == own.shape else self.terms.view(place, windows.repeated(x.shape, own.shape))
            for place, x in zip((self.values[read] for read in reads), tensors, strict=True)
        ]
        return self.terms.find("exact", name, own.dtype, own.device, tuple(operands))

    def _collective(self, call: Call, args: Mapping[str, Any]) -> Any:
        ranks, (source, place) = self._ranks(args), self._source(args, "input")
        is_contiguous = _is_closed(source.shape) and windows.normal(source.shape, source.strides, 0) == windows.full(
            source.shape
        )
        if not is_contiguous or args["group_size"] != len(ranks[0]):
            raise RefusedError
        if call.op == GATHER:
            moved = self.terms.find("gather", place, ranks)
        else:
            rows = windows.full((len(ranks[0]), prod(source.shape) // len(ranks[0])))
            operation = f"{_text(args, 'reduce_op')} in {source.dtype}"
            moved = self.terms.find("reduce", self.terms.view(place, rows), operation, ranks)
        return self.terms.view(moved, windows.full(call.value.shape))

    # -- what is equal only of equal arguments ------------------------------------------------------

    def _opaque(self, call: Call, args: Mapping[str, Any]) -> Any:
        arguments = [(name, self._argument(value, True)) for name, value in args.items()]
        if call.op in COLLECTIVES and args:
            ranks = "ranks", self._ranks(args)
            arguments = [(name, ranks if name == "group_name" else value) for name, value in arguments]
        if call.random:
            arguments.append(("generator", ("value", self.terms.find(*self.generator))))
        found = self._results(call, "op", tuple(arguments))
        if call.random:
            self.generator = "draws", found if isinstance(found, int) else found[0]
        return found

    def _results(self, call: Call, kind: str, arguments: Any) -> Any:
        if call.op == EXCHANGE:
            self._bring_rows(call)
        if isinstance(call.value, Tensor):
            if self._unknown(call.value):
                sizes = self.terms.find(kind, call.op, arguments, "sizes", None)
                self._bring(call, [(n, ("extent", sizes, i)) for i, n in enumerate(call.value.shape)])
            return self.terms.find(kind, call.op, arguments, call.value.dtype, self._sizes(call.value.shape))
        if not isinstance(call.value, tuple) or not all(x is None or isinstance(x, Tensor) for x in call.value):
            raise RefusedError
        term = self.terms.find(kind, call.op, arguments, None, None)
        every = [n for x in _tensors(call.value) for n in x.shape]
        self._bring(call, [(n, ("extent", term, i)) for i, n in enumerate(every)])
        return [
            None if x is None else self.terms.find("out", term, i, x.dtype, self._sizes(x.shape))
            for i, x in enumerate(call.value)
        ]

    def _argument(self, value: Any, layouts: bool) -> Any:
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
                return ("list", *(self._argument(item, layouts) for item in items))
            case ("size", *_):
                return self._sizes((value,))[0]
        return value

    def _source(self, args: Mapping[str, Any], name: str) -> tuple[Tensor, int]:
        index = _node(args, name)
        return self.graph.calls[index].value, self.values[index]

    def _ranks(self, args: Mapping[str, Any]) -> Any:
        groups = dict(self.graph.groups)
        if _text(args, "group_name") not in groups:
            raise RefusedError
        return groups[_text(args, "group_name")]

    # -- sizes that depend on data: each symbol is a term -------------------------------------------

    def _sizes(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        found: list[Any] = []
        for size in sizes:
            if isinstance(size, int):
                found.append(size)
                continue
            if any(name not in self.symbols for _, *names in size[1:] for name in names):
                raise RefusedError
            named = [(n, *sorted(self.symbols[name] for name in names)) for n, *names in size[1:]]
            found.append(("size", *sorted(named, key=_key)))
        return tuple(found)

    def _unknown(self, value: Any) -> list[str]:
        return [name for name in dict.fromkeys(_symbols(value)) if name not in self.symbols]

    def _bring(self, call: Call, sizes: list[tuple[Any, Any]]) -> None:
        """A result's new symbols, each of which must be a size by itself."""
        for name in self._unknown(call.value):
            found = next((term for size, term in sizes if size == ("size", (1, name))), None)
            if found is None:
                raise RefusedError
            self.symbols[name] = found if isinstance(found, int) else self.terms.find(*found)

    def _bring_rows(self, call: Call) -> None:
        """Among more than two ranks rows that arrive are the first split, and one symbol for all others."""
        first, *others = dict(call.args)["output_split_sizes"][1:]
        for name in self._unknown(call.value):
            own = first[1:] if isinstance(first, tuple) else [(first,)] * (first != 0)
            if call.value.shape[0] != ("size", *sorted((*own, (1, name)), key=_key)):
                raise RefusedError
            self.symbols[name] = self.terms.find("rows", self._sizes(others))

    # -- memory -------------------------------------------------------------------------------------

    def _check_write(self, call: Call, args: Mapping[str, Any]) -> None:
        """A write must be of all of `self` as it lies, to memory that nobody else is reading or walks twice."""
        if call.writes != ("self",) or not call.op.split(".")[1].endswith("_") or args["self"][:1] != ("node",):
            raise RefusedError
        target = self._source(args, "self")[0]
        others = [read for name, value in args.items() if name != "self" for read in nodes_in(value)]
        is_torn = any(
            x.storage == target.storage and x != target for i in others for x in _tensors(self.graph.calls[i].value)
        )
        is_flying = any(target.storage in storages for storages in self.flying.values())
        if target != call.value or is_torn or is_flying or _overlaps(target):
            raise RefusedError

    def _overwrite(self, call: Call, value: int | None) -> None:
        """Names for exactly what was written get the new value, others for that memory are stale; all where the call
        is refused, which may have written whatever it reads."""
        written = [call.value] if value is not None else [self.graph.calls[i].value for i in call.reads]
        for target in (x for several in written for x in _tensors(several)):
            for owner in self.owners.get(target.storage, ()):
                if value is None or self.graph.calls[owner].value != target:
                    self.stale.add(owner)
                elif self.values[owner] is not None:
                    self.values[owner] = value


def _node(args: Mapping[str, Any], name: str) -> int:
    kind, index = args[name]
    require(kind == "node", f"argument {name} is no call's result")
    return int(index)


def _text(args: Mapping[str, Any], name: str) -> str:
    kind, text = args[name]
    require(kind == "str", f"argument {name} is no text")
    return str(text)


def _is_copy(call: Call) -> bool:
    """Whether a copy's arguments are what a copy has, and say nothing else than its result does."""
    flag = ("bool", "True"), ("bool", "False")
    told = {
        "dtype": (("dtype", call.value.dtype),),
        "device": (("device", call.value.device), ("str", call.value.device)),
        "layout": (("enum", "torch.strided"),),
        "memory_format": tuple(("enum", name) for name in FORMATS),
        "pin_memory": flag,
        "non_blocking": flag,
    }
    return all(value[:1] == ("node",) or value in (("none",), *told.get(name, ())) for name, value in call.args)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Tensor)]


def _symbols(value: Any) -> list[str]:
    match value:
        case Tensor():
            return _symbols((value.shape, value.strides, value.offset))
        case ("size", *products):
            return [name for _, *names in products for name in names]
        case tuple():
            return [name for item in value for name in _symbols(item)]
    return []


def _key(product: Any) -> Any:
    return product[1:], product[0]


def _is_closed(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _overlaps(x: Tensor) -> bool:
    """Whether two indices may mean one element: strides must grow past all that smaller ones reach."""
    if not _is_closed(x.shape + x.strides):  # sizes that depend on data stand in the first dim alone
        return not _is_closed(x.shape[1:] + x.strides) or x.strides != windows.steps_of((1, *x.shape[1:]))
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False

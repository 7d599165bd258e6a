"""The term of each call of a graph, derived by the checker from the graph as data.

What is said of each kind of call is what docs/proving.md says; a call of no kind here is opaque, with the layouts of
all tensors that it reads. A call that cannot be derived must be one that the certificate lists as refused, and so must
all that reads it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from harness.certificate import windows
from harness.certificate.data import Call, Graph, Tensor, nodes_in
from harness.certificate.rules import Terms

FLOATS = ("float64", "float32", "bfloat16", "float16")
EXACT = {"aten.add.Tensor": "add", "aten.sub.Tensor": "sub", "aten.mul.Tensor": "mul", "aten.neg.default": "neg"}
SAME = {  # the argument whose values the result has
    "aten.clone.default": "self",
    "aten.detach.default": "self",
    "aten.alias.default": "self",
    "aten.contiguous.default": "self",
    "bitproof.offload.default": "x",
    "bitproof.reload.default": "host",
}
WAITS = {
    "_c10d_functional.wait_tensor.default": "tensor",
    "bitproof.wait_offload.default": "host",
    "bitproof.wait_reload.default": "x",
}
GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor.default"
EXCHANGE = "_c10d_functional.all_to_all_single.default"
LAUNCHES = {
    GATHER: "input",
    REDUCE: "input",
    EXCHANGE: "input",
    "_c10d_functional.all_reduce.default": "input",
    "bitproof.offload.default": "x",
    "bitproof.reload.default": "host",
}
REFUSED = (
    "aten.as_strided.default",
    "aten.as_strided_copy.default",
    "aten.as_strided_scatter.default",
    "aten.view.dtype",
)
PURE = ("higher_order.flex_attention", "higher_order.flex_attention_backward")
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
CAST = "aten._to_copy.default"
FORMATS = ("torch.preserve_format", "torch.contiguous_format", "torch.channels_last", "torch.channels_last_3d")
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


class RefusedError(Exception):
    """A call that is not understood, or that reads what is not known."""


class Walk:
    """One graph, walked from its first call to its last. `values` are the places of terms, None for what is refused."""

    def __init__(self, terms: Terms, graph: Graph, side: str, refused: frozenset[int]) -> None:
        self.terms, self.graph, self.side = terms, graph, side
        self.groups = dict(graph.groups)
        self.values: list[Any] = []
        self.stale: set[int] = set()
        self.flying: dict[int, tuple[int, int]] = {}
        self.symbols: dict[str, int] = {}
        self.owners: dict[int, list[int]] = {}  # by storage, the calls so far whose values lie there
        self.generator = terms.find(("seed",))
        for index, call in enumerate(graph.calls):
            self.values.append(None)
            try:
                value = self._derive(index, call)
            except RefusedError:
                value = None
            require(
                (value is None) == (index in refused), f"call {call.name} is refused on one side of the proof alone"
            )
            if isinstance(call.value, Tensor) and isinstance(value, int) and _is_closed(call.value.shape):
                found = terms.dtype(value), terms.shape(value)
                require(found == (call.value.dtype, call.value.shape), f"{call.name} gives another dtype or shape")
            if value is None:
                self._distrust(index, call)
            elif call.writes:
                self._overwrite(index, call, value)
            self.values[index] = value
            for x in _tensors(call.value):
                self.owners.setdefault(x.storage, []).append(index)
        require(all(index < len(graph.calls) for index in refused), "a refused call is none of the graph")

    def read(self, index: int, until: int | None = None) -> Any:
        """The value of an earlier call, as a call at `until` reads it."""
        if until is not None and not 0 <= index < until:
            raise ValueError(f"call {index} is read before it runs")
        if self.values[index] is None or index in self.stale:
            raise RefusedError
        return self.values[index]

    def _derive(self, index: int, call: Call) -> Any:
        args, op = dict(call.args), call.op
        require(all(map(_is_argument, args.values())), f"{call.name} has an argument of no known kind")
        awaited = args[WAITS[op]][1] if op in WAITS else None
        for source in call.reads:
            self.read(source, index)
            if source in self.flying and source != awaited:
                raise RefusedError
        require(op not in (CAST, *SAME, *WAITS) or _is_copy(call), f"{call.name} copies with an argument that none has")
        if op in REFUSED or (op.startswith("higher_order.") and op not in PURE):
            raise RefusedError
        if call.writes:
            self._check_write(call, args)
            return self._opaque(call, args)
        if op == "input":
            return self.terms.find(("input", call.name, call.value.dtype, call.value.shape))
        if op == "constant":
            return self.terms.find(("constant", args["digest"][1], call.value.dtype, call.value.shape))
        if op == "getitem":
            return self.values[args["0"][1]][args["1"]]
        if awaited is not None:
            self.flying.pop(awaited, None)
            return self.values[awaited]
        if op in LAUNCHES:
            source = args[LAUNCHES[op]][1]
            self.flying[index] = call.value.storage, self.graph.calls[source].value.storage
        if op in SAME:
            return self.values[args[SAME[op]][1]]
        return self._computed(index, call, args)

    def _computed(self, index: int, call: Call, args: Any) -> Any:
        op, result = call.op, call.value
        if op.split(".")[1] in UNWRITTEN:
            if prod(n for n in result.shape if isinstance(n, int)) == 0:
                return self._opaque(call, {})
            return self.terms.find(("fresh", self.side, index, result.dtype, result.shape))
        if op in (CAST, *EXACT):
            return self._exact(call, args)
        if op in ("aten.cat.default", "aten.stack.default"):
            return self._cat(call, args)
        if op in (GATHER, REDUCE):
            return self._collective(call, args)
        if op.startswith("_c10d_functional") and op not in LAUNCHES:
            raise RefusedError
        if op == "aten._local_scalar_dense.default":
            term = self.terms.find(("item", self.values[args["self"][1]]))
            self._bring(call, [(call.value, term)])
            return term
        return self._view(call, args) if op in windows.VIEWS else self._opaque(call, args)

    def _view(self, call: Call, args: Any) -> Any:
        results = call.value if isinstance(call.value, tuple) else (call.value,)
        source, place = self.graph.calls[args["self"][1]].value, self.values[args["self"][1]]
        if not all(_is_closed(x.shape) for x in (source, *results)):
            return self._moved(call, args, place)
        shown = windows.view_of(call.op, source.shape, args, results[0].shape if results else ())
        require(
            [w[0] for w in shown] == [x.shape for x in results], f"call {call.name} shows another shape than it says"
        )
        places = [self.terms.view(place, w) for w in shown]
        return places if isinstance(call.value, tuple) else places[0]

    def _moved(self, call: Call, args: Any, place: int) -> Any:
        if call.op in windows.RESHAPES:
            shape = self._sizes(call.value.shape)
            return self.terms.find(("move", "reshape", (("self", ("value", place)),), call.value.dtype, shape))
        return self._results(call, "move", tuple((key, self._argument(x, False, call)) for key, x in args.items()))

    def _cat(self, call: Call, args: Any) -> Any:
        require(set(args) <= {"tensors", "dim"}, f"{call.name} joins with an argument that none has")
        reads = [item[1] for item in args["tensors"][1:]]
        tensors = [self.graph.calls[read].value for read in reads]
        if any(x.dtype != call.value.dtype or not _is_closed(x.shape) for x in tensors):
            return self._opaque(call, args)
        dim, parts = windows.within_range(args.get("dim", 0), len(call.value.shape)), []
        for read, x in zip(reads, tensors, strict=True):
            if call.op == "aten.stack.default":
                parts.append(self.terms.view(self.values[read], windows.full((*x.shape[:dim], 1, *x.shape[dim:]))))
            elif x.shape != (0,) or len(call.value.shape) == 1:
                parts.append(self.values[read])
        return self.terms.find(("cat", tuple(parts), dim))

    def _exact(self, call: Call, args: Any) -> Any:
        own, reads = call.value, call.reads
        tensors = [self.graph.calls[read].value for read in reads]
        alike = all(x.device == own.device and x.dtype in FLOATS for x in tensors) and own.dtype in FLOATS
        if call.op not in EXACT:
            if own.device != tensors[0].device and "non_blocking" in args:
                raise RefusedError
            if own.dtype == tensors[0].dtype:
                return self.values[reads[0]]
            name, is_exact = "cast", alike
        else:
            name = EXACT[call.op]
            fits = list(args) == (["self"] if name == "neg" else ["self", "other"]) and len(reads) == len(args)
            is_exact = fits and alike and all(x.dtype == own.dtype for x in tensors)
        if not is_exact or not all(x.shape == own.shape or _is_closed(x.shape + own.shape) for x in tensors):
            return self._opaque(call, args)
        operands = []
        for read, x in zip(reads, tensors, strict=True):
            fits, place = x.shape == own.shape, self.values[read]
            operands.append(place if fits else self.terms.view(place, windows.broadcast(x.shape, own.shape)))
        return self.terms.find(("exact", name, own.dtype, own.device, tuple(operands)))

    def _collective(self, call: Call, args: Any) -> Any:
        read, name = args["input"][1], args["group_name"][1]
        source = self.graph.calls[read].value
        is_plain = _is_closed(source.shape) and windows.normal(source.shape, source.strides, 0) == windows.full(
            source.shape
        )
        if name not in self.groups or not is_plain or args["group_size"] != len(self.groups[name][0]):
            raise RefusedError
        ranks = self.groups[name]
        if call.op == GATHER:
            moved = self.terms.find(("gather", self.values[read], ranks))
        else:
            rows = windows.full((len(ranks[0]), prod(source.shape) // len(ranks[0])))
            operation = f"{args['reduce_op'][1]} in {source.dtype}"
            moved = self.terms.find(("reduce", self.terms.view(self.values[read], rows), operation, ranks))
        return self.terms.view(moved, windows.full(call.value.shape))

    def _opaque(self, call: Call, args: Any) -> Any:
        arguments = tuple((name, self._argument(value, True, call)) for name, value in args.items())
        if call.op in LAUNCHES and "group_name" in args:
            if args["group_name"][1] not in self.groups:
                raise RefusedError
            ranks = ("ranks", self.groups[args["group_name"][1]])
            arguments = tuple((name, ranks if name == "group_name" else value) for name, value in arguments)
        if call.random:
            arguments = (*arguments, ("generator", ("value", self.generator)))
        found = self._results(call, "op", arguments)
        if call.random:
            self.generator = self.terms.find(("draws", found if isinstance(found, int) else found[0]))
        return found

    def _results(self, call: Call, kind: str, arguments: Any) -> Any:
        if call.op == EXCHANGE:
            first, *others = dict(call.args)["output_split_sizes"][1:]
            for name in self._unknown(call.value):
                own = sorted(
                    [*(first[1:] if isinstance(first, tuple) else [(first,)] * (first != 0)), (1, name)], key=_key
                )
                if call.value.shape[0] != ("size", *own):
                    raise RefusedError
                self.symbols[name] = self.terms.find(("rows", self._sizes(tuple(others))))
        if isinstance(call.value, Tensor):
            if self._unknown(call.value):
                sizes = self.terms.find((kind, call.op, arguments, "sizes", None))
                self._bring(call, [(n, ("extent", sizes, i)) for i, n in enumerate(call.value.shape)])
            return self.terms.find((kind, call.op, arguments, call.value.dtype, self._sizes(call.value.shape)))
        if not isinstance(call.value, tuple) or not all(x is None or isinstance(x, Tensor) for x in call.value):
            raise RefusedError
        term = self.terms.find((kind, call.op, arguments, None, None))
        every = [n for x in call.value if x is not None for n in x.shape]
        self._bring(call, [(n, ("extent", term, i)) for i, n in enumerate(every)])
        return [
            None if x is None else self.terms.find(("out", term, i, x.dtype, self._sizes(x.shape)))
            for i, x in enumerate(call.value)
        ]

    def _bring(self, call: Call, sizes: list[tuple[Any, Any]]) -> None:
        for name in self._unknown(call.value):
            found = next((term for size, term in sizes if size == ("size", (1, name))), None)
            if found is None:
                raise RefusedError
            self.symbols[name] = found if isinstance(found, int) else self.terms.find(found)

    def _unknown(self, value: Any) -> list[str]:
        return [name for name in dict.fromkeys(_symbols(value)) if name not in self.symbols]

    def _argument(self, value: Any, layouts: bool, call: Call) -> Any:
        match value:
            case ("node", index):
                x, place = self.graph.calls[index].value, self.values[index]
                if not isinstance(x, Tensor):
                    raise RefusedError
                if not layouts:
                    return ("value", place)
                offset = self._sizes((x.offset,))[0]
                lead = offset * BYTES.get(x.dtype, 1) % 64 if isinstance(offset, int) else offset
                return ("tensor", place, x.dtype, x.device, self._sizes(x.shape), self._sizes(x.strides), lead)
            case ("list", *items):
                return ("list", *(self._argument(item, layouts, call) for item in items))
            case ("size", *_):
                return self._sizes((value,))[0]
        return value

    def _sizes(self, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        found: list[Any] = []
        for size in sizes:
            if isinstance(size, int):
                found.append(size)
                continue
            if any(name not in self.symbols for product in size[1:] for name in product[1:]):
                raise RefusedError
            named = [(n, *sorted(self.symbols[name] for name in names)) for n, *names in size[1:]]
            found.append(("size", *sorted(named, key=_key)))
        return tuple(found)

    # -- memory -------------------------------------------------------------------------------------

    def _check_write(self, call: Call, args: Any) -> None:
        if call.writes != ("self",) or not call.op.split(".")[1].endswith("_") or args["self"][:1] != ("node",):
            raise RefusedError
        target = self.graph.calls[args["self"][1]].value
        others = [
            x
            for read in (index for name, value in args.items() if name != "self" for index in nodes_in(value))
            for x in _tensors(self.graph.calls[read].value)
        ]
        is_torn = any(x.storage == target.storage and x != target for x in others)
        is_flying = any(target.storage in storages for storages in self.flying.values())
        if target != call.value or is_torn or is_flying or _overlaps(target):
            raise RefusedError

    def _overwrite(self, index: int, call: Call, value: int) -> None:
        for place in self.owners.get(call.value.storage, ()):
            if self.graph.calls[place].value != call.value:
                self.stale.add(place)
            elif self.values[place] is not None:
                self.values[place] = value

    def _distrust(self, index: int, call: Call) -> None:
        if call.writes or call.op.startswith("higher_order."):
            for read in call.reads:
                for x in _tensors(self.graph.calls[read].value):
                    self.stale.update(self.owners.get(x.storage, ()))
        if call.random:
            self.generator = self.terms.find(("fresh", self.side, index, "generator", ()))


class RejectedError(Exception):
    """What is wrong with a certificate."""


def require(holds: bool, otherwise: str) -> None:
    """Reject a certificate in which something does not hold."""
    if not holds:
        raise RejectedError(otherwise)


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
    return all(value[:1] in (("node",), ("none",)) or value in told.get(name, ()) for name, value in call.args)


def _is_argument(value: Any) -> bool:
    match value:
        case int() | ("none",) | ("node", int()) | ("bool", "True" | "False") | ("graph", *_):
            return True
        case ("float" | "str" | "dtype" | "device" | "enum", str()):
            return True
        case ("list", *items):
            return all(map(_is_argument, items))
        case ("size", *products):
            return all(isinstance(n, int) and all(isinstance(x, str) for x in names) for n, *names in products)
    return False


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Tensor)]


def _symbols(value: Any) -> list[str]:
    if isinstance(value, Tensor):
        return _symbols((value.shape, value.strides, value.offset))
    if isinstance(value, tuple):
        if value[:1] == ("size",):
            return [name for _, *names in value[1:] for name in names]
        return [name for item in value for name in _symbols(item)]
    return []


def _key(product: Any) -> Any:
    return product[1:], product[0]


def _is_closed(shape: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _overlaps(x: Tensor) -> bool:
    if not _is_closed(x.shape + x.strides):
        inner = x.shape[1:]
        return not (_is_closed(inner + x.strides) and x.strides == windows.steps_of((1, *inner)))
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False

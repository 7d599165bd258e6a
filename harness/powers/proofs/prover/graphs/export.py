"""Converts the graph of a step to data: every call with its arguments by name and the memory layout of its result.

The metadata in the graph is not used, because a user's pass may write anything there. Instead, every call runs again on
fake values, which have a layout but no elements. These also show which tensors share memory.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from bitproof.harness.errors import BitproofError
from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover import proof_data as data
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.powers.proofs.prover.graphs.argument_forms import canonical
from bitproof.harness.powers.proofs.prover.graphs.calls_only import why_not_calls_only
from bitproof.harness.powers.proofs.prover.graphs.constants import digest_of
from bitproof.harness.powers.proofs.prover.graphs.expressions import size_of
from bitproof.harness.powers.proofs.prover.graphs.functionalized import (
    add_copies,
    add_updates,
    add_zeros,
    copied_number,
    is_division_then_copy,
    is_where,
    number_of,
    of_number,
    results_of,
)
from bitproof.harness.powers.proofs.prover.graphs.open_sizes import OpenSizes, SizeBounds
from bitproof.harness.powers.proofs.prover.graphs.repeats import Repeats, StoredTensor
from bitproof.harness.powers.proofs.prover.graphs.unsure_strides import unsure_product
from bitproof.harness.powers.proofs.prover.layouts import without_redundant_arguments
from bitproof.harness.powers.proofs.prover.proof_data import Call, Graph
from bitproof.harness.torch_compat import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload
from bitproof.harness.torch_operators import schema_of

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_TRANSPOSES = torch.ops.aten.transpose_.default


class CallOrigin(NamedTuple):
    """The origin of a call, for reports: module, `forward` or `backward`, number of its chunk, source line."""

    module: str | None = None
    direction: str | None = None
    chunk: int | None = None
    source: str | None = None


class RefusedError(BitproofError):
    """A call or program that proofs do not support. No output that depends on it can be proved."""


def export_graph(
    module: GraphModule,
    names: Sequence[str],
    inputs: Sequence[Any],
    outputs: Sequence[str],
    groups: GroupTable,
    bounds: SizeBounds | None = None,
) -> Graph:
    """Return the graph of a module as data: its calls, and the call that computes each output.

    - `names`, `inputs`: the names and values of the graph's inputs, in order. Only the layouts of the values matter.
    - `outputs`: the names of its outputs, in order.
    - `groups`: the process groups of its collectives.
    - `bounds`: the bounds of symbolic sizes are added here. The result is only right within these bounds.

    Raises RefusedError, which names the node, for a call that proofs do not support.
    """
    if otherwise := why_not_calls_only(module):
        raise RefusedError(f"a graph that is run with {otherwise}", where="the whole graph")
    exporter = _Exporter(module, inputs, names, groups, bounds or SizeBounds())
    with torch.no_grad(), exporter.mode, exporter.shape_env.ignore_fresh_unbacked_symbols():
        exporter.run()
    returned: Any = module.graph.output_node().args[0]
    if len(returned) != len(outputs):
        raise RefusedError(
            "a graph returns another number of outputs than the step has",
            expected=f"{len(outputs)}: {', '.join(outputs[:3])}, ...",
            found=str(len(returned)),
        )
    places = tuple((name, exporter.place_of(node, name)) for name, node in zip(outputs, returned, strict=True))
    # Only now are all calls known, and with them the strides of every result.
    if call := unsure_product(exporter.calls):
        what = f"{call.op} of a tensor that may have another stride where a dim has one element (`{call.name}`)"
        raise RefusedError(what, where=str((call.place or (None,))[-1] or "the graph"))
    return Graph(tuple(exporter.calls), places)


class _Exporter:
    def __init__(
        self, module: GraphModule, inputs: Sequence[Any], names: Sequence[str], groups: GroupTable, bounds: SizeBounds
    ) -> None:
        self.module = module
        self.partitions = groups.partitions()
        self.shape_env = ShapeEnv()
        self.mode: FakeTensorMode = step_fake_mode(shape_env=self.shape_env, repeats=True)
        self.open_sizes = OpenSizes(self.shape_env, bounds)
        self.inputs = list(zip(names, inputs, strict=True))
        self.values: dict[Node, Any] = {}
        self.calls: list[Call] = []
        self.index: dict[Node, int] = {}
        self.repeats = Repeats()
        self.storages: dict[Hashable, int] = {}

    def run(self) -> None:
        remaining = iter(self.inputs)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                try:
                    name, like = next(remaining)
                except StopIteration:
                    raise _refused(node, "a graph takes more inputs than the step has") from None
                self._add(node, name, "input", (), self._like(node, name, like))
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op != "output":
                raise _refused(node, f"a node of kind {node.op}")

    def _like(self, node: Node, name: str, like: Any) -> Any:
        try:
            if not isinstance(like, Tensor):
                return self.open_sizes.size(like, name)
            shape = [self.open_sizes.size(n, f"dim {dim} of {name}") for dim, n in enumerate(like.shape)]
            strides = [self.open_sizes.size(n, f"strides of {name}") for n in like.stride()]
        except ValueError as error:
            raise _refused(node, str(error)) from None
        return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)

    def place_of(self, returned: Any, name: str) -> int:
        """Return the index of the call that computes the output `name`; `returned` is the node of the output.

        If the output is a size, a call that returns it is added first. Raises RefusedError if the output is neither a
        tensor nor a size.
        """
        if isinstance(returned, Node) and isinstance(self.values[returned], torch.SymInt):
            size = self._size(returned, self.values[returned])
            self.calls.append(Call(name, known.NUMBER, (("0", size),), size))
            return len(self.calls) - 1
        if not isinstance(returned, Node) or not isinstance(self.values[returned], Tensor | StoredTensor):
            raise RefusedError(f"{name} is no tensor (`{returned}`)", where="the graph's outputs")
        return self.index[returned]

    def _constant(self, node: Node) -> None:
        value = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            self.values[node] = value
        elif isinstance(value, Tensor) and (number := copied_number(node, value)) is not None:
            args = (("s", number), ("dtype", ("dtype", str(value.dtype).removeprefix("torch."))))
            self._add(node, node.name, known.NUMBER_TENSOR, args, self.mode.from_tensor(value, static_shapes=True))
        # By digest, so that equal values are the same constant, whatever their names.
        elif isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            digest = (("digest", ("str", digest_of(value))),)
            self._add(node, node.name, "constant", digest, self.mode.from_tensor(value, static_shapes=True))
        else:
            raise _refused(node, f"an attribute that is a {type(value).__name__}")

    def _call(self, node: Node) -> None:
        # Python arithmetic on sizes has no operator name. Any other function is refused by `_operator` before it runs.
        op = "" if node.target in known.ARITHMETIC else _operator(node)
        # How often these calls occur varies between traces, so they must not become terms.
        if op in known.ITSELF and (source := node.all_input_nodes[0]) in self.index:
            self.values[node], self.index[node] = self.values[source], self.index[source]
            return
        if (again := self.repeats.again(node, self.values)) is not None:
            self._add(node, node.name, op, self._arguments(node), again)
            return
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: self._fake(x, op))
        given = _by_name(node, args, kwargs)
        target = _target(node)
        if op not in known.SIZES | known.CHECKS and (objection := admitted.why_not(target, given)):
            raise _refused(node, objection)
        try:
            value = target(*args, **kwargs)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            raise _refused(node, f"a call that fails on fake values: {type(error).__name__}: {reason}") from error
        self.values[node] = value
        if op in known.FUSED:
            self._update(node, known.FUSED[op], given)
            return
        if isinstance(value, torch.SymFloat):
            name = str(getattr(node.target, "__name__", node.target)) if not op else "float"
            self._add(node, node.name, *of_number(known.PYTHON + name, self._arguments(node)), value)
            return
        of_numbers = not op and all(symbols.is_number(self.values[x]) for x in node.all_input_nodes)
        # A size is written as a sum of products in each call that reads it, so computing it needs no call.
        if symbols.is_number(value) and (op in known.SIZES or of_numbers):
            return
        # No bit depends on a check. A `getitem` without a result takes a gradient that was not requested.
        if op in known.CHECKS or (op == "getitem" and (value is None or (isinstance(value, Sequence) and not value))):
            return
        if value is None and not operators.written_arguments(node):
            raise _refused(node, "a call that gives nothing, so that it is made for what else it does")
        if objection := admitted.unstated_effect(target, given, value):
            raise _refused(node, objection)
        # As recorded, a batch norm also returns its new running statistics, and `add_copies` writes them.
        counts_as = known.BATCH_NORMS.get(op)
        results = results_of(value, given) if counts_as else value
        arguments = [*self._arguments(node)]
        if op in known.MASKED and is_where(given):
            self._choose(node, arguments)
            return
        if op in known.DIVIDES and is_division_then_copy(given):
            self._add_copied(node, known.DIVIDES[op], arguments, self._layout(node, value))
            return
        # Several forms of writing the same are recorded as one of them: see `functionalized`.
        if op in known.OVERWRITES:
            add_zeros(self.calls, node.name, dict(arguments)["self"], _place(node))
        if op == known.LIFTS:
            op = known.CLONE
        if op == known.CONVERTS:
            op, arguments = known.CAST, [("self" if name == "a" else name, x) for name, x in arguments]
        self._add(node, node.name, counts_as or op or _operator(node), arguments, results)
        if counts_as:
            add_copies(self.calls)
        # A repeated call is recorded under its own operator, so calls recorded under another are not remembered.
        elif op == _operator(node):
            self.repeats.remember(node, self.values[node])

    def _fake(self, node: Node, op: str) -> Any:
        value = self.values[node]
        # `getitem` needs the fake value of only one item, so its tuple or list stays as it is stored.
        return value if op == "getitem" and isinstance(value, list | tuple) else self.repeats.fake(value)

    def _update(self, node: Node, op: str, given: Mapping[str, Any]) -> None:
        written = operators.written_names(node.target)
        call = Call(node.name, op, tuple(self._arguments(node)), None, place=_place(node))
        self.values[node] = [*add_updates(self.calls, call, given, written, functools.partial(self._layout, node))]

    def _choose(self, node: Node, arguments: Sequence[tuple[str, Any]]) -> None:
        given, own = dict(arguments), self._layout(node, self.values[node])
        other = given["value"]
        if not (isinstance(other, tuple) and other[0] == "node"):
            filled = data.Tensor(own.dtype, own.device, (), (), 0, self._storage(("filled", len(self.calls))))
            self.calls.append(number_of(node.name, other, filled, _place(node)))
            other = ("node", len(self.calls) - 1)
        args = (("condition", given["mask"]), ("self", other), ("other", given["self"]))
        if operators.written_names(node.target):
            self._add_copied(node, known.CHOICE, args, own)
        else:
            self._add(node, node.name, known.CHOICE, args, self.values[node])

    def _add_copied(self, node: Node, op: str, args: Sequence[tuple[str, Any]], own: data.Tensor) -> None:
        """Record an in-place call as two calls: the functional operator `op`, and a copy of its result.

        The copy writes into the tensor that the in-place call writes. `own` is the layout of this tensor.
        """
        made = replace(own, offset=0, storage=self._storage(("made", len(self.calls))))
        self.calls.append(Call(f"{node.name} made", op, tuple(args), made, place=_place(node)))
        args = (("self", dict(self._arguments(node))["self"]), ("src", ("node", len(self.calls) - 1)))
        self._add(node, node.name, known.COPY_INTO, args, self.values[node])

    def _add(self, node: Node, name: str, op: str, args: Iterable[tuple[str, Any]], value: Any) -> None:
        self.values[node] = value = self.repeats.stored(value)
        self.index[node] = len(self.calls)
        writes: tuple[str, ...] = ()
        if node.op == "call_function" and isinstance(target := _target(node), OpOverload):
            writes = operators.written_names(target)
        call = Call(
            name=name,
            op=op,
            args=tuple(args),
            value=self._shared(node, value, self._layout(node, value)),
            writes=writes,
            random=node.op == "call_function" and _draws(node),
            place=_place(node),
        )
        self.calls.append(without_redundant_arguments(call, self.calls))

    def _shared(self, node: Node, value: Any, layout: Any) -> Any:
        # These two return their argument's memory, although neither their schemas nor their fake values state it.
        if node.op != "call_function" or not (operators.is_wait(node) or node.target is _UNSAFE_VIEW):
            return layout
        source = self.calls[self.index[node.all_input_nodes[0]]].value
        self.storages[self.repeats.memory_of(value)] = source.storage  # for all values that share this memory
        return source if operators.is_wait(node) else replace(layout, storage=source.storage, offset=source.offset)

    def _layout(self, node: Node, value: Any) -> Any:
        if isinstance(value, StoredTensor):
            return data.Tensor(*value.layout.fields, self._storage(value.memory))
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_conj() or value.is_neg() or value.is_quantized:
                raise _refused(node, "a tensor that is not plain memory")
            return data.Tensor(
                dtype=str(value.dtype).removeprefix("torch."),
                device=value.device.type,
                shape=tuple(self._size(node, x) for x in value.shape),
                strides=tuple(self._size(node, x) for x in value.stride()),
                offset=self._size(node, value.storage_offset()),
                storage=self._storage(self.repeats.memory_of(value)),
            )
        if isinstance(value, (tuple, list)):  # FlexAttention may return no gradients of its masks' captured tensors
            return tuple(self._layout(node, item) for item in value) or None
        if isinstance(value, torch.SymFloat):
            return data.Tensor("float64", "cpu", (), (), 0, self._storage(("a number", id(value))))
        return None if value is None else self._size(node, value)

    def _storage(self, memory: Hashable) -> int:
        # Numbered by first use, so that equal graphs have equal numbers.
        return self.storages.setdefault(memory, len(self.storages))

    def _size(self, node: Node, size: Any) -> data.Size:
        if type(size) is int:
            return size
        if not isinstance(size, torch.SymInt):
            raise _refused(node, f"a number that is a {type(size).__name__}")
        try:
            return size_of(symbols.expression(size))
        except ValueError as error:
            raise _refused(node, str(error)) from None

    def _arguments(self, node: Node) -> list[tuple[str, Any]]:
        # A Python function has no schema: its arguments are named by position.
        schema = schema_of(_target(node))
        if schema is None:
            declared = [str(place) for place in range(len(node.args))]
        else:
            declared = [argument.name for argument in schema.arguments]
        given = dict(zip(declared, node.args, strict=False)) | dict(node.kwargs)
        # In the schema's order: it must not matter whether an argument is given by position or by keyword.
        known_first = [name for name in declared if name in given] + [name for name in given if name not in declared]
        found = []
        for name in known_first:
            value = given[name]
            # Two sides may have other names for a group of the same ranks.
            if name == "group_name" and isinstance(value, str) and value in self.partitions:
                found.append((name, ("ranks", self.partitions[value])))
            else:
                found.append((name, self._argument(node, value)))
        return canonical(_target(node), found, self.calls)

    def _argument(self, node: Node, x: Any) -> Any:
        match x:
            case Node():
                held = self.values[x]
                if isinstance(held, GraphModule):
                    return ("graph", _nested(node, held))
                # An integer is compared by its expression, a float by the call that computed it.
                is_call = x in self.index and (not symbols.is_number(held) or isinstance(held, torch.SymFloat))
                return ("node", self.index[x]) if is_call else self._argument(node, held)
            case list() | tuple():
                return ("list", *(self._argument(node, item) for item in x))
            case dict():
                items = (("list", ("str", str(key)), self._argument(node, item)) for key, item in sorted(x.items()))
                return ("list", *items)
            # Before `int()`, as a bool is an int.
            case bool():
                return ("bool", str(x))
            case None:
                return ("none",)
            case float():
                return ("float", x.hex())
            case str():
                return ("str", x)
            case torch.dtype():
                return ("dtype", str(x).removeprefix("torch."))
            case torch.device():
                # Without its index: each rank has another.
                return ("device", x.type)
            case torch.memory_format() | torch.layout():
                return ("enum", str(x))
            case int() | torch.SymInt():
                return self._size(node, x)
            case _:
                raise _refused(node, f"an argument that is a {type(x).__name__}")


def refuse(call: Call, what: str) -> RefusedError:
    """Return the error to raise for a refused call, with the call's module and source line.

    `what` describes the call.
    """
    place = CallOrigin(*call.place)
    where = f"{place.module or 'no module'} ({place.direction})" + (f", {place.source}" if place.source else "")
    return RefusedError(f"{what} (`{call.name}`)", where=where)


def _nested(caller: Node, module: GraphModule) -> Any:
    """Return a nested graph as data.

    Raises RefusedError if the nested graph writes, draws random numbers, or has an operator that is not admitted. Nodes
    have numbers instead of names, so graphs that differ only in names have equal data.
    """
    index: dict[Node, int] = {}

    def argument(x: Any) -> Any:
        match x:
            case Node():
                return ("node", index[x])
            case list() | tuple():
                return ("list", *map(argument, x))
            case float():
                return ("float", x.hex())
            case None | bool() | str() | int() | torch.dtype() | torch.device():
                return (type(x).__name__, str(x))
            case _:
                raise _refused(caller, f"a nested graph with an argument that is a {type(x).__name__}")

    def one(node: Node) -> Any:
        if node.op not in ("placeholder", "call_function", "output"):
            raise _refused(caller, f"a nested graph with a node of kind {node.op}")
        if node.op == "call_function" and (operators.written_arguments(node) or _draws(node)):
            raise _refused(caller, f"a nested graph that writes or draws: {node.target}")
        if reason := admitted.why_not(node.target):
            raise _refused(caller, f"a nested graph: {reason}")
        name = _operator(node) if node.op == "call_function" else node.op
        kwargs = tuple((key, argument(value)) for key, value in sorted(node.kwargs.items()))
        args = () if node.op == "placeholder" else tuple(argument(x) for x in node.args)
        index[node] = len(index)
        return (name, args, kwargs)

    return tuple(one(node) for node in module.graph.nodes)


def _draws(node: Node) -> bool:
    return operators.is_random(node) or str(node.target) in known.DRAWS


def _by_name(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = schema_of(node.target)
    names = [argument.name for argument in schema.arguments] if schema else []
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _target(node: Node) -> Any:
    """Return the operator under which a node is recorded.

    This is the operator of its call, with two exceptions:

    - An unsafe split is recorded as a split.
    - An in-place `transpose_` is recorded as `transpose`, if no other call can notice the difference.
    """
    # No other call notices it if the tensor is new, the result of a call that returns no alias, and later calls only
    # read it through the result of `transpose_`.
    if node.target is _TRANSPOSES and isinstance(source := node.args[0], Node):
        is_new = isinstance(source.target, OpOverload) and all(
            x.alias_info is None for x in (*schema_of(source.target).arguments, *schema_of(source.target).returns)
        )
        order = {each: place for place, each in enumerate(node.graph.nodes)} if is_new else {}
        if is_new and all(order[user] <= order[node] for user in source.users):
            return torch.ops.aten.transpose.int
    target: Any = node.target
    # Unsafe or not, a split returns views of parts of its input.
    return known.SPLITS.get(target, target)


def _operator(node: Node) -> str:
    target = _target(node)
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{operators.name_of(target)}"
    name = getattr(target, "__name__", None)
    if name == "getitem" and getattr(target, "__module__", None) == "_operator":
        return "getitem"
    raise _refused(node, f"a call of {target}, which is no operator")


def _place(node: Node) -> CallOrigin:
    if node.op != "call_function":
        return CallOrigin()
    origin = origin_of(node)
    return CallOrigin(origin.module, origin.direction, node.meta.get(CHUNK_KEY), origin.source)


def _refused(node: Node, what: str) -> RefusedError:
    return RefusedError(f"{what} (`{node.name}`)", where=symbols.source_of(node))

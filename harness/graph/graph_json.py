"""Converts a finished graph to JSON values and back.

For example, `graph_from_json(graph_to_json(module))` has the same nodes and the same generated code. Reading a graph
executes no code. Operators are stored as names, and looked up among torch's operators and a few Python functions. For
an untrusted graph, state the allowed operators (`graph.backend.allowed`).

A node keeps its module, direction, source line, part of a mixture of experts and chunk, but no other metadata.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from bitproof.harness.errors import BitproofError
from bitproof.harness.graph.observation import observed
from bitproof.harness.graph.origin import META_KEY, Origin
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.torch_compat import HigherOrderOperator, OpOverload

Json = Any
"""Values that `json` writes and reads unchanged: None, bool, int, float, str, and lists and dicts of them."""


def region(index: int, *inputs: Any) -> Any:
    """Raise UnkeptError. In a graph, this function stands for the compiled region `index` until that is loaded."""
    raise UnkeptError("a graph calls a compiled region that was not loaded", found=f"region {index}")


_ARITHMETIC = (
    *("getitem", "add", "sub", "mul", "neg", "floordiv", "truediv", "mod", "pow"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
)
_OF_SIZES = ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not")

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _ARITHMETIC},
    **{f"torch.{name}": getattr(torch, name) for name in _OF_SIZES},
    "bitproof.observed": observed,
    "bitproof.region": region,
}
"""The functions that a graph may call besides operators, by name.

They compute with sizes, pick elements of results, observe activations, and stand for compiled regions.
"""

_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Kinds of torch's constants. For example, `torch.bfloat16` is written as {"dtype": "bfloat16"}."""


class UnkeptError(BitproofError):
    """A graph cannot be written as JSON values, or JSON values are not a valid graph."""


def graph_to_json(module: GraphModule) -> Json:
    """Return a graph and its nested graphs as JSON values. Raises UnkeptError if they cannot be written as JSON.

    For example, a graph with a tensor as attribute cannot be written, nor a graph that calls an unknown function.
    """
    return _Writer(module).written()


def refuse_operators(plain: Json, allowed: Container[str]) -> None:
    """Raise UnkeptError if a graph, or a graph nested in it, calls an operator outside `allowed`.

    `plain` is the graph as JSON values.
    """
    for name in [node[2] for node in plain["nodes"] if node[0] == "call_function"]:
        if name not in _FUNCTIONS and name not in allowed:
            raise UnkeptError("the graph calls an operator that is not allowed in a graph from elsewhere", found=name)
    for nested in plain["nested"].values():
        refuse_operators(nested, allowed)


def graph_from_json(plain: Json, allowed: Container[str] | None = None) -> GraphModule:
    """Return the graph that `graph_to_json` has written as JSON values. Raises UnkeptError if they are not valid.

    Operators outside `allowed` are refused before any of them is looked up. With None, any operator is allowed.
    """
    try:
        if allowed is not None:
            refuse_operators(plain, allowed)
        return _read(plain)
    except (AttributeError, IndexError, KeyError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        raise UnkeptError("not a valid graph file", found=f"{type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.index = {node: number for number, node in enumerate(module.graph.nodes)}
        # Many nodes share a place (module, direction, source line, part, chunk): each is written once, and a node has
        # its index.
        self.places: dict[tuple[Any, ...], int] = {}
        self.nested: dict[str, Json] = {}

    def written(self) -> Json:
        nodes = [self._node(node) for node in self.module.graph.nodes]
        return {"nodes": nodes, "places": [list(place) for place in self.places], "nested": self.nested}

    def _node(self, node: Node) -> Json:
        # The reader takes these fields in the same order: see `_read`.
        return [node.op, node.name, self._target(node), self._place(node), *map(self._value, (node.args, node.kwargs))]

    def _target(self, node: Node) -> str:
        if node.op == "get_attr":
            self._attribute(node)
        if node.op in ("placeholder", "output", "get_attr"):
            return str(node.target)
        target: Any = node.target
        if node.op == "call_function":
            if target in _NAMES:
                return _NAMES[target]
            name = f"higher_order.{target.name()}" if isinstance(target, HigherOrderOperator) else str(target)
            # The name must lead back to this operator, since the reader looks it up.
            if isinstance(target, (HigherOrderOperator, OpOverload)) and _operator(name) is target:
                return name
        raise UnkeptError(f"node {node.name} calls what is no operator", found=f"{node.op} {target}")

    def _attribute(self, node: Node) -> None:
        name = str(node.target)
        if name in self.nested:
            return
        value = getattr(self.module, name, None)
        if not isinstance(value, GraphModule):
            raise UnkeptError(f"node {node.name} reads what is no graph", found=f"{name}, a {type(value).__name__}")
        self.nested[name] = graph_to_json(value)

    def _place(self, node: Node) -> int | None:
        if "bitproof" in node.meta:
            raise UnkeptError(f"node {node.name} has a foreign place")
        origin = node.meta.get(META_KEY)
        # Origins are tuples, so a place is a tuple of the origin's fields and the chunk.
        place = (*origin, node.meta.get(CHUNK_KEY)) if isinstance(origin, Origin) else None
        return None if place is None else self.places.setdefault(place, len(self.places))

    def _value(self, value: Any) -> Json:
        """Convert an argument to JSON. Lists stay lists, and any other container becomes {kind: its items}.

        For example, (1, 2) becomes {"tuple": [1, 2]}.
        """
        # Exact types: a subclass would come back as its base class.
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Node):
            return {"node": self.index[value]}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, slice):
            return {"slice": [self._value(part) for part in (value.start, value.stop, value.step)]}
        if type(value) is tuple:
            return {"tuple": [self._value(item) for item in value]}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": {key: self._value(item) for key, item in value.items()}}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        for kind, of in _CONSTANTS.items():
            if isinstance(value, of):
                return {kind: str(value).removeprefix("torch.")}
        raise UnkeptError("an argument has no form as data", found=f"{value!r}, a {type(value).__name__}")


def _read(plain: Json) -> GraphModule:
    graph = Graph()
    nodes: list[Node] = []
    # Nested graphs first, as the outer graph refers to them.
    attributes = {name: _read(nested) for name, nested in plain["nested"].items()}
    places = [(Origin(*place[:-1]), place[-1]) for place in plain["places"]]
    for op, name, target, place, args, kwargs in plain["nodes"]:
        if op not in ("placeholder", "get_attr", "call_function", "output"):
            raise UnkeptError("not a valid graph file", found=f"unknown node op {op!r}")
        # Torch writes the target into generated code unchanged: text that is no name could be any code.
        if op != "call_function" and not _is_name(target):
            raise UnkeptError("not a valid graph file", found=f"invalid name {target!r}")
        if op == "get_attr" and target not in attributes:
            raise UnkeptError("not a valid graph file", found=f"missing attribute {target}")
        callee = _operator(target) if op == "call_function" else target
        arguments, options = _value(args, nodes), _value(kwargs, nodes)
        if not isinstance(arguments, tuple) or not isinstance(options, dict):  # torch asserts it, without -O
            raise UnkeptError(
                "not a valid graph file", found=f"arguments {repr(arguments)[:80]} and options {repr(options)[:80]}"
            )
        # Torch does not check the names of options either.
        if not all(map(_is_name, options)):
            raise UnkeptError("not a valid graph file", found=f"invalid keyword names {list(options)}")
        node = graph.create_node(op, callee, arguments, options, name=name)
        if place is not None:
            node.meta[META_KEY], chunk = places[place]
            if chunk is not None:
                node.meta[CHUNK_KEY] = chunk
        nodes.append(node)
    return GraphModule(attributes, graph)


def _value(plain: Json, nodes: Sequence[Node]) -> Any:
    if isinstance(plain, list):
        return [_value(item, nodes) for item in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, value)] = plain.items()
    match kind:
        case "node":
            # A negative index would select a node from the end; it is out of range instead.
            return nodes[value if value >= 0 else len(nodes)]
        case "slice":
            return slice(*(_value(part, nodes) for part in value))
        case "tuple":
            return tuple(_value(item, nodes) for item in value)
        case "dict":
            return {key: _value(item, nodes) for key, item in value.items()}
        case "device":
            return torch.device(value)
    # The kind is checked afterwards, so that no other attribute of torch gets into a graph.
    constant = getattr(torch, value)
    if not isinstance(constant, _CONSTANTS[kind]):
        raise UnkeptError("not a valid graph file", found=f"{kind} {value}")
    return constant


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _operator(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, (HigherOrderOperator, OpOverload)):
        raise UnkeptError("not a valid graph file", found=f"unknown operator {name}")
    return found

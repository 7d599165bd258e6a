"""Writes a graph node by node, and computes each node's fake value, `val`.

The operator itself computes the fake value, from the fake values of the node's inputs. Calls with the same operator,
equal constants and equal layouts of inputs are computed once. So nodes may share a fake tensor, even if they do not
share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.analysis.halves import HALF_KEY, Half
from bitproof.harness.graph.origin import META_KEY, Origin
from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.torch_compat import FakeTensor, LazyGraphModule, forget_memos

CHUNK_KEY = "chunk"
"""The metadata key of a node's chunk, 0 or 1. Nodes that run once do not have it."""


class GraphWriter:
    """Writes a new graph node by node.

    - `source`: the graph that the pass reads.
    - `symbol`, `extent`: the number `extent` replaces the chunk symbol in the sizes of the new graph's inputs.

    If the graph is partitioned, set `half` before writing the calls of a half.
    """

    def __init__(self, source: GraphModule, symbol: Any, extent: int) -> None:
        self.source = source
        self.graph = Graph()
        self.half: Half | None = None
        self._symbol = symbol
        self._extent = extent
        self._fake_mode = step_fake_mode(_shape_env_without(symbol), remembers=False, repeats=True)
        # Results of calls by operator and arguments, in which a number stands for the layout of each node.
        self._known: dict[Any, Any] = {}
        self._layouts: dict[Any, int] = {}
        self._layout_of: dict[Node, int] = {}
        self._nested: dict[str, GraphModule] = {}

    def placeholder(self, source: Node) -> Node:
        """Copy a graph input, replace the chunk symbol in it by a number, and return the new node."""
        node = self.graph.placeholder(source.name)
        return self._finish(node, self.resolved(source.meta["val"], self._extent), source)

    def get_attr(self, source: Node, extent: int) -> Node:
        """Copy a reference to an attribute or nested graph, and return the new node. `extent` replaces the chunk
        symbol."""
        value = getattr(self.source, str(source.target))
        if isinstance(value, GraphModule):
            # A nested graph exists once for each extent: whole, and half for chunks.
            name = f"{source.target}_{extent}"
            if name not in self._nested:
                self._nested[name] = self._specialized(value, extent)
            node = self.graph.create_node("get_attr", name, name=source.name)
            return self._finish(node, self._nested[name], source)
        node = self.graph.create_node("get_attr", source.target, name=source.name)
        return self._finish(node, self.resolved(source.meta.get("val"), extent), source)

    def call(
        self,
        source: Node,
        args: Any,
        kwargs: Any,
        *,
        chunk: int | None = None,
        target: Any = None,
        origin: Origin | None = None,
    ) -> Node:
        """Write a call, and return its node.

        - `source`: a call in the graph that the pass reads. The new call gets its metadata.
        - `args`, `kwargs`: the arguments, with nodes of the new graph.
        - `chunk`: the number of the chunk, which becomes part of the call's name and metadata; None outside chunks.
        - `target`: the operator, by default that of `source`.
        - `origin`: the call's origin, by default that of `source`.
        """
        target = target or source.target
        node = self.graph.create_node("call_function", target, args, kwargs, name=_name(source, target, chunk))
        self._finish(node, self._evaluate(target, args, kwargs), source)
        if chunk is not None:
            node.meta[CHUNK_KEY] = chunk
        if self.half is not None:
            node.meta[HALF_KEY] = self.half
        if origin is not None:
            node.meta[META_KEY] = origin
        return node

    def output(self, source: Node, args: Any) -> None:
        self.graph.output(args[0]).meta.update(source.meta)

    def module(self) -> GraphModule:
        attributes: dict[str, Any] = dict(self._nested)
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target not in attributes:
                attributes[node.target] = getattr(self.source, node.target)
        # Its code is generated only at its first use, as the next pass often writes the graph again.
        return LazyGraphModule(attributes, self.graph)

    def resolved(self, value: Any, extent: int) -> Any:
        """Return a value of the source graph in which `extent` replaces the chunk symbol.

        A tensor becomes a new fake tensor.
        """
        if isinstance(value, (tuple, list)):
            return type(value)(self.resolved(item, extent) for item in value)
        if symbols.is_scalar_of(value, self._symbol):
            return symbols.number(value, self._symbol, extent)
        if not isinstance(value, torch.Tensor):
            return value

        def concrete(size: Any) -> Any:
            return symbols.number(size, self._symbol, extent) if symbols.is_scalar_of(size, self._symbol) else size

        sizes, strides = [concrete(s) for s in value.shape], [concrete(s) for s in value.stride()]
        with self._fake_mode:
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    def _specialized(self, module: GraphModule, extent: int) -> GraphModule:
        # The nested graph has numbers in place of the chunk symbol and of scalars computed from it.
        writer = GraphWriter(module, self._symbol, extent)
        env: dict[Node, Any] = {}
        for node in module.graph.nodes:
            if node.op != "placeholder" and symbols.is_scalar_of(node.meta.get("val"), self._symbol):
                env[node] = symbols.number_of(node, self._symbol, extent)
            elif node.op == "placeholder":
                env[node] = writer.placeholder(node)
            elif node.op == "get_attr":
                env[node] = writer.get_attr(node, extent)
            else:
                args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
                if node.op == "output":
                    writer.output(node, args)
                else:
                    env[node] = writer.call(node, args, kwargs)
        return writer.module()

    def _finish(self, node: Node, value: Any, source: Node) -> Node:
        # All other metadata, such as origin, half and marks, belong to the new node, too.
        node.meta.update(source.meta)
        node.meta["val"] = value
        self._layout_of[node] = self._layout(value)
        return node

    def _evaluate(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Each such call makes new symbols, also for inputs that were seen before: two `nonzero` have different sizes.
        if operators.reads_data(target):
            return self._run(target, args, kwargs, _without_memory)
        # Layers repeat, so few calls are distinct, and each distinct call runs once.
        key = target, self._argument_key(args), self._argument_key(tuple(kwargs.items()))
        if key not in self._known:
            self._known[key] = self._run(target, args, kwargs, lambda node: node.meta["val"])
        return self._known[key]

    def _run(self, target: Any, args: Any, kwargs: Any, value_of: Callable[[Node], Any]) -> Any:
        assert self._fake_mode.shape_env is not None
        with torch.no_grad(), self._fake_mode, self._fake_mode.shape_env.ignore_fresh_unbacked_symbols():
            return target(*map_arg(args, value_of), **map_arg(kwargs, value_of))

    def _argument_key(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return ("layout", self._layout_of[argument])
        if isinstance(argument, (tuple, list)):
            return tuple([self._argument_key(item) for item in argument])
        if isinstance(argument, dict):
            return tuple([(name, self._argument_key(item)) for name, item in argument.items()])
        # 1, 1.0 and True are equal, yet give different dtypes.
        return (type(argument), argument)

    def _layout(self, value: Any) -> int:
        return self._layouts.setdefault(layout_key(value), len(self._layouts))


def _without_memory(node: Node) -> Any:
    """Return a node's value without cached symbols, as an argument for a call that must make new symbols.

    For example, a fake tensor caches the symbol that a call of `nonzero` makes. The cache is emptied here.
    """
    value = node.meta["val"]
    if isinstance(value, FakeTensor):
        forget_memos(value)
    return value


def _shape_env_without(symbol: Any) -> ShapeEnv:
    shape_env = ShapeEnv()
    # A data-dependent size must not get the name of the chunk symbol. Symbols are numbered in order, so all up to the
    # chunk symbol's number are used up.
    while shape_env.create_unbacked_symint().node.expr != symbol:
        pass
    shape_env.pending_fresh_unbacked_symbols.clear()
    return shape_env


def layout_key(value: Any) -> Any:
    """Return a key that is equal for values with equal layouts.

    A tensor's layout is its dtype, device, sizes, strides and offset. Numbers have equal keys if they are equal and of
    the same type. Tuples and lists have the keys of their items.
    """
    if isinstance(value, FakeTensor):
        # By expression: two symbolic sizes are different objects even if they are equal.
        numbers = *value.shape, *value.stride(), value.storage_offset()
        flags = value.is_conj(), value.is_neg()
        return (value.dtype, value.device, flags, value.dim(), *map(symbols.expression, numbers))
    if isinstance(value, (tuple, list)):
        return tuple(layout_key(item) for item in value)
    return (type(value), id(value) if isinstance(value, GraphModule) else symbols.expression(value))


def _name(source: Node, target: Any, chunk: int | None) -> str:
    own = source.name if target is source.target else f"{source.name}_{target.__name__.split('.')[0]}"
    return own if chunk is None else f"{own}_chunk{chunk}"

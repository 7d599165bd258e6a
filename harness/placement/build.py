"""Build the placement problem of a traced step: which layers are split, which parameters are sharded, at which cost.

The ranks form a mesh with two axes:

- Data axis: each rank reads its own batch, so activations have no choice. A parameter is sharded or replicated.
- Tensor axis: a layer is whole on each rank, or split. Each operator in a split layer has DTensor's strategies.

Layers of the same kind are traced once and get the same placement. Their costs are multiplied by their number in the
model. The problem has:

1. A node for each layer: whole or split.
2. A node for each parameter: sharded or replicated on the data axis, and placed like its layer on the tensor axis. It
   costs its all-gather and the sum of its gradient. A rank stores its value, its gradient and AdamW's two states in
   float32, and a copy in the compute dtype, which is kept for backward.
3. A node for each operator, with its strategies. Strategies that share work between ranks require a split layer. An
   operator costs its FLOPs and the bytes it moves. A rank stores the results of all forward operators that are not
   views, as if all were saved for backward. A sum of gradients from several layers belongs to no layer, and has the
   placement of its summands.
4. An edge for each tensor that a node passes to another, with DTensor's redistribute costs. A tensor with two readers
   counts twice. A parameter is read in its own placement, and its gradient is converted to this placement.

Costs that no choice changes are left out: the exchange of tokens between experts, and the sums of expert outputs.
Experts are split whenever the tensor axis has several ranks, and their operators count as evenly shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from bitproof.harness.graph.operators import is_view
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.placement.problem import Choice, Matrix, PlacementProblem
from bitproof.harness.placement.strategies import (
    PARTIAL,
    REPLICATED,
    Strategy,
    redistribute_cost,
    strategies_of,
    tensors_of,
)

FLOPS_PER_US = 400e6
BYTES_PER_US = 2e6
"""A device's work per microsecond: 400 TFLOP/s and 2 TB/s, about an H100.

DTensor's costs of collectives are also for Ampere and Hopper.
"""

STATE_BYTES = 16
"""Bytes per element of a parameter: value, gradient, and AdamW's two states, each in float32."""

WHOLE, SPLIT = "whole", "split"
SHARDED = "S0"


@dataclass(frozen=True, kw_only=True)
class PlacedLayer:
    """A layer, and its possible placements on the tensor axis (`may_be`): "whole" or "split".

    `is_opaque`: whether the layer has experts. If so, its operators have no strategies to choose from, and their work
    counts as evenly shared between ranks.
    """

    name: str
    may_be: tuple[str, ...]
    is_opaque: bool = False


@dataclass(frozen=True, kw_only=True)
class PlacedParameter:
    """A parameter to place on the ranks.

    - `shape`: the shape of the whole parameter.
    - `layer`: the layer that decides the placement on the tensor axis; None if there is none.
    - `split_dim`: the dim along which a split layer splits the parameter; None if it does not.
    - `data_ranks`: the number of ranks over which rows may be sharded.
    - `parts`: the number of parts into which expert parallelism divides dim 0.
    """

    name: str
    shape: tuple[int, ...]
    layer: str | None = None
    split_dim: int | None = None
    data_ranks: int = 1
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class PlacementInputs:
    """Facts that a traced step does not have: its layers and parameters, and how often the model has each layer.

    - `times`: how many layers of the model a traced layer represents, such as {"layers.0": 12}. Other modules
      represent only themselves.
    - `compute`, `reduce`: the dtypes of computation and of sums over ranks.
    """

    layers: Sequence[PlacedLayer]
    parameters: Sequence[PlacedParameter]
    tensor_ranks: int
    times: Mapping[str, int]
    compute: torch.dtype
    reduce: torch.dtype

    def times_of(self, module: str | None) -> int:
        """Return how many modules of the model a module of the traced step represents."""
        return self.times.get(".".join((module or "").split(".")[:2]), 1)

    def layer_of(self, module: str | None) -> PlacedLayer | None:
        """Return the layer that is `module` or contains it; None if there is none."""
        name = f"{module}."
        return next((layer for layer in self.layers if name.startswith(f"{layer.name}.")), None)


class _Source(NamedTuple):
    """The node of the problem that makes a tensor, and the index of the tensor among that node's outputs.

    `is_parameter`: whether the tensor is computed from parameters only, as the cast of a weight is. If so, it cannot be
    converted to another placement.
    """

    node: str
    output: int
    is_parameter: bool


def build(step: StepGraph, facts: PlacementInputs) -> PlacementProblem:
    """Build the placement problem of a step, traced with whole parameters in the compute dtype and one rank's batch."""
    # An edge needs both of its nodes, so nodes are added in the order in which they are read.
    builder = _Builder(facts)
    for layer in facts.layers:
        builder.program.add_node(layer.name, [Choice(kind) for kind in layer.may_be])
    inputs = list(step.module.graph.find_nodes(op="placeholder"))
    parameters = {parameter.name: parameter for parameter in facts.parameters}
    for name, node in zip(step.parameter_names, inputs, strict=False):
        builder.add_parameter(parameters[name], node)
    for node in inputs[len(step.parameter_names) :]:
        builder.add_input(node)
    for node in step.module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            builder.add_operator(node)
    outputs = cast(Sequence[Any], step.module.graph.output_node().args[0])
    for name, gradient in zip(step.parameter_names, outputs[1:], strict=True):
        builder.add_gradient(parameters[name], gradient)
    return builder.program


class _Builder:
    def __init__(self, facts: PlacementInputs) -> None:
        self.program = PlacementProblem()
        self._facts = facts
        self._size = facts.tensor_ranks
        self._sources: dict[Node, dict[int, _Source]] = {}
        self._placements: dict[str, list[tuple[str, ...]]] = {}
        """For each node: the placements of its outputs on the tensor axis, a tuple for each choice."""

    def add_parameter(self, parameter: PlacedParameter, node: Node) -> None:
        times = self._facts.times_of(parameter.name)
        # Point 2 at the top of this file.
        layer = next((x for x in self._facts.layers if x.name == parameter.layer), None)
        # A parameter is whole if its layer may be, or if splitting the layer does not split it.
        tensor = [REPLICATED] * (layer is None or WHOLE in layer.may_be or parameter.split_dim is None)
        if layer is not None and SPLIT in layer.may_be and parameter.split_dim is not None:
            tensor.append(f"S{parameter.split_dim}")
        choices = [(on_data, on_tensor) for on_data in (SHARDED, REPLICATED) for on_tensor in tensor]
        self.program.add_node(parameter.name, [self._parameter_choice(parameter, *x, times) for x in choices])
        self._placements[parameter.name] = [(on_tensor,) for _, on_tensor in choices]
        self._sources[node] = {0: _Source(parameter.name, 0, True)}
        if layer is not None and parameter.split_dim is not None:
            fits = [
                [0.0 if (kind == SPLIT) == (x != REPLICATED) else np.inf for _, x in choices] for kind in layer.may_be
            ]
            self.program.add_edge(layer.name, parameter.name, np.array(fits))

    def _parameter_choice(self, parameter: PlacedParameter, on_data: str, on_tensor: str, times: int) -> Choice:
        shape = list(parameter.shape)
        shape[0] //= parameter.parts
        if on_tensor != REPLICATED:
            shape[int(on_tensor[1:])] //= self._size
        ranks, facts = parameter.data_ranks, self._facts
        # FSDP pads dim 0 to a multiple of the ranks, and collectives carry the padding.
        rows = -(-shape[0] // ranks) if on_data == SHARDED else shape[0]
        padded = (-(-shape[0] // ranks) * ranks, *shape[1:])
        if on_data == SHARDED:
            cost = redistribute_cost(padded, facts.compute, ranks, SHARDED, REPLICATED)
            cost += redistribute_cost(padded, facts.reduce, ranks, PARTIAL, SHARDED)
        else:
            cost = redistribute_cost(tuple(shape), facts.reduce, ranks, PARTIAL, REPLICATED)
        # A rank keeps the state of its own rows, and the whole parameter in the compute dtype.
        held = STATE_BYTES * rows * math.prod(shape[1:]) + facts.compute.itemsize * math.prod(shape)
        return Choice(f"{on_data} {on_tensor}", (cost if ranks > 1 else 0.0) * times, held * times)

    def add_input(self, node: Node) -> None:
        # A buffer or an input is whole on each rank of the tensor axis.
        self.program.add_node(node.name, [Choice(REPLICATED)])
        self._placements[node.name] = [(REPLICATED,)]
        self._sources[node] = {0: _Source(node.name, 0, False)}

    def add_operator(self, node: Node) -> None:
        # Points 3 and 4 at the top of this file.
        result = node.meta.get("val")
        # The call only selects an output of another node, so it needs no node of its own.
        if getattr(node.target, "__name__", "") == "getitem":
            source = self._sources.get(cast(Node, node.args[0]), {}).get(cast(int, node.args[1]))
            if source is not None:
                self._sources[node] = {0: source}
            return
        outputs = tensors_of(result)
        if not outputs:
            return
        origin, facts = origin_of(node), self._facts
        layer, times = facts.layer_of(origin.module), facts.times_of(origin.module)
        given = [(x, source) for x in _tensor_arguments(node) if (source := self._sources.get(x, {}).get(0))]
        args, kwargs = map_arg(node.args, _value), map_arg(node.kwargs, _value)
        strategies = [Strategy((REPLICATED,) * len(outputs), (REPLICATED,) * len(given))]
        # Only operators of such a layer, and sums of gradients outside of all layers, have strategies to choose from.
        is_free = layer is not None and not layer.is_opaque and SPLIT in layer.may_be
        if given and self._size > 1 and (is_free or origin.module is None):
            strategies = strategies_of(node.target, args, kwargs, result, self._size)
        if origin.module is None:
            # Sums of gradients outside any module: they may add partial sums, but not shards of unrelated layouts.
            strategies = [x for x in strategies if not x.is_shared or set(x.outputs) == {PARTIAL} == set(x.inputs)]
        # Experts divide their work without any strategy.
        share = self._size if layer is not None and layer.is_opaque else 1
        is_kept = origin.direction == "forward" and not is_view(node.target)
        work = _microseconds(node, args, kwargs, result, [x for x, _ in given])
        choices = [
            Choice(
                f"{' '.join(strategy.outputs)} < {' '.join(strategy.inputs)}",
                work * times / (self._size if strategy.is_shared else share),
                is_kept
                * times
                * sum(self._stored_bytes(x, p) for x, p in zip(outputs, strategy.outputs, strict=True))
                / share,
            )
            for strategy in strategies
        ]
        self.program.add_node(node.name, choices)
        self._placements[node.name] = [strategy.outputs for strategy in strategies]
        # A call that reads only parameters, such as a cast of a weight, keeps their placement: its result cannot be
        # converted either.
        keeps_placement = bool(given) and all(source.is_parameter for _, source in given)
        self._sources[node] = {i: _Source(node.name, i, keeps_placement) for i in range(len(outputs))}
        for place, (x, source) in enumerate(given):
            if share > 1 and source.is_parameter:  # an opaque layer reads its parameters in their own placement
                continue
            costs = self._costs(source, tensors_of(x.meta["val"])[0], [s.inputs[place] for s in strategies])
            self._add_edge(source.node, node.name, costs * times)
        if is_free and layer is not None:
            # Strategies that share work need a split layer.
            fits = [[np.inf if kind == WHOLE and x.is_shared else 0.0 for x in strategies] for kind in layer.may_be]
            self.program.add_edge(layer.name, node.name, np.array(fits))

    def add_gradient(self, parameter: PlacedParameter, gradient: Node) -> None:
        """Add an edge that converts a gradient, in the reduce dtype, to its parameter's placement on the tensor axis.

        If the parameter is whole, this conversion may be a sum over the tensor axis.
        """
        layer = self._facts.layer_of(parameter.layer)
        if layer is not None and layer.is_opaque:
            return
        source = self._sources[gradient][0]
        placements = [on_tensor for (on_tensor,) in self._placements[parameter.name]]
        x = gradient.meta["val"].to(self._facts.reduce)
        costs = self._costs(source, x, placements) * self._facts.times_of(parameter.name)
        self._add_edge(source.node, parameter.name, costs)

    def _stored_bytes(self, x: Tensor, placement: str) -> float:
        whole = x.numel() * x.element_size()
        return whole / self._size if placement not in (REPLICATED, PARTIAL) else whole

    def _costs(self, source: _Source, x: Tensor, wanted: Sequence[str]) -> Matrix:
        """Return the costs of converting a tensor, with a row for each placement that it may have, and a column for
        each of `wanted`.
        """
        shape = tuple(x.shape)

        def cost(before: str, after: str) -> float:
            if source.is_parameter:
                return 0.0 if before == after else float("inf")
            return redistribute_cost(shape, x.dtype, self._size, before, after)

        before = [outputs[source.output] for outputs in self._placements[source.node]]
        return np.array([[cost(p, q) for q in wanted] for p in before])

    def _add_edge(self, first: str, second: str, costs: Matrix) -> None:
        if costs.any():
            self.program.add_edge(first, second, costs)


def _value(node: Node) -> Any:
    return node.meta["val"]


def _tensor_arguments(node: Node) -> list[Node]:
    found: list[Node] = []

    def note(argument: Node) -> Node:
        # A node that is two arguments is listed twice.
        if isinstance(argument.meta.get("val"), Tensor):
            found.append(argument)
        return argument

    map_arg((node.args, node.kwargs), note)
    return found


def _microseconds(node: Node, args: Any, kwargs: Any, result: Any, given: Sequence[Node]) -> float:
    """Estimate the time of a call on whole tensors, from its FLOPs and the bytes that it reads and returns.

    `given` are the nodes that it reads. The time of a view is 0.
    """
    if is_view(node.target):
        return 0.0
    moved = sum(x.numel() * x.element_size() for x in (*tensors_of(result), *(n.meta["val"] for n in given)))
    return _flops(node.target, args, kwargs, result) / FLOPS_PER_US + moved / BYTES_PER_US


def _flops(operator: Any, args: Any, kwargs: Any, result: Any) -> float:
    name = str(operator)
    if "_flash_attention_for_cpu" in name:
        # Two products of queries with keys' and values' rows in forward, five in backward.
        query, key = (args[1], args[2]) if "backward" in name else (args[0], args[1])
        products = 5 if "backward" in name else 2
        return float(2 * products * query.numel() * key.shape[2])
    count = flop_registry.get(getattr(operator, "overloadpacket", None))
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0

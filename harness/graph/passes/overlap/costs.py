"""Estimates the cost of each node of a graph, from lines that are fitted to measured times by least squares.

Every node has a kind, and every kind has a line `seconds = fixed + per_unit * amount`:

| kind                           | nodes                                               | amount                    |
|--------------------------------|-----------------------------------------------------|---------------------------|
| `view`                         | rearranges without moving data, or computes a size  | 0                         |
| `matmul`, `attention`          | products of matrices, attention                     | floating-point operations |
| `host_sync`                    | reads a number from the device                      | 0                         |
| `memory`                       | everything else                                     | bytes read and written    |
| `all_to_all_single/2`          | a collective of 2 ranks in flight, after its launch | bytes sent by each rank   |
| `launch all_to_all_single/2`   | the call that launches it, until it returns         | bytes sent by each rank   |

Most collectives state their number of ranks; for an all-reduce, it is looked up by the group's name. If that number was
not measured, the line of the nearest number applies. If it is unknown, the line of the largest number applies.

Routing is assumed to be balanced: in an all-to-all, each rank sends equally many rows to every rank. Any other size
that depends on data counts as 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from bitproof.harness.errors import PassError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.graph import operators
from bitproof.harness.graph.symbols import SYMBOLIC_SCALARS, expression, remainder
from bitproof.harness.operators import named
from bitproof.harness.step.storages import Storages

CPU_GLOO = Path(__file__).with_name("cpu_gloo_8_ranks.json")
"""The model for the CPU, which was fitted to 8 gloo ranks. Its `description` names the machine."""

SCHEMA = 1
_REPEATS = 20


class NodeWork(NamedTuple):
    """A node's kind, and the amount of its work in the unit of the kind."""

    kind: str
    amount: float


class Cost(NamedTuple):
    """A node's cost in seconds.

    - `compute`: the time for which the node occupies the rank.
    - `transfer`: the time for which a collective is in flight after its launch; 0 for other nodes.
    """

    compute: float
    transfer: float


@dataclass(frozen=True)
class CostLine:
    """The line `seconds = fixed + per_unit * amount`, and its errors over the measured times.

    `points` is the number of measured times.
    """

    fixed: float
    per_unit: float
    points: int
    r2: float
    median_relative_error: float


@dataclass(frozen=True)
class CostModel:
    """A line for each kind of work. `description` names the machine of the measurements."""

    description: dict[str, Any]
    lines: Mapping[str, CostLine]

    def seconds(self, work: NodeWork) -> float:
        """Return the expected seconds of a node's work. Raises PassError for a kind that was not measured."""
        line = self.lines.get(work.kind) or self._nearest(work.kind)
        return line.fixed + line.per_unit * work.amount

    def _nearest(self, kind: str) -> CostLine:
        name, _, size = kind.partition("/")
        measured = {
            int(known.split("/")[1]): line for known, line in self.lines.items() if known.startswith(f"{name}/")
        }
        if not measured:
            raise PassError(
                f"the cost model has no line for {name}",
                expected="one of " + ", ".join(sorted(self.lines)),
                found=name,
                fix="fit a model on a graph that calls it: python tests/benchmarks/fit_costs.py --help",
            )
        return measured[min(measured, key=lambda known: abs(math.log(known / (int(size) or max(measured)))))]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> CostModel:
        """Read a model that `save` wrote. Raises PassError for an invalid file."""
        try:
            values = json.loads(read_plain(path))
            if values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']}")
            lines = {kind: CostLine(**line) for kind, line in values["lines"].items()}
            for kind, line in lines.items():
                _check_line(kind, line)
            if not isinstance(values["description"], dict):
                raise TypeError("a description that is no object")
            if not all(math.isfinite(x) and x >= 0 for line in lines.values() for x in (line.fixed, line.per_unit)):
                raise ValueError("a line that is not finite and positive")
            return CostModel(values["description"], lines)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise PassError(
                f"cannot read the cost model {path}",
                expected=f"a file of schema {SCHEMA} written by tests/benchmarks/fit_costs.py",
                found=f"{type(error).__name__}: {error}",
            ) from error


def _check_line(kind: str, line: CostLine) -> None:
    _, slash, size = kind.partition("/")
    if slash and not re.fullmatch("[1-9][0-9]{0,8}", size):
        raise ValueError(f"the kind {kind!r}, whose end is no number of ranks")
    if any(type(x) not in (int, float) for x in dataclasses.astuple(line)):
        raise TypeError(f"the line {kind!r}, which holds more than numbers")


def fit(points: Iterable[tuple[NodeWork, float]], description: dict[str, Any]) -> CostModel:
    """Fit a cost model to measured pairs (work, seconds), by weighted least squares.

    Each kind of work gets a line, which minimizes the sum of error^2 / predicted seconds. Its coefficients are not
    negative.
    """
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for work, seconds in points:
        by_kind.setdefault(work.kind, []).append((work.amount, seconds))
    return CostModel(description, {kind: _fit_line(by_kind[kind]) for kind in sorted(by_kind)})


def _fit_line(points: list[tuple[float, float]]) -> CostLine:
    x, y = torch.tensor(points, dtype=torch.float64).unbind(1)
    predicted = torch.ones_like(y)
    for _ in range(_REPEATS):
        # Noise grows with time: without weights, the largest sizes would determine the cost of small sizes.
        weight = (1 / predicted) / (1 / predicted).sum()
        fixed, per_unit = _weighted_line(x, y, weight)
        # The last term limits the weight of an amount of 0.
        predicted = fixed + per_unit * x + 1e-3 * y.mean()
    errors, variance = y - (fixed + per_unit * x), ((y - y.mean()) ** 2).sum()
    r2 = 1 - (errors**2).sum() / variance if variance > 0 else torch.ones_like(variance)
    return CostLine(fixed.item(), per_unit.item(), len(points), r2.item(), (errors.abs() / y).median().item())


def _weighted_line(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    mean_x, mean_y = (weight * x).sum(), (weight * y).sum()
    spread = (weight * (x - mean_x) ** 2).sum()
    nothing = torch.zeros_like(spread)
    per_unit = (weight * (x - mean_x) * (y - mean_y)).sum() / spread if spread > 0 else nothing
    fixed = mean_y - per_unit * mean_x
    if per_unit < 0:
        return mean_y, nothing
    return (fixed, per_unit) if fixed >= 0 else (nothing, (weight * x * y).sum() / (weight * x * x).sum())


def node_costs(
    graph: Graph, model: CostModel | None, group_sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[Node, Cost]:
    """Return the cost of every node. Without a model, compute costs 0, and the transfer of every collective costs 1.

    `group_sizes` maps a group's name to its number of ranks.
    """
    sizes = Sizes()
    storages = Storages(graph.nodes)
    costs = {}
    for node in graph.nodes:
        is_collective = operators.is_collective(node)
        if is_collective:
            sizes.expect_balance(node)
        if node.op != "call_function" or operators.is_wait(node):
            costs[node] = Cost(0.0, 0.0)
        elif model is None:
            costs[node] = Cost(0.0, float(is_collective))
        else:
            work = work_of(node, storages.is_view(node), lambda x: x.meta.get("val"), sizes.number, group_sizes)
            seconds = model.seconds(work)
            costs[node] = Cost(model.seconds(launching(work)), seconds) if is_collective else Cost(seconds, 0.0)
    return costs


def launching(collective: NodeWork) -> NodeWork:
    return NodeWork(f"launch {collective.kind}", collective.amount)


def work_of(
    node: Node,
    is_view: bool,
    value_of: Callable[[Node], Any],
    number: Callable[[Any], float] = float,
    group_sizes: Mapping[str, int] = MappingProxyType({}),
) -> NodeWork:
    """Return the kind and the amount of a node's work.

    - `is_view`: True if the node's result shares the storage of an argument.
    - `value_of`: returns a node's fake or real value.
    - `number`: converts a size to a number.
    - `group_sizes`: group's name -> number of ranks, for collectives that do not state the number.
    """

    def extent(x: Tensor) -> float:
        return math.prod(map(number, x.shape))

    def bytes_of(nodes: Iterable[Node]) -> float:
        return sum(extent(x) * x.element_size() for node in nodes for x in _tensors(value_of(node)))

    name = operators.operator_name(node)
    if operators.is_collective(node):
        size = _group_size(node) or group_sizes.get(operators.group_name(node), 0)
        return NodeWork(f"{name.removesuffix('_coalesced')}/{size}", bytes_of(node.all_input_nodes))
    if name == "_local_scalar_dense":
        return NodeWork("host_sync", 0)
    if node.target is operator.getitem or not list(_tensors(value_of(node))):
        return NodeWork("view", 0)
    if is_view and not operators.written_arguments(node):
        return NodeWork("view", 0)
    if (first := named(name).factors_from) is not None:
        left, right = [value_of(x) for x in node.args[first:][:2]]  # type: ignore[arg-type]
        experts = number(left.shape[0]) if left.dim() > right.dim() else 1  # one column per expert
        return NodeWork("matmul", 2 * extent(left) * number(right.shape[-1]) / experts)
    if operators.attends(node) or operators.attends_backward(node):
        # Q K^T and P V; backward has five products. There are as many queries as keys.
        query, key = (value_of(x) for x in node.args[:2])  # type: ignore[arg-type]
        return NodeWork("attention", (10 if name.endswith("backward") else 4) * extent(query) * number(key.shape[-2]))
    return NodeWork("memory", bytes_of([*node.all_input_nodes, node]))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _group_size(node: Node) -> int:
    name = operators.operator_name(node)
    if name == "all_to_all_single":
        return len(node.args[1])  # type: ignore[arg-type]
    return int(node.args[-2]) if name.startswith(("all_gather", "reduce_scatter")) else 0  # type: ignore[arg-type]


class Sizes:
    """Numbers for symbolic sizes. A size that depends on data gets an expected number (see the top of this file)."""

    def __init__(self) -> None:
        self._known: dict[sympy.Symbol, float] = {}
        self._numbers: dict[sympy.Basic, float] = {}

    def expect_balance(self, collective: Node) -> None:
        """Assume that an all-to-all is balanced: it receives equally many rows from each rank, in all as many as it
        sends.

        This gives a value to each unknown size of the result. Does nothing for other collectives.
        """
        if operators.operator_name(collective) != "all_to_all_single":
            return
        rows, received = collective.args[:2]
        for part in received:  # type: ignore[union-attr]
            value = part.meta["val"] if isinstance(part, Node) else part
            if isinstance(value, SYMBOLIC_SCALARS) and value.node.expr not in self._known:
                sent = self.number(rows.meta["val"].shape[0])  # type: ignore[union-attr]
                self._known[value.node.expr] = sent / len(received)  # type: ignore[arg-type]
        sent = self.number(rows.meta["val"].shape[0])  # type: ignore[union-attr]
        self._known |= remainder(expression(collective.meta["val"].shape[0]), self._known, sent)

    def number(self, size: Any) -> float:
        expr = expression(size)
        if isinstance(expr, int):
            return expr
        if expr not in self._numbers:
            known = {symbol: self._known.get(symbol, 0) for symbol in expr.free_symbols}
            self._numbers[expr] = float(expr.subs(known))
        return self._numbers[expr]

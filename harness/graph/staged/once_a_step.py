"""Finds the calls of a stage that run once a step instead of once a micro-batch.

Needs:    calls that are placed in stages and halves (placed_calls.py).
Promises: gathers give every micro-batch the same bits as its own gather would. Reductions give the bits of a stated
          order: each rank adds its gradients in the order of micro-batches, then the ranks' sums are reduced.
Refuses:  a gradient whose reduction cannot be taken out, such as a sum of two reduced gradients.

- Gathers: calls that are computed from parameters alone, such as casts and all-gathers.
- Reductions: calls from which only gradients are computed, without arithmetic within a rank: wider casts, packing,
  and reductions over ranks.

For example, all of 4 micro-batches read a weight that was gathered once, and the sum of their 4 gradients is
reduce-scattered once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.symbols import source_of

aten = torch.ops.aten

_PACKING = operators.VIEWS | {
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.slice.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
}
_REDUCTIONS = ("reduce_scatter", "all_reduce")


def find_gathers(calls: Iterable[Node], parameters: Iterable[Node], stages: Mapping[Node, int]) -> set[Node]:
    """Return the placed calls that are computed from parameters alone, and read in their own stage alone.

    `calls` are in the graph's order, and `stages` has the stage of each placed call.
    """
    found, only_parameters = set[Node](), set(parameters)
    for node in calls:
        has_effects = operators.is_random(node) or operators.is_check(node) or operators.written_arguments(node)
        if not node.all_input_nodes or not only_parameters.issuperset(node.all_input_nodes) or has_effects:
            continue
        only_parameters.add(node)
        if node in stages and all(stages.get(user, stages[node]) == stages[node] for user in node.users):
            found.add(node)
    return found


def find_reductions(
    calls: Sequence[Node],
    gradients: Iterable[Node],
    joins: Container[Node],
    is_backward: Callable[[Node], bool],
    stages: Mapping[Node, int],
) -> set[Node]:
    """Return the placed calls of backward that only reduce `gradients` over ranks.

    - `calls`: in the graph's order.
    - `joins`: the additions of two stages' gradients, which run once a step in any case.
    - `stages`: the stage of each placed call.

    Raises PassError for a gradient whose reduction cannot run once a step.
    """
    results = set(gradients)
    found = set[Node]()
    for node in reversed(calls):
        inputs = node.all_input_nodes
        if node not in stages or not inputs or not all(is_backward(x) and x in stages for x in inputs):
            continue
        ends = node in results and all(user.op == "output" or user in joins or user in found for user in node.users)
        is_read = ends or (node.users and all(user in found for user in node.users))
        if _only_reduces(node) and is_read and {stages[x] for x in inputs} == {stages[node]}:
            found.add(node)
    # Only tensors can be added: an item of a call's results goes with the call.
    for node in calls:
        if node in found and not all(x in found or isinstance(x.meta["val"], Tensor) for x in node.all_input_nodes):
            found.discard(node)
    for node in results - found:
        _refuse_reduced(node)
    return found


def _refuse_reduced(gradient: Node) -> None:
    """Raise PassError for a gradient that is reduced in each micro-batch, since other calls read what its reduction
    reads or computes."""
    node = gradient
    while node.op == "call_function" and _only_reduces(node) and not operators.is_collective(node):
        node = node.all_input_nodes[0]
    if operators.is_collective(node) or node.target is aten.add.Tensor:
        raise PassError(
            f"the reduction of the gradient `{gradient.name}` cannot run once a step",
            expected="gradients that one use of a parameter computes, and that nothing else reads",
            found=f"`{node.name}`, {operators.operator_name(node)}, in each micro-batch",
            where=source_of(gradient),
            fix="set schedule.reductions_once to False",
        )


def _only_reduces(node: Node) -> bool:
    if operators.is_wait(node) or node.target in _PACKING:
        return True
    if operators.is_collective(node):
        return operators.operator_name(node).startswith(_REDUCTIONS)
    if node.target is not aten._to_copy.default:
        return False
    # A sum of narrowed numbers is another than a narrowed sum.
    before, after = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    return before.is_floating_point and torch.promote_types(before, after) == after

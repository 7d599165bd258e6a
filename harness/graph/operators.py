"""Properties of operators and calls that passes need: writes, views, collectives, random draws, symbols."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.operators import (
    COMMUNICATES,
    Operator,
    RowFlow,
    Uninitialized,
    known,
    named,
    names_of_uninitialized,
    overloads,
)
from bitproof.harness.torch_compat import FakeTensor, HigherOrderOperator, OpOverload, OpOverloadPacket
from bitproof.harness.torch_distributed import name_of_group
from bitproof.harness.torch_operators import schema_of


def _targets(names: Iterable[str]) -> frozenset[OpOverload]:
    return frozenset(functools.reduce(getattr, name.split("."), torch.ops) for name in names)  # type: ignore[arg-type]


VIEWS = _targets(overloads(lambda row: row.rearranges))
"""Operators that rearrange dims and change no element."""

SIZED_VIEWS = _targets(overloads(lambda row: row.rearranges if row.is_sized else None))
"""Operators among `VIEWS` that take the result's sizes as arguments, such as `view`."""

UNINITIALIZED = names_of_uninitialized(*Uninitialized)
"""Names without overload of operators whose result is at least partly uninitialized."""

_FUNCTIONAL = "_c10d_functional"
COLLECTIVE_NAMESPACES = COMMUNICATES


def operator_name(node: Node) -> str:
    """Return the name of the operator that a call runs, without overload, such as `mm` for aten.mm.default."""
    return name_of(node.target)


def name_of(target: Any) -> str:
    """Return an operator's name without overload, such as `mm` for aten.mm.default."""
    packet = getattr(target, "overloadpacket", target)
    name = getattr(packet, "__name__", None)
    return str(packet) if name is None else name


@functools.cache
def row_of(target: Any) -> Operator:
    """Return the row of an operator or function in the table of operators. For a method, `target` is its name."""
    packet = getattr(target, "overloadpacket", target)
    if isinstance(packet, OpOverloadPacket):
        return known(str(packet))
    return known(f"{getattr(packet, '__module__', '')}.{name_of(packet)}")


def nested_call(node: Node) -> tuple[GraphModule, list[Any]] | None:
    """Return (the nested graph that a call runs, the operands for its inputs).

    Returns None if the call runs no nested graph or several, or passes the operands in another form, such as lists.
    """
    places = [place for place, x in enumerate(node.args) if isinstance(x, Node) and graph_of(x) is not None]
    # Operands before the graph would have no place among its placeholders.
    if len(places) != 1 or node.kwargs or any(isinstance(x, Node) for x in node.args[: places[0]]):
        return None
    [place] = places
    nested = graph_of(node.args[place])  # type: ignore[arg-type]
    assert nested is not None
    # Some also take the graph's name.
    operands = [x for x in node.args[place + 1 :] if not isinstance(x, str)]
    count = sum(inner.op == "placeholder" for inner in nested.graph.nodes)
    # `map` takes lists.
    is_flat = not any(isinstance(x, (list, tuple)) for x in operands)
    return (nested, operands) if is_flat and len(operands) == count else None


def graph_of(node: Node) -> GraphModule | None:
    """Return the nested graph to which a node refers; None for any other node."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    try:
        found = owner.get_submodule(str(node.target))
    except AttributeError:  # a tensor
        return None
    return found if isinstance(found, GraphModule) else None


def called(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """Return (the operator that a call runs, its arguments by position).

    For a call of `with_effects`, these are the wrapped operator and the arguments after it.
    """
    if isinstance(node.target, HigherOrderOperator) and node.target.name() == "with_effects" and len(node.args) > 1:
        return node.args[1], node.args[2:]
    return node.target, node.args


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments that a call passes, by name. The operator is that of `called`; without a schema, {}."""
    target, args = called(node)
    schema = schema_of(target)
    return dict(zip((x.name for x in schema.arguments), args, strict=False)) | node.kwargs if schema else {}


def launches_collective(node: Node) -> bool:
    """Return whether a call launches a collective, directly or within `with_effects`."""
    target, _ = called(node)
    return getattr(target, "namespace", None) in COLLECTIVE_NAMESPACES and name_of(target) != "wait_tensor"


def is_collective(node: Node) -> bool:
    """Return whether a node launches a collective; False for a wait for a collective."""
    return getattr(node.target, "namespace", None) in COLLECTIVE_NAMESPACES and not is_wait(node)


def is_wait(node: Node) -> bool:
    """Return whether a node waits for a functional collective."""
    return getattr(node.target, "namespace", None) == _FUNCTIONAL and operator_name(node) == "wait_tensor"


def joins_ranks(node: Node) -> bool:
    """Return whether a call is an all-gather or a reduce-scatter."""
    return named(operator_name(node)).rows in (RowFlow.ALL_GATHER, RowFlow.REDUCE_SCATTER)


def launch_of(wait: Node) -> Node:
    """Return the call that launched the collective for which `wait` waits."""
    launch = wait.all_input_nodes[0]
    # A coalesced collective has several results, and each has its own wait.
    while launch.target is operator.getitem:
        launch = launch.all_input_nodes[0]
    return launch


def group_name(node: Node) -> str:
    """Return the name of a collective's process group; "" if it is unknown."""
    target, given = called(node)
    # The last argument of a functional collective is the group's name. One of c10d takes a group object, which may have
    # a name.
    if getattr(target, "namespace", None) != "c10d":
        return str(given[-1])
    group = arguments_of(node).get("process_group")
    return name_of_group(_attribute(group) if isinstance(group, Node) and group.op == "get_attr" else group)


def attends(node: Node) -> bool:
    """Return whether a call is an attention operator of the forward pass."""
    return named(operator_name(node)).attends


def attends_backward(node: Node) -> bool:
    name = operator_name(node)
    return name.endswith("_backward") and named(name.removesuffix("_backward")).attends


def is_compute_heavy(node: Node) -> bool:
    """Return whether a call is attention or a matrix product, so that its work grows faster than the bytes that it
    accesses.
    """
    return attends(node) or named(operator_name(node)).factors_from is not None


def is_random(node: Node) -> bool:
    """Return whether a call draws random numbers, so that its result depends on earlier draws."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Torch tags attention operators as random because of dropout. Without dropout they draw nothing.
    # With defaults for arguments that were not given. An operator without `dropout_p` is random in any case.
    defaults = {argument.name: argument.default_value for argument in schema_of(node.target).arguments}
    return (defaults | arguments_of(node)).get("dropout_p") != 0.0


def reads_data(target: Any) -> bool:
    """Return whether an operator's result has sizes or numbers that depend on data, as for `nonzero` and `item`."""
    tags = getattr(target, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def makes_symbols(node: Node) -> bool:
    return reads_data(node.target) or (is_collective(node) and operator_name(node) == "all_to_all_single")


def written_arguments(node: Node) -> list[Node]:
    """Return the arguments that a call writes in place, according to its operator's schema."""
    if not (names := written_names(node.target)):
        return []
    given, found = arguments_of(node), list[Node]()
    map_arg([given.get(name) for name in names], found.append)
    return found


@functools.cache
def written_names(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes."""
    return tuple(name for name, alias in aliases_of(target).items() if alias.is_write)


@functools.cache
def aliases_of(target: Any) -> dict[str, Any]:
    """Return the alias annotations in an operator's schema, by argument.

    These arguments are written, or the result may share their memory.
    """
    schema = schema_of(target)
    return {x.name: x.alias_info for x in schema.arguments if x.alias_info is not None} if schema else {}


def is_view(target: Any) -> bool:
    return bool(aliases_of(target)) and not written_names(target)


def has_effects(node: Node) -> bool:
    """Return whether a call has effects, so that it must stay even if no call reads its result."""
    # A collective without a wait has no effect: all ranks run the same graph, so all of them drop it.
    return bool(written_arguments(node)) or is_random(node) or is_check(node)


def is_check(node: Node) -> bool:
    """Return whether a call only raises an error for some values, such as `_assert_async` or `sym_constrain_range`."""
    schema = schema_of(node.target)
    if schema is None:
        return False
    return bool(named(operator_name(node)).checks) or (not schema.returns and not schema.is_mutable)


def hidden_effect(node: Node) -> str | None:
    """Return a description of the effect of a node in a nested graph, such as `a random draw`; None if it has no
    effect.
    """
    if node.op == "get_attr" and isinstance(_attribute(node), FakeTensor):
        return "a tensor that its function closes over"
    if is_collective(node):
        return "a collective"
    if is_random(node):
        return "a random draw"
    return "a write in place" if written_arguments(node) else None


def _attribute(node: Node) -> Any:
    owner = node.graph.owning_module
    return getattr(owner, str(node.target), None) if owner is not None else None

"""Properties of operators and calls that passes need: writes, views, collectives, random draws, symbols."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
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
from bitproof.harness.torch_operators import is_composed, schema_of


def _targets(names: Iterable[str]) -> frozenset[OpOverload]:
    return frozenset(functools.reduce(getattr, name.split("."), torch.ops) for name in names)  # type: ignore[arg-type]


VIEWS = _targets(overloads(lambda row: row.rearranges))
"""Operators that rearrange dims and change no element."""

SIZED_VIEWS = _targets(overloads(lambda row: row.rearranges if row.is_sized else None))
"""Views whose arguments include the result's sizes."""

UNINITIALIZED = names_of_uninitialized(*Uninitialized)
"""Names of operators, without overload, whose output is partly or wholly uninitialized."""

_FUNCTIONAL = "_c10d_functional"
COLLECTIVE_NAMESPACES = COMMUNICATES


def operator_name(node: Node) -> str:
    """Return the name of the operator that a call runs, without its overload: mm for aten.mm.default."""
    return name_of(node.target)


def name_of(target: Any) -> str:
    """Return an operator's name without its overload: `mm` for aten.mm.default, `flex_attention` for FlexAttention."""
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
    """Return the graph that a higher-order call runs, and the operands for the graph's placeholders, in order.

    None for any other call, and for a call that runs several graphs or passes operands in another way.
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
    """Return the operator that a call runs, and the operator's arguments by position.

    For a call of `with_effects`, these are the operator that it wraps, and the wrapped operator's arguments.
    """
    if isinstance(node.target, HigherOrderOperator) and node.target.name() == "with_effects" and len(node.args) > 1:
        return node.args[1], node.args[2:]
    return node.target, node.args


def launches_collective(node: Node) -> bool:
    """Return whether a call launches a collective, directly or wrapped in `with_effects`."""
    target, _ = called(node)
    return getattr(target, "namespace", None) in COLLECTIVE_NAMESPACES and name_of(target) != "wait_tensor"


def is_collective(node: Node) -> bool:
    """Return whether the node launches a collective (waits are not collectives)."""
    return getattr(node.target, "namespace", None) in COLLECTIVE_NAMESPACES and not is_wait(node)


def is_wait(node: Node) -> bool:
    """Return whether the node is a wait for a functional collective."""
    return getattr(node.target, "namespace", None) == _FUNCTIONAL and operator_name(node) == "wait_tensor"


def joins_ranks(node: Node) -> bool:
    """Return whether a call is an all-gather or a reduce-scatter, which join or divide the ranks' tensors."""
    return named(operator_name(node)).rows in (RowFlow.ALL_GATHER, RowFlow.REDUCE_SCATTER)


def launch_of(wait: Node) -> Node:
    """Return the call that launched the collective for which `wait` waits.

    The wait may read a single tensor of a coalesced collective.
    """
    launch = wait.all_input_nodes[0]
    while launch.target is operator.getitem:
        launch = launch.all_input_nodes[0]
    return launch


def group_name(node: Node) -> str:
    """Return the name of a collective's process group; "" if it is unknown.

    A functional collective takes the name as its last argument. One of torch's own collectives (c10d) takes a group
    object, which may have a name.
    """
    target, given = called(node)
    if getattr(target, "namespace", None) != "c10d":
        return str(given[-1])
    names = [argument.name for argument in schema_of(target).arguments]
    # By name, as the group may be given as a keyword.
    group = (dict(zip(names, given, strict=False)) | node.kwargs).get("process_group")
    return name_of_group(_attribute(group) if isinstance(group, Node) and group.op == "get_attr" else group)


def attends(node: Node) -> bool:
    """Return whether a call is an attention operator of forward, which mixes the positions of a sequence."""
    return named(operator_name(node)).attends


def attends_backward(node: Node) -> bool:
    """Return whether a call is the backward of an operator that mixes the positions of a sequence."""
    name = operator_name(node)
    return name.endswith("_backward") and named(name.removesuffix("_backward")).attends


def is_compute_heavy(node: Node) -> bool:
    """Return whether a call is attention or a matrix product: its work grows faster than the bytes it accesses."""
    return attends(node) or named(operator_name(node)).factors_from is not None


def is_random(node: Node) -> bool:
    """Return whether a call draws random numbers, so that its result depends on the random calls before it.

    torch tags attention operators as random because of dropout; without dropout they draw nothing.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # With defaults for arguments that were not given. An operator without `dropout_p` is random in any case.
    defaults = {argument.name: argument.default_value for argument in schema_of(node.target).arguments}
    return (defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs).get("dropout_p") != 0.0


def reads_data(target: Any) -> bool:
    """Return whether an operator's result has sizes or scalars that depend on data.

    In a trace, these are new symbols.
    """
    tags = getattr(target, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def makes_symbols(node: Node) -> bool:
    """Return whether a call's result may carry new symbols."""
    return reads_data(node.target) or (is_collective(node) and operator_name(node) == "all_to_all_single")


def written_arguments(node: Node) -> list[Node]:
    """Return the arguments that a call writes in place, by its schema."""
    return _arguments(node, _aliased_names(node.target, True))


def written_names(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes in place."""
    return _aliased_names(target, True)


def aliased_names(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes, or whose storage its result may share."""
    return _aliased_names(target)


@functools.cache
def may_return_argument(target: OpOverload) -> bool:
    """Return whether an operator may return an argument itself although its schema denies this.

    For example, `dropout` does so in evaluation. True for all operators that are composed of other operators, and for
    all random ones.
    """
    return is_composed(target) or torch.Tag.nondeterministic_seeded in target.tags


def is_view(target: Any) -> bool:
    """Return whether an operator is a view: its result shares an argument's storage."""
    return bool(_aliased_names(target)) and not _aliased_names(target, True)


def storage_owners(nodes: Any) -> dict[Node, Node]:
    """Return the owner of each node's storage: the first node whose value has that storage.

    - A view has the owner of its base.
    - A call that returns an argument which it has written has the owner of that argument.
    - Any other node is its own owner. All results of a call count as a single storage.
    """
    owners: dict[Node, Node] = {}
    for node in nodes:
        chain = []
        # The nodes need not be in topological order.
        while node not in owners:
            shared = sharing_arguments(node)
            chain.append(node)
            if not shared:
                owners[node] = node
            node = shared[0] if shared else node
        owners.update(dict.fromkeys(chain, owners[node]))
    return owners


def sharing_arguments(node: Node) -> list[Node]:
    """Return the arguments whose storage a call's result shares.

    The operator's row in the table of operators states them, or else the operator's schema does.
    """
    if node.target is operator.getitem:
        return node.all_input_nodes[:1]
    # The table precedes the schema: some schemas deny that a result shares memory.
    if (returned := row_of(node.target).returns) is not None:
        return _arguments(node, (returned,))
    return _arguments(node, _aliased_names(node.target))


def _arguments(node: Node, names: tuple[str, ...]) -> list[Node]:
    if not names:
        return []
    declared = (argument.name for argument in schema_of(node.target).arguments)
    given = dict(zip(declared, node.args, strict=False)) | node.kwargs
    found: list[Node] = []
    map_arg([given.get(name) for name in names], found.append)
    return found


@functools.cache
def _aliased_names(target: Callable[..., Any] | str, written: bool = False) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes, or that its result may alias.

    With `written`, only the names of the arguments that it writes.
    """
    schema = schema_of(target)
    infos = {argument.name: argument.alias_info for argument in schema.arguments} if schema else {}
    return tuple(name for name, info in infos.items() if info is not None and (info.is_write or not written))


def has_effects(node: Node) -> bool:
    """Return whether a call has effects besides its result, so that it must stay even if no call reads the result.

    A collective without a wait has no effect: all ranks run the same graph, so all ranks drop it.
    """
    return bool(written_arguments(node)) or is_random(node) or is_check(node)


def is_check(node: Node) -> bool:
    """Return whether a call has no purpose but to raise an error for some values of its arguments.

    Such operators return and write nothing, like `_assert_async` and `sym_constrain_range`, or return only a token.
    """
    schema = schema_of(node.target)
    if schema is None:
        return False
    return bool(named(operator_name(node)).checks) or (not schema.returns and not schema.is_mutable)


def hidden_effect(node: Node) -> str | None:
    """Return the effect of a node in a nested graph as a text, such as `a random draw`; None if it has none.

    To compute from the nested graph's inputs is not an effect.
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

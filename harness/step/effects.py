"""A call's effects on the memory of its arguments.

The effects of an operator follow from its schema and its row in the table of operators. A method, module or Python
function is looked up by its name. An unknown call is assumed to read all its arguments and to write none.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from bitproof.harness.graph import operators
from bitproof.harness.operators import Operator, Wait, Work, known
from bitproof.harness.step.nested import submodule_of
from bitproof.harness.torch_compat import HigherOrderOperator, OpOverload, OpOverloadPacket
from bitproof.harness.torch_operators import is_composed, schema_of, storage_key, written_by_kernel

Places = tuple[tuple[int | None, str], ...]
"""Arguments of an operator overload as pairs (index, name). The index is None for a keyword-only argument."""


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message between this rank and a single other rank, its peer.

    `is_sent` is False if this rank receives the message.

    - `tensor`: the tensor that is sent, or that receives the message.
    - `peer`: the call's argument for the other rank, usually its number.
    - `tag`: the call's argument for the number that distinguishes messages.
    """

    is_sent: bool
    tensor: Node
    peer: Any
    tag: Any


class Effects(NamedTuple):
    """A call's effects on the memory of its arguments.

    - `row`: the operator's row in the table of operators.
    - `writes`: arguments that the call writes in place.
    - `shares`: arguments whose memory the result shares, as a view does.
    - `adopts`: a pair of arguments, as in `x.set_(y)`. From then on, the first has the memory of the second.
    - `awaits`: arguments that a collective or copy is still filling. The call waits until they are filled.
    - `frees`: arguments whose memory the call frees.
    - `only_shows`: True if the call reads no element of its arguments, such as a view or a query for a size.
    - `gives_several`: True if the call has several results, each in its own memory.
    - `syncs_host`: True if the host waits for the call's result, as for `item`.
    - `messages`: the messages to or from single ranks that the call starts.
    - `is_behind_token`: True if the call's first result is a token, which has no memory.
    """

    row: Operator
    writes: Sequence[Node] = ()
    shares: Sequence[Node] = ()
    adopts: tuple[Node, Node] | None = None
    awaits: Sequence[Node] = ()
    frees: Sequence[Node] = ()
    only_shows: bool = False
    gives_several: bool = False
    syncs_host: bool = False
    messages: tuple[PeerMessage, ...] = ()
    is_behind_token: bool = False


_ASSIGNING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_IN_PLACE_BY_NAME = frozenset(f"i{name}" for name in _ASSIGNING)


def effects_of(node: Node) -> Effects:
    """Return a call's effects. For example, `x.add_(y)` writes x, and its result shares the memory of x."""
    if isinstance(node.target, OpOverload):
        found = _effects_of_overload(node, _plan_of(node.target))
        return _of_communication(node, found) if found.row.launch is not None or found.row.pairs_ranks else found
    if node.op == "call_module":
        # For example, `nn.ReLU(inplace=True)`.
        in_place = [*node.all_input_nodes[:1]] if getattr(submodule_of(node), "inplace", False) is True else []
        return Effects(Operator(name=str(node.target)), writes=in_place, shares=in_place)
    if node.target is operator.getitem:
        shown, place = node.all_input_nodes[:1], node.args[1]
        # An index that is a tensor selects by its values, so the call reads elements.
        by_tensor = [x for x in node.all_input_nodes[1:] if not isinstance(x.meta.get("val"), _NUMBERS)]
        return Effects(_GETITEM, shares=shown, only_shows=not by_tensor and not _selects(place))
    if node.target is operator.setitem:
        return Effects(Operator(name="setitem"), writes=node.all_input_nodes[:1])
    if node.target is getattr:
        return Effects(Operator(name="getattr"), shares=node.all_input_nodes[:1], only_shows=True)
    if node.op == "call_method" and node.target == "wait":
        return Effects(_WORK_WAIT, awaits=node.all_input_nodes[:1], only_shows=True)
    # All other calls are known by their name alone, such as `x.add_(y)` in a user's graph.
    name = str(node.target) if node.op == "call_method" else operators.name_of(node.target)
    # `operator.iadd` and its like, as a trace writes them for `x += y`.
    assigns = getattr(node.target, "__module__", None) == "_operator" and name in _IN_PLACE_BY_NAME
    if assigns or node.kwargs.get("inplace") is True:
        return Effects(Operator(name=name), writes=node.all_input_nodes[:1], shares=node.all_input_nodes[:1])
    return _effects_by_name(node, name)


def shared_argument(node: Node) -> Node | None:
    """Return the first argument whose memory a call's result shares, such as the base of a view; None if it has none.

    Only the operator decides, so an operator that may copy, such as `reshape`, counts as a view.
    """
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    if not isinstance(node.target, OpOverload):
        return None
    return next(iter(_nodes(node, _plan_of(node.target).shares)), None)


_GETITEM = Operator(name="getitem")
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def _selects(place: Any) -> bool:
    places = place if isinstance(place, tuple) else (place,)
    # Lists and tensors copy the elements that they select; numbers and slices make a view.
    return any(isinstance(x, (list, Tensor)) for x in places)


# -- operators ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """The effects of an operator overload, computed once from its schema.

    They are applied to the arguments of each call.

    - `plain`: the effects that do not depend on the arguments.
    - `is_plain`: True if these are all effects, as the overload writes, shares, awaits and frees nothing.
    - `may_return_argument`: True if the overload may return an argument itself. The result then shares that argument's
      memory.

    The other fields are those of `Effects`, but they list arguments of the overload, not nodes.
    """

    plain: Effects
    is_plain: bool
    may_return_argument: bool
    writes: Places
    shares: Places
    awaits: Places
    frees: Places


@functools.cache
def _plan_of(overload: OpOverload) -> _Plan:
    row = operators.row_of(overload)
    arguments = schema_of(overload).arguments
    places = {x.name: (None if x.kwarg_only else place, x.name) for place, x in enumerate(arguments)}

    def named(*names: str | None) -> Places:
        return tuple(places[name] for name in dict.fromkeys(names) if name in places)

    writes = named(*operators.written_names(overload), row.writes)
    shares = named(*operators.aliases_of(overload), row.returns)
    returns = schema_of(overload).returns
    several = len(returns) > 1 or any(str(x.type).startswith("List[") for x in returns)
    # A wait, a query for a size, or a view reads no element: only readers of its result do.
    shows = row.wait is not None or row.reads_layout or bool(shares and not writes and row.launch is None)
    reads_data = operators.reads_data(overload)
    plain = Effects(row, only_shows=shows, gives_several=several and not shares, syncs_host=reads_data)
    awaits, frees = named(row.wait.argument) if row.wait else (), named(row.frees)
    is_plain = not (writes or shares or row.wait or frees or row.counts_in)
    return _Plan(plain, is_plain, _may_return_argument(overload), writes, shares, awaits, frees)


def _may_return_argument(overload: OpOverload) -> bool:
    """Return whether an operator may return an argument itself although its schema denies this.

    For example, `dropout` does so in evaluation. True for all operators that are random or composed of other operators.
    """
    return is_composed(overload) or torch.Tag.nondeterministic_seeded in overload.tags


def _effects_of_overload(node: Node, plan: _Plan) -> Effects:
    plain, row = plan.plain, plan.plain.row
    # Plain calls of an operator share one object, as graphs may have many thousands of calls.
    if plan.is_plain:
        returned = [x for x in node.all_input_nodes if not _copied(node, x)] if plan.may_return_argument else []
        return plain._replace(shares=returned) if returned else plain
    given = operators.arguments_of(node) if row.counts_in or row.adopts else {}
    # `batch_norm` writes its running statistics only in training, which its schema does not state.
    counted = [given.get(name) for name in row.counts_in if given.get("training", True)]
    own, other = given.get("self"), given.get(row.adopts or "")
    shares, only_shows = _nodes(node, plan.shares), plain.only_shows
    # `reshape` and its like read elements if they copy; only the values show whether this call did.
    if row.may_copy and not row.reads_layout and row.wait is None:
        only_shows = only_shows and bool(shares) and not _copied(node, shares[0])
    return Effects(
        row,
        writes=[*_nodes(node, plan.writes), *(x for x in counted if isinstance(x, Node))],
        shares=shares,
        awaits=_nodes(node, plan.awaits),
        frees=_nodes(node, plan.frees),
        only_shows=only_shows and (bool(shares) or row.wait is not None or row.reads_layout),
        gives_several=plain.gives_several,
        syncs_host=plain.syncs_host,
        adopts=(own, other) if isinstance(own, Node) and isinstance(other, Node) else None,
    )


def _nodes(node: Node, places: Places) -> Sequence[Node]:
    return _nodes_of(node.args, node.kwargs, places)


def _nodes_of(args: Sequence[Any], kwargs: Mapping[str, Any], places: Places) -> Sequence[Node]:
    found: list[Node] = []
    for index, name in places:
        given = args[index] if index is not None and index < len(args) else kwargs.get(name)
        if isinstance(given, Node):
            found.append(given)
        elif isinstance(given, (list, tuple)):
            map_arg(given, found.append)
    return found


def _effects_by_name(node: Node, name: str) -> Effects:
    """Return the effects of a call that states a name but no overload, such as the method `add_`.

    The result has the effects of all overloads with this name.
    """
    if isinstance(node.target, HigherOrderOperator):
        return _effects_of_higher(node, known(f"higher_order.{name}"))
    row = operators.row_of(node.target)
    packet: Any = node.target
    if not isinstance(packet, OpOverloadPacket) and row.launch is None and row.wait is None:
        # A method or function of torch has the effects of aten's operator with the same name: `x.add_`, `torch.relu_`.
        packet = getattr(torch.ops.aten, name, None)
        row = operators.row_of(packet) if packet is not None else row
    # A call by name does not state its overload, so the effects of all overloads are united.
    plans = [_plan_of(getattr(packet, x)) for x in packet.overloads()] if isinstance(packet, OpOverloadPacket) else []
    first = node.all_input_nodes[:1]
    writes = dict.fromkeys(x for plan in plans for x in _nodes(node, plan.writes))
    shares = dict.fromkeys(x for plan in plans for x in _nodes(node, plan.shares))
    # Without a schema, the returned argument is assumed to be the first.
    if not plans and row.returns is not None:
        shares |= dict.fromkeys(first)
    awaits = _nodes(node, plans[0].awaits) if plans else first
    shows = bool(shares) and not (row.may_copy and _copied(node, next(iter(shares))))
    return Effects(
        row,
        writes=list(writes),
        shares=list(shares),
        awaits=awaits if row.wait is not None else (),
        frees=_nodes(node, plans[0].frees) if plans else (),
        only_shows=row.wait is not None or row.reads_layout or (shows and not writes and row.launch is None),
        gives_several=len(plans) == 1 and plans[0].plain.gives_several and not shares,
    )


def _effects_of_higher(node: Node, row: Operator) -> Effects:
    if row.writes is not None:
        given = node.kwargs.get(row.writes)
        # A Triton kernel writes the arguments that torch's analysis finds; without an analysis, it may write any of its
        # tensors.
        named = given if isinstance(given, Mapping) else {}
        written = written_by_kernel(node.kwargs, {name: _value(x) for name, x in named.items()})
        return Effects(row, writes=[x for name, x in named.items() if isinstance(x, Node) and name in written])
    if row.name == _TORCHBIND and node.args[1:2] == ("wait",):
        return Effects(_WORK_WAIT, awaits=node.all_input_nodes[:1], only_shows=True)
    place = next((place for place, x in enumerate(node.args) if isinstance(x, OpOverload)), None)
    if not row.runs_operator or place is None:
        return Effects(row)
    # The operator is an argument itself; the arguments behind it are the operator's own.
    target: Any = node.args[place]
    plan, given = _plan_of(target), node.args[place + 1 :]
    writes, shares, awaits = (_nodes_of(given, node.kwargs, x) for x in (plan.writes, plan.shares, plan.awaits))
    # Only `with_effects` passes on a launch or a wait of the operator that it runs. Its first result is a token.
    if row.name != _WITH_EFFECTS or (plan.plain.row.launch is None and plan.plain.row.wait is None):
        return Effects(row, writes=writes, shares=shares)
    found = plan.plain._replace(
        writes=writes,
        shares=shares,
        awaits=awaits,
        only_shows=plan.plain.row.wait is not None,
        syncs_host=False,
        is_behind_token=True,
    )
    return _of_communication(node, found)


_WORK_WAIT = Operator(name="Work.wait", wait=Wait(work=Work.COLLECTIVE, argument="self"))
"""`Work.wait`. A `Work` is torch's async handle of a collective."""
_WITH_EFFECTS = "higher_order.with_effects"
_TORCHBIND = "higher_order.call_torchbind"


def _of_communication(node: Node, found: Effects) -> Effects:
    """Complete the effects of a call that communicates between ranks: its messages, and whether it itself waits."""
    given = operators.arguments_of(node)
    if not found.row.pairs_ranks:
        tensors = [value for x in found.writes if isinstance(value := x.meta.get("val"), Tensor)]
        is_on_gpus = bool(tensors) and all(x.device.type == "cuda" for x in tensors)
        # With async_op=False on GPUs, the current stream waits for the collective, so the call is no launch. On other
        # devices nothing waits before `Work.wait`, so the call remains a launch.
        is_blocking = given.get("async_op") is False and is_on_gpus
        return found._replace(row=replace(found.row, launch=None)) if is_blocking else found
    # A batch of messages has a list for each property; other calls have `dst` to send, or `src` to receive.
    if "op_list" in given:
        rows = zip(given["op_list"], given["tensors"], given["peer_list"], given["tag_list"], strict=True)
        messages = tuple(PeerMessage(op == "isend", tensor, peer, tag) for op, tensor, peer, tag in rows)
    else:
        tensors = given.get("tensors", [given.get("tensor")])
        peer, is_sent = given.get("dst", given.get("src")), "dst" in given
        messages = tuple(PeerMessage(is_sent, x, peer, given.get("tag")) for x in tensors if isinstance(x, Node))
    return found._replace(writes=[each.tensor for each in messages if not each.is_sent], messages=messages)


def _value(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, Node) else x


def _copied(node: Node, source: Node) -> bool:
    """Whether a call such as `reshape` copied its argument `source`.

    Also True if the fake tensors to compare are missing.
    """
    own, shown = node.meta.get("val"), source.meta.get("val")
    if not (isinstance(own, Tensor) and isinstance(shown, Tensor)):
        return True
    return storage_key(own) != storage_key(shown)

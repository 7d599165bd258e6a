"""Where does a difference end? For outputs that agree on all inputs that were tried, though their graph was changed.

Both graphs run on each set of inputs, and calls of one name are compared: what a call reads and what it gives, on every
rank. From an output one walks back through calls that read the same and give the same. The walk stops at a call that
reads other bits on some inputs and gives the same on all, and at a call that was put in or changed and gives the same.
Every path from the change to the output leads through one of these: they are why no input shows it. That they give the
same on all inputs is not said.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from bitproof.harness.graph.groups import Partition
from bitproof.harness.powers.proofs.prover.evaluate import run_graph
from bitproof.harness.powers.proofs.prover.graphs.constants import digest_of

Inputs = Sequence[Sequence[Any]]
Bits = tuple[str, ...]


class Step(NamedTuple):
    """What a call read, as it lay after the call, and what it gave: a text for each value and rank."""

    read: Bits
    gave: Bits


def steps_of(module: GraphModule, inputs: Inputs, groups: Mapping[str, Partition]) -> dict[str, Step]:
    """Each call's step by its node's name; `inputs` are each rank's. Raises as `run_graph` does."""
    values: dict[Node, Sequence[Any]] = {}
    found: dict[str, Step] = {}

    def watch(node: Node, gave: Sequence[Any]) -> None:
        values[node] = gave
        read = [values[x] for x in node.all_input_nodes] if node.op == "call_function" else []
        found[node.name] = Step(_bits(read), _bits(gave))

    run_graph(module, inputs, groups, watch=watch)
    return found


def _bits(values: Any) -> Bits:
    return tuple(_text(x) for x in tree_leaves(values))


def _text(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    return NAN if x.is_floating_point() and bool(x.isnan().any()) else f"{x.dtype} {[*x.shape]} {digest_of(x)}"


NAN = "a NaN, of which proofs say nothing"


def _differ(one: Bits, other: Bits) -> bool:
    return len(one) != len(other) or any(x != y and NAN not in (x, y) for x, y in zip(one, other, strict=True))


def where_it_ends(
    plain: Sequence[Mapping[str, Step]], changed: Sequence[Mapping[str, Step]], before: GraphModule, after: GraphModule
) -> Callable[..., tuple[str, ...]]:
    """Ask of nodes of the graph `after` where the difference ends on its way to them. A sequence has an entry for each
    set of inputs, with the steps of one graph."""
    runs = [*zip(plain, changed, strict=True)]
    old = {node.name: node for node in before.graph.nodes}

    @functools.cache
    def reads_otherwise(name: str) -> bool:
        return any(_differ(one[name].read, other[name].read) for one, other in runs)

    @functools.cache
    def gives_otherwise(name: str) -> bool:
        return any(_differ(one[name].gave, other[name].gave) for one, other in runs)

    def ask(*asked: Node) -> tuple[str, ...]:
        ends, met, stack = [], {*asked}, [*asked]
        while stack:
            node = stack.pop()
            if node.name not in old or _own(node) != _own(old[node.name]):
                ends.append(f"{_named(node)} was put in or changed, and what reads it reads the same")
            elif gives_otherwise(node.name):  # what reads it reads the same: it was written in between
                ends.append(f"{_named(node)} gives other bits, which are written over before they are read")
            elif reads_otherwise(node.name):
                ends.append(f"{_named(node)} reads other bits, and gives the same")
            else:
                new = [x for x in node.all_input_nodes if x not in met]
                met.update(new)
                stack += new
        return tuple(sorted(ends)) or ("no call that it reads was changed, or reads other bits",)

    return ask


def _own(node: Node) -> tuple[object, str]:
    """What a call says of itself, without what it reads."""
    return node.target, str(map_arg((node.args, node.kwargs), lambda x: None))


def _named(node: Node) -> str:
    if node.target is operator.getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    return node.name

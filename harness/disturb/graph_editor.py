"""Finds and changes nodes of a finished graph, for faults that edit the graph.

Inserted calls have no known origin (module, direction, source line), like calls that a faulty pass inserts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from bitproof.harness.case import Case
from bitproof.harness.disturb.entry import Site
from bitproof.harness.disturb.faults import kernels
from bitproof.harness.errors import UsageError
from bitproof.harness.graph.observation import Show
from bitproof.harness.graph.operators import is_collective, is_wait, operator_name
from bitproof.harness.graph.origin import META_KEY, RECOMPUTED_KEY, UNKNOWN, origin_of
from bitproof.harness.graph.writer import CHUNK_KEY

Call = Any
"""A node of the graph. Typed as Any, since edits read arguments whose types depend on the operator."""

Where = Callable[[Call], bool]


class NoPlaceError(UsageError):
    """The graph has no call that the fault could change, so the fault cannot be injected."""


class GraphEditor:
    """Edits one rank's copy of a case's finished graph. Without the edit, the copies of all ranks are equal."""

    def __init__(self, graph: Graph, case: Case, rank: int = 0) -> None:
        self.graph = graph
        self.case = case
        self.rank = rank
        self.ranks = case.parallelism.world_size
        # The node that replaced each node so far: observations of a replaced node move to it.
        self._stand_ins: dict[Node, Node] = {}

    @property
    def calls(self) -> list[Call]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def all(
        self,
        name: str | None = None,
        at: str = ".*",
        direction: str = "forward",
        chunk: int | None = None,
        where: Where = lambda node: True,
    ) -> list[Call]:
        """Return the calls of operator `name` (None for any) in `direction`, in modules whose names match `at`.

        - `at`: a regular expression; "" matches only calls outside named modules.
        - `chunk`: by default chunk 1, or all calls if chunk 1 has none.
        - `where`: a further condition.

        For example, `all("mm", r".*router")` returns the matrix products of all routers. Raises NoPlaceError if there
        is no such call.
        """
        found = [
            node
            for node in self.calls
            if name in (None, operator_name(node))
            and origin_of(node).direction == direction
            and re.fullmatch(at, origin_of(node).module or "")
            and chunk in (None, node.meta.get(CHUNK_KEY))
            and where(node)
        ]
        last = [node for node in found if node.meta.get(CHUNK_KEY) == 1]
        found = last if chunk is None and last else found
        if not found:
            raise NoPlaceError(
                f"there is nothing to strike in case {self.case.name}",
                expected=f"a graph with a call of {name or 'some operator'} in {direction}, in a module {at}"
                + (f", chunk {chunk}" if chunk is not None else ""),
            )
        return found

    def find(self, name: str | None = None, at: str = ".*", turn: int = 0, **options: Any) -> Call:
        """Return the call with index `turn` among those that `all` returns for the other arguments, or the last if too
        few.
        """
        found = self.all(name, at, **options)
        # A small case may have fewer calls than the fault asks for.
        return found[min(turn, len(found) - 1)]

    def require(self, found: Sequence[Any], what: str) -> Any:
        """Return the first element of `found`. If there is none, raise NoPlaceError: the graph lacks `what`."""
        if not found:
            raise NoPlaceError(f"there is nothing to strike in case {self.case.name}", expected=f"a graph with {what}")
        return found[0]

    def twin(self, node: Node) -> Call:
        """Return the copy of `node` in the other chunk.

        Raises NoPlaceError unless this copy precedes `node` in the graph.
        """
        # Passes name both copies of a call alike, apart from the chunk (see `GraphWriter.call`).
        ends = {0: "chunk0", 1: "chunk1"}
        mine = node.meta.get(CHUNK_KEY)
        if mine in ends and ends[mine] in node.name:
            name = node.name.replace(ends[mine], ends[1 - mine])
            twins = [other for other in self.calls if other.name == name]
            # A node cannot read a later node, so a twin after it is of no use.
            if twins and not self._follows(twins[0], node):
                return twins[0]
        raise NoPlaceError(f"node {node.name} of case {self.case.name} has no twin in the other chunk before it")

    def _follows(self, node: Node, other: Node) -> bool:
        order = {found: index for index, found in enumerate(self.graph.nodes)}
        return order[node] > order[other]

    def op(self, name: str) -> Any:
        """Return an operator by its name, e.g. `aten.neg.default`."""
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def after(self, node: Node, target: str | Callable[..., Any], *args: Any, **options: Any) -> Call:
        """Insert a call of `target` with the arguments `node` and `args` after `node`, and return it.

        All readers of `node` then read this call instead.
        """
        with self.graph.inserting_after(node):
            made = self._make(target, (node, *args), options)
        # The new call itself goes on reading `node`.
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        self._stand_ins[node] = made
        return made

    def before(self, node: Node, read: Node, target: str | Callable[..., Any], *args: Any, **options: Any) -> Call:
        """Insert a call of `target` with the arguments `read` and `args` before `node`, and return it.

        `node` then reads this call instead of `read`.
        """
        with self.graph.inserting_before(node):
            made = self._make(target, (read, *args), options)
        node.replace_input_with(read, made)
        return made

    def instead(self, node: Node, target: str | Callable[..., Any], *args: Any, **options: Any) -> Call:
        """Replace `node` by a call of `target` with `args`, and return the call."""
        with self.graph.inserting_before(node):
            made = self._make(target, args, options)
        node.replace_all_uses_with(made)
        self._stand_ins[node] = made
        # Only now: torch refuses to erase a node that has readers.
        self.graph.erase_node(node)
        return made

    def make_before(self, node: Node, target: str | Callable[..., Any], *args: Any, **options: Any) -> Call:
        """Insert a call of `target` with `args` before `node`, and return it. Nothing reads the call yet."""
        with self.graph.inserting_before(node):
            return self._make(target, args, options)

    def _make(self, target: str | Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Node:
        function = self.op(target) if isinstance(target, str) else target
        made = self.graph.call_function(function, args, options)
        made.meta[META_KEY] = UNKNOWN
        return made

    def kernel(self, name: str) -> Callable[..., Any]:
        """Return the function `name` of the module `kernels`."""
        found: Callable[..., Any] = getattr(kernels, name)
        return found

    def dtype(self, name: str) -> torch.dtype:
        found = getattr(torch, name)
        assert isinstance(found, torch.dtype)
        return found

    def bypass(self, node: Node, source: Node) -> None:
        """Remove `node`. Its readers then read `source`."""
        node.replace_all_uses_with(source)
        self._stand_ins[node] = source
        self.graph.erase_node(node)

    def remaining_observations(self, shows: Sequence[Show]) -> list[Show]:
        """Return those of the recorded activations, `shows`, that the edited graph still computes.

        An activation whose node was replaced is read from the replacement.
        """

        def now(node: Node) -> Node:
            # A replacement may have been replaced as well.
            while node in self._stand_ins:
                node = self._stand_ins[node]
            return node

        nodes = set(self.graph.nodes)
        found = [(name, [now(part) for part in parts], dim, piece) for name, parts, dim, piece in shows]
        # An activation whose node was removed without a replacement is not recorded.
        return [show for show in found if nodes.issuperset(show[1])]

    def value(self, node: Any) -> Any:
        """Return the fake tensor of a node's result; None if `node` is no node, or its result is no tensor."""
        value = node.meta.get("val") if isinstance(node, Node) else None
        return value if isinstance(value, Tensor) else None

    def is_floating(self, node: Any) -> bool:
        value = self.value(node)
        return value is not None and value.is_floating_point()

    def alike(self, one: Node, other: Node) -> bool:
        values = self.value(one), self.value(other)
        return all(x is not None for x in values) and (
            # As text, since a comparison of symbolic sizes could add a guard.
            (str(values[0].shape), values[0].dtype) == (str(values[1].shape), values[1].dtype)
        )

    @property
    def outputs(self) -> list[Call]:
        """Return the nodes that the graph returns: the loss, then gradients in the order of the parameters."""
        returned: Any = self.graph.output_node().args[0]
        return list(returned)

    @property
    def gradients(self) -> list[Call]:
        return self.outputs[1:]

    def sums_of_chunks(self) -> list[Call]:
        """Return the additions that add up a parameter's gradients of the two chunks."""
        return [
            node
            # A node may be the gradient of several parameters.
            for node in dict.fromkeys(self.gradients)
            if node.op == "call_function"
            and operator_name(node) == "add"
            and [x.meta.get(CHUNK_KEY) for x in node.all_input_nodes] in ([0, 1], [1, 0])
        ]

    def joins(self, direction: str = "forward") -> list[Call]:
        """Return the calls of `cat` that concatenate the two chunks of a value."""
        return [
            node
            for node in self.calls
            if operator_name(node) == "cat"
            and [x.meta.get(CHUNK_KEY) for x in node.all_input_nodes] == [0, 1]
            and origin_of(node).direction == direction
        ]

    def halves(self, chunk: int, direction: str = "forward") -> list[Call]:
        """Return the calls of `slice` that take chunk `chunk` from a whole floating-point tensor."""
        return [
            node
            for node in self.calls
            if operator_name(node) == "slice"
            and node.meta.get(CHUNK_KEY) == chunk
            # The source belongs to no chunk, so it is still whole.
            and node.all_input_nodes[0].meta.get(CHUNK_KEY) is None
            and origin_of(node).direction == direction
            and self.is_floating(node)
        ]

    def launches(self, name: str, direction: str = "forward", at: str = ".*") -> list[Call]:
        """Return the calls that start the collective `name`, in modules whose names match `at`."""
        return [node for node in self.all(name, at, direction=direction) if is_collective(node)]

    def wait_of(self, launch: Node) -> Call:
        return next(user for user in launch.users if is_wait(user))

    def recomputed(self, name: str | None = None) -> list[Call]:
        """Return the calls in backward that recompute calls of forward; with `name`, only those of this operator."""
        return [node for node in self.calls if node.meta.get(RECOMPUTED_KEY) and name in (None, operator_name(node))]

    def site(self, node: Node, *operators: str) -> Site:
        """Return the call site of `node`. Given an operator, return that of a call of this operator at the same
        place.
        """
        origin = origin_of(node)
        # Python's `getitem` is no operator of torch.
        name = operators[0] if operators else "getitem" if node.target is operator.getitem else operator_name(node)
        return Site(origin.module, origin.direction, node.meta.get(CHUNK_KEY), name)

    def sites(self, node: Node, *operators: str) -> list[Site]:
        """Return the sites that a report may blame: those of `node`, and of calls of `operators` inserted there."""
        # Inserted calls have no known origin, so blame may also name them at the origin of one of the node's inputs.
        # One of them may be of the node's own operator.
        found, pending = [node], [*node.all_input_nodes]
        while pending:
            read = pending.pop(0)
            if read.meta.get(META_KEY) is UNKNOWN:
                pending += read.all_input_nodes
            elif read.op == "call_function" and read not in found:
                found.append(read)
        own = self.site(node)
        names = (own.operator, *operators) if operators else ()
        return [own, *(self.site(place, name) for place in found for name in names)]

    def readers(self, node: Node) -> list[Site]:
        return [self.site(user) for user in node.users if user.op == "call_function"]

    def chunk_root(self, node: Node, *operators: str) -> list[Site]:
        """Return sites of calls of `operators` in the chunked module around `node`; [] if there is no such module.

        In the reference, that module splits and concatenates the values of chunks.
        """
        chunking, origin = self.case.chunking, origin_of(node)
        root = chunking.root_of(origin.module) if chunking and origin.module else None
        return [Site(root, origin.direction, node.meta.get(CHUNK_KEY), name) for name in operators] if root else []

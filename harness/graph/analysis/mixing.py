"""Finds modules that cannot run in chunks because they mix rows. A row is all elements at one index of the chunked dim.

A module may run in chunks if each row of its result depends only on the same row of its inputs. For example, batch norm
mixes rows in training, since it averages over the batch.

1. In a module's inputs, the chunked dim holds the rows.
2. For each call in the module's forward, a rule finds the dim of the result that holds the rows (mixing_rules.py). The
   rules also follow rows through a sort by expert and through an all-to-all, and back.
3. A result is mixed if its call combines different rows, has no rule, or reads a mixed value.
4. A call of a nested graph is followed through that graph. Operators with several nested graphs, such as `cond`, are
   refused, unless they have a rule.
5. Ranks may divide the rows among themselves (mixing_shares.py).
6. Code may declare that it keeps rows (`KEEPS_ROWS` in origin.py). The declaration is accepted if the code's result has
   as many rows as its arguments.
7. A value that leaves the module is refused if its rows are mixed, in another order, or only a rank's share. A value
   without a chunked dim may leave, such as the number of rows per expert.

Backward needs no check: it mixes only rows that forward mixes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from bitproof.harness.errors import ChunkError
from bitproof.harness.graph import operators, symbols
from bitproof.harness.graph.analysis.mixing_rows import Rows, RuleCall
from bitproof.harness.graph.analysis.mixing_rules import follow, rule_of
from bitproof.harness.graph.origin import KEEPS_ROWS_KEY, calls_of, origin_of
from bitproof.harness.graph.tracing.higher_order import refuse_calls
from bitproof.harness.graph.tracing.trace import trace_forward
from bitproof.harness.operators import named
from bitproof.harness.step.storages import Storages
from bitproof.harness.torch_compat import disable_current_modes


@dataclass(frozen=True)
class Mixed:
    """A value with an element that depends on several rows. `cause` is the first call that mixes rows."""

    cause: Node


State = Rows | Mixed | tuple["Rows | Mixed | None", ...] | None


def refuse_mixing(nodes: Iterable[Node], roots: Mapping[Node, str | None], symbol: sympy.Symbol, dim: str) -> None:
    """Raise ChunkError for the first chunked module whose result mixes rows.

    - `nodes`: nodes in topological order.
    - `roots`: maps each node to the name of its chunked module, or to None outside chunked modules.
    - `symbol`: the size of the chunked dim.
    - `dim`: the chunked dim's name in the error, such as "seq".
    """
    follower = _Follower(roots, symbol)
    for node in nodes:
        if roots.get(node) and origin_of(node).direction == "forward":
            follower.follow(node)
            follower.refuse_at_border(node, dim)


class MixingCheck:
    """Checks, in eager mode, that a module does not mix rows, before its first chunk runs.

    The module's forward is traced, unless a module with the same types of submodules was checked before. `chunk_dim` is
    the index of the chunked dim, and `dim` is its name in errors, such as "seq".
    """

    def __init__(self, dim: str, chunk_dim: int) -> None:
        self.dim = dim
        self.chunk_dim = chunk_dim
        self._seen: set[tuple[type, ...]] = set()

    def __call__(self, name: str, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Check the module called `name`. Raises ChunkError if it mixes rows, and TraceError if it cannot be traced.

        `arguments` has the arguments of `forward` by name.
        """
        built = tuple(type(part) for part in module.modules())
        if built in self._seen:
            return
        self._seen.add(built)
        # These calls are not part of the step's log.
        with disable_current_modes():
            graph, symbol = trace_forward(name, module, forward, arguments, chunk_dim=self.chunk_dim)
        nodes = list(graph.graph.nodes)
        roots = {node: name if node.op == "call_function" else None for node in nodes}
        refuse_mixing(nodes, roots, symbol, self.dim)


class _Follower:
    def __init__(self, roots: Mapping[Node, str | None], symbol: sympy.Symbol) -> None:
        self.roots = roots
        self.symbol = symbol
        self.owners = Storages(roots).owners
        self.states: dict[Node, State] = {}
        # By permutation: the sort that computed it, and whether it is that sort's inverse.
        self.permutations: dict[Node, tuple[Node, bool]] = {}
        self.given: dict[Any, dict[Node, Rows]] = {}
        """For code that declares that it keeps rows: its arguments that have rows.

        The keys are the module calls around the code.
        """

    def follow(self, node: Node) -> None:
        state = self._result(node)
        self.states[node] = state
        for written in operators.written_arguments(node):
            self._write(written, state)
        self._note_permutation(node)

    def refuse_at_border(self, node: Node, dim: str) -> None:
        """Raise ChunkError if a value leaves its module with rows that are mixed, in another order, or only a rank's
        share.

        `dim` is the chunked dim's name in the error.
        """
        value = node.meta.get("val")
        # A value without a chunked dim may be mixed: a count per expert goes into a buffer, for example.
        if not isinstance(value, Tensor) or not symbols.carries(value, self.symbol) or not self._is_live_out(node):
            return
        state = self._from_outside(node)
        if isinstance(state, Mixed):
            what = "computes an element from several of them"
            if operators.joins_ranks(state.cause):
                what = "runs over ranks, which may divide them"
            raise _refusal(node, self.roots[node], state.cause, dim, what)
        if isinstance(state, Rows) and state.order:
            # An order may also contain splits and exchanges; the error names the first sort, if there is one.
            sort = next((x[1] for x in state.order if x[0] == "sort"), node)
            raise _refusal(node, self.roots[node], sort, dim, "leaves them in another order")
        if isinstance(state, Rows) and state.share:
            raise _refusal(node, self.roots[node], node, dim, "leaves a rank's share of them, which no sum makes whole")

    def _is_live_out(self, node: Node) -> bool:
        # Readers in backward do not count, since the derivative mixes no further rows, nor do readers of a size.
        return any(
            user.op == "output" or (origin_of(user).direction == "forward" and self.roots.get(user) != self.roots[node])
            for user in node.users
            if not isinstance(user.meta.get("val"), symbols.SYMBOLIC_SCALARS)
        )

    def _state(self, node: Node, reader: Node) -> State:
        """Return the rows of the value `node` for its reader `reader`: `Rows` or `Mixed`, or None if it has no rows.

        A value from outside the module of `reader` has its rows in the chunked dim.
        """
        # Whether the reader belongs to code that declares that it keeps rows.
        is_inside = KEEPS_ROWS_KEY in reader.meta
        if node in self.states and self.roots[node] == self.roots[reader]:
            state = self.states[node] if is_inside else self._from_outside(node)
        else:
            value = node.meta.get("val")
            dim = symbols.chunk_dim(value, self.symbol) if isinstance(value, Tensor) else None
            state = None if dim is None else Rows(dim)
        # An argument of code that declares that it keeps rows: `_from_outside` compares the code's results with it.
        if is_inside and KEEPS_ROWS_KEY not in node.meta and isinstance(state, Rows):
            self.given.setdefault(calls_of(reader), {})[node] = state
        return state

    def _from_outside(self, node: Node) -> State:
        """Return the rows of a value for readers outside the code that computes it: `Rows`, `Mixed`, or None.

        If the code declares that it keeps rows, and the value is mixed, the value gets the rows of the code's
        arguments. For this, all arguments must have the same rows, as many as the value.
        """
        state, given = self.states[node], self.given.get(calls_of(node), {})
        if not isinstance(state, Mixed) or KEEPS_ROWS_KEY not in node.meta or len(set(given.values())) != 1:
            return state
        # Compare the numbers of rows: in this value, and in each tensor that the code was given.
        rows = next(iter(given.values()))
        numbers = [[symbols.expression(size) for size in x.meta["val"].shape] for x in (node, *given)]
        is_kept = all(own[rows.dim : rows.dim + 1] == numbers[0][rows.dim : rows.dim + 1] for own in numbers)
        return rows if is_kept and numbers[0][rows.dim :] else state

    def _result(self, node: Node) -> State:
        name = operators.operator_name(node)
        rule = rule_of(node)
        if rule is None and (nested := operators.nested_call(node)):
            return self._nested(node, *nested)
        if rule is None:
            # Raises for nested graphs that cannot be followed. Any other call without a rule mixes, if it reads rows.
            refuse_calls([(node, str(self.roots[node]))], self.symbol)
        states = {x: self._state(x, node) for x in _elements(node, name)}
        # A permutation is computed from all rows, so its own state is mixed. As an index it only moves rows: the rule
        # of the operator records the new order, and a result is refused only if that order is not undone.
        if name.startswith(("index", "_index")) and any(isinstance(state, Rows) for state in states.values()):
            states = {x: state for x, state in states.items() if x not in self.permutations}
        if node.target is operator.getitem:
            # If the tuple is mixed as a whole, so is each item.
            whole = states[node.args[0]]  # type: ignore[index]
            return whole[node.args[1]] if isinstance(whole, tuple) else whole  # type: ignore[index]
        for state in states.values():
            if isinstance(state, Mixed):
                return state
        rows = {x: state for x, state in states.items() if isinstance(state, Rows)}
        if not rows:
            return self._made(node, name)
        found = follow(rule, RuleCall(node, self.symbol, rows, self.permutations)) if rule else None
        return Mixed(node) if found is None else found

    def _nested(self, node: Node, nested: GraphModule, operands: list[Any]) -> State:
        inner = _Follower(dict.fromkeys(nested.graph.nodes, self.roots[node]), self.symbol)
        placeholders = [x for x in nested.graph.nodes if x.op == "placeholder"]
        pairs = [(x, given) for x, given in zip(placeholders, operands, strict=True) if isinstance(given, Node)]
        for placeholder, given in pairs:
            inner.states[placeholder] = self._state(given, node)
            if given in self.permutations:
                inner.permutations[placeholder] = self.permutations[given]
        read = dict(inner.states)
        for call in nested.graph.nodes:
            if call.op == "call_function":
                inner.follow(call)
            elif call.op == "get_attr" and symbols.carries(call.meta.get("val"), self.symbol):
                # Rows of unknown origin: not from an operand.
                inner.states[call] = Mixed(node)
        # The nested graph may write its operands in place: the caller's values have the new rows afterwards.
        for placeholder, given in pairs:
            if inner.states[placeholder] != read[placeholder]:
                self._write(given, inner.states[placeholder])
        [results] = next(x for x in nested.graph.nodes if x.op == "output").args
        if isinstance(results, (tuple, list)):
            return tuple(inner.states.get(x) if isinstance(x, Node) else None for x in results)  # type: ignore[misc]
        return inner.states.get(results) if isinstance(results, Node) else None

    def _made(self, node: Node, name: str) -> State:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not symbols.carries(value, self.symbol):
            return None
        # A call that reads no rows, such as `zeros`, has the same elements in every chunk. `arange` counts positions,
        # which differ between chunks.
        if named(name).returns_positions:
            return Mixed(node)
        dim = symbols.chunk_dim(value, self.symbol)
        return None if dim is None else Rows(dim)

    def _write(self, written: Node, state: State) -> None:
        # A value from outside the module, such as a buffer, is handled elsewhere.
        if written not in self.states:
            return
        self.states[written] = state
        # Mixed rows reach all views of the written storage; other rows are those of this view alone.
        if isinstance(state, Mixed):
            owner = self.owners[written]
            self.states.update(dict.fromkeys((x for x in self.states if self.owners[x] is owner), state))

    def _note_permutation(self, node: Node) -> None:
        """Note whether a call's result is a permutation of rows.

        A sort of a vector returns a permutation, and a sort of a permutation returns its inverse. Copies of a
        permutation are noted, too.
        """
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            return
        name = operators.operator_name(node)
        # `sort` returns the sorted values and, as item 1, the permutation.
        if node.target is operator.getitem and node.args[1] == 1 and operators.operator_name(source) == "sort":
            source = source.args[0]
        elif (named(name).is_identity or named(name).copies) and source in self.permutations:
            self.permutations[node] = self.permutations[source]
            return
        elif name != "argsort":
            return
        if isinstance(source, Node) and source.meta["val"].dim() == 1:
            # The first sort is noted as (itself, False). Sorting that result is (first sort, True): its inverse.
            base, is_inverse = self.permutations.get(source, (node, True))
            self.permutations[node] = base, not is_inverse


def _elements(node: Node, name: str) -> list[Node]:
    """Return the arguments whose elements a call reads.

    For example, `zeros_like` reads only a layout, so it returns [].
    """
    row = named(name)
    if row.reads_layout and row.rows is None:
        return []
    if row.num_elements is not None:
        return [x for x in node.args[: row.num_elements] if isinstance(x, Node)]
    if name == "index":
        return [x for x in (node.args[0], *node.args[1]) if isinstance(x, Node)]  # type: ignore[misc]
    return node.all_input_nodes


def _refusal(live_out: Node, root: str | None, cause: Node, dim: str, what: str) -> ChunkError:
    rows = "positions of the sequence" if dim == "seq" else "rows of the batch"
    call = operators.operator_name(cause)
    # In training, batch norm computes its statistics from all rows; otherwise it uses stored statistics.
    if "batch_norm" in call and not call.endswith("no_training"):
        call, what = "batch_norm", "takes its statistics from several of them"
    shapes = ", ".join(str(list(map(str, x.meta["val"].shape))) for x in cause.all_input_nodes if _is_tensor(x))
    return ChunkError(
        f"cannot chunk {root} along {dim}: {call} `{cause.name}` {what}",
        expected=f"a module that treats the {rows} independently",
        found=f"{call} of {shapes or 'no tensor'}, which reaches its result `{live_out.name}`",
        where=symbols.source_of(cause),
        fix=f"choose modules without {_culprit(root, cause)}, or chunk along the other dim if it does not mix that",
    )


def _culprit(root: str | None, cause: Node) -> str:
    """Return the module that the error advises to leave out.

    This is the innermost module around the call `cause`, if it is inside the module `root`; otherwise `root`.
    """
    # To leave out `root` alone would not help, as the user's pattern may match it again.
    module = origin_of(cause).module
    return module if module and root and f"{module}.".startswith(f"{root}.") else f"{root}"


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)

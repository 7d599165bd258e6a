"""The rules of mixing.py: for each kind of operator, a function that finds the dim of its result that holds the rows.

- A rule takes a call with the `Rows` of its arguments, and returns the `Rows` of its result. For several results it
  returns a tuple. None means that the call mixes rows.
- A rule is called only if an argument has rows and no argument is mixed.
- An operator without a rule counts as mixing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.mixing_rows import Rows, RuleCall, rank_of, sizes_of
from bitproof.harness.graph.analysis.mixing_shares import (
    copied_into,
    cut,
    is_summand,
    joined,
    selected,
    summed,
    whole,
)
from bitproof.harness.operators import RowFlow, named
from bitproof.harness.torch_sizes import exact

Answer = Rows | tuple[Rows | None, ...] | None
Rule = Callable[["RuleCall"], Answer]


def _common(found: Iterable[Rows]) -> Rows | None:
    distinct = set(found)
    return distinct.pop() if len(distinct) == 1 else None


def elementwise(call: RuleCall) -> Answer:
    """Return the rows of an elementwise operator; None if its arguments have rows in different dims or orders.

    Dims are counted from the last dim, as for broadcasting.
    """
    rank = call.result_rank
    aligned = [replace(rows, dim=rows.dim + rank - rank_of(x)) for x, rows in call.rows.items()]
    return summed(call, aligned) if any(map(is_summand, aligned)) else _common(aligned)


def _all_results(rule: Rule) -> Rule:
    def results(call: RuleCall) -> Answer:
        # Each of the operator's results has these rows.
        return (answer,) * len(call.node.meta["val"]) if isinstance(answer := rule(call), Rows) else answer

    return results


def _view(call: RuleCall) -> Answer:
    """Return the rows of a view; None if no single dim of the result holds them.

    A view keeps the row-major order of elements.
    """
    rows = call.rows[call.first]
    before, after = sizes_of(call.first), sizes_of(call.node)
    if rows.share and rows.share.form.startswith("cut"):
        return joined(rows, before, after)
    # A rank's range may have n // 2 rows, and only exact quotients can be compared with the sizes of the whole.
    if rows.share:
        before, after = list(map(exact, before)), list(map(exact, after))
    # Rearranged rows may not be flattened with other dims or apart: their dim must stay a dim of its own, with the same
    # size and as many elements before it.
    if rows.outer is None or rows.order:
        left, size = math.prod(before[: rows.dim]), before[rows.dim]
        return next(
            (replace(rows, dim=j) for j, n in enumerate(after) if n == size and math.prod(after[:j]) == left), None
        )
    # `left` is the product of all sizes before the chunk symbol, which a view keeps. For example, (B, n, D) has left =
    # B. Viewed as (B * n, D), it has no dim before dim 0, so the result's `outer` is B.
    left = math.prod(before[: rows.dim]) * rows.outer
    carrying = [j for j, size in enumerate(after) if call.symbol in getattr(size, "free_symbols", ())]
    if len(carrying) != 1:
        return None
    (dim,) = carrying
    outer = sympy.sympify(left) / math.prod(after[:dim])
    inner = sympy.sympify(after[dim]) / call.symbol / outer
    # A rank's range of n rows may have n / 2, so that `inner` is 1 / 2; then a view must keep whole rows of the range.
    is_whole = inner.is_Integer or (rows.share and (inner * rows.share.count / rows.share.inner).is_Integer)
    if not (outer.is_Integer and is_whole):
        return cut(call, before, after, dim)
    return replace(rows, dim=dim, outer=int(outer), inner=inner)


def _permute(call: RuleCall) -> Answer:
    rows, rank = call.rows[call.first], rank_of(call.first)
    order = list(range(rank))
    if "dims" in call.given:
        order = [dim % rank for dim in call.given["dims"]]
    # `t` names no dims: it swaps the two dims of a matrix, and leaves a vector unchanged.
    elif rank > 1:
        a, b = (call.given["dim0"] % rank, call.given["dim1"] % rank) if "dim0" in call.given else (0, 1)
        order[a], order[b] = b, a
    return replace(rows, dim=order.index(rows.dim))


def _squeeze(call: RuleCall) -> Answer:
    rows = call.rows[call.first]
    # As in torch, a named dim stays if its size is not 1.
    dropped = {dim for dim in call.dims("dim", rank_of(call.first)) if sizes_of(call.first)[dim] == 1}
    return replace(rows, dim=rows.dim - sum(dim < rows.dim for dim in dropped))


def _unsqueeze(call: RuleCall) -> Answer:
    rows = call.rows[call.first]
    # A new dim at the position of the rows, or before it, moves them by one.
    return replace(rows, dim=rows.dim + (call.given["dim"] % call.result_rank <= rows.dim))


def _slice(call: RuleCall) -> Answer:
    rows = call.rows[call.first]
    is_whole = sizes_of(call.node)[rows.dim] == sizes_of(call.first)[rows.dim]
    return rows if is_whole or call.dims("dim", rank_of(call.first)) != {rows.dim} else None


def _split(call: RuleCall) -> Answer:
    """Return the rows of each part of a split; None if it cuts the dim that holds them.

    Exception: rows that were reordered, such as by expert, may be split if their parts are joined again later.
    """
    rows, parts = call.rows[call.first], range(len(call.node.meta["val"]))
    if call.dims("dim", rank_of(call.first)) != {rows.dim}:
        return (rows,) * len(parts)
    if not rows.order:
        return None
    # Each part is marked, with the sizes of the whole. `_join` removes the marks if it joins all parts in order.
    tokens = [("part", call.node, i, len(parts), rows.outer, rows.inner) for i in parts]
    return tuple(replace(rows, outer=None, inner=None, order=(*rows.order, token)) for token in tokens)


def _select(call: RuleCall) -> Answer:
    rows = call.rows[call.first]
    (dim,) = call.dims("dim", rank_of(call.first))
    return None if dim == rows.dim else replace(rows, dim=rows.dim - (dim < rows.dim))


def _join(call: RuleCall) -> Answer:
    """Return the rows of a concatenation; None if it is along the dim that holds them.

    Exception: if it joins all parts of a split in order, the rows are whole again.
    """
    dim = call.given["dim"] % call.result_rank
    parts = [call.of(x) for x in call.given["tensors"]]
    first = parts[0]
    if first and dim == first.dim and first.order and first.order[-1][0] == "part":
        _, split, _, count, outer, inner = first.order[-1]
        before = first.order[:-1]
        tokens = [("part", split, i, count, outer, inner) for i in range(count)]
        is_whole = parts == [replace(first, order=(*before, token)) for token in tokens]
        return replace(first, outer=outer, inner=inner, order=before) if is_whole else None
    rows = _common(call.rows.values())
    return None if rows is None or dim == rows.dim else rows


def _stack(call: RuleCall) -> Answer:
    rows = _common(call.rows.values())
    return rows and replace(rows, dim=rows.dim + (call.given["dim"] % call.result_rank <= rows.dim))


def _reduce(call: RuleCall) -> Answer:
    rows, rank = call.rows[call.first], rank_of(call.first)
    reduced = call.dims("dim", rank)
    if rows.dim in reduced:
        return None
    return replace(rows, dim=rows.dim - (0 if call.given.get("keepdim") else sum(dim < rows.dim for dim in reduced)))


def _along(call: RuleCall) -> Answer:
    """Return the rows of a softmax, running sum, sort or shift: those of its input. None if it mixes these rows."""
    rows = call.rows[call.first]
    return None if rows.dim in call.dims("dims" if "dims" in call.given else "dim", rank_of(call.first)) else rows


def _matmul(call: RuleCall) -> Answer:
    """Return the rows of a matrix product; None if it mixes rows.

    Rows stay separate if they are the rows of the first factor, the columns of the second factor, or the batch. Any
    other product mixes rows, such as a product that sums over them.
    """
    # The factors are the last two arguments: `addmm` and `baddbmm` take a bias before them.
    factors: list[Any] = list(call.node.args)[-2:]
    a, b = factors
    rows_a, rows_b, rank = call.of(a), call.of(b), call.result_rank
    bias = call.first if call.first not in (a, b) else None
    # A bias with rows counts as mixing: its dims would first have to be aligned with the result's.
    if call.of(bias):
        return None
    # Rows in both factors stay apart only if they are the batch of a batched product.
    if rows_a and rows_b:
        return rows_a if rank == 3 and rows_a.dim == 0 and rows_a == rows_b else None
    # The product sums over the last dim of the first factor, and over the second-last dim of the second.
    if rows_a:
        return rows_a if rows_a.dim < rank - 1 and rank_of(a) == rank else None
    return rows_b if rows_b and rows_b.dim != rank - 2 else None


def _matrix_vector(call: RuleCall) -> Answer:
    rows = call.of(call.first)
    return rows if rows and rows.dim == 0 and len(call.rows) == 1 else None


def _grouped(call: RuleCall) -> Answer:
    """Return the rows of a grouped matrix product; None if the second factor has rows.

    The product multiplies each row of the first factor by the matrix of the row's group.
    """
    rows = call.of(call.first)
    return rows if rows and rows.dim == 0 and call.of(call.node.args[1]) is None and call.result_rank == 2 else None


def _normalized(call: RuleCall) -> Answer:
    rows = call.rows.get(call.first)
    return rows if rows and rows.dim < rank_of(call.first) - len(call.given["normalized_shape"]) else None


def _attention(call: RuleCall) -> Answer:
    """Return the rows of an attention operator; None unless they are in the batch or the heads."""
    rows = _common(call.rows.values())
    # Queries, keys and values have the shape (batch, heads, positions, features).
    return rows if rows and rows.dim < 2 and call.of(call.first) else None


def _per_sample(call: RuleCall) -> Answer:
    """Return the rows of a convolution or a group norm; None unless they are the samples of the batch."""
    rows = call.of(call.first)
    return rows if rows and rows.dim == 0 and len(call.rows) == 1 else None


def _embedding(call: RuleCall) -> Answer:
    return call.of(call.node.args[1]) if len(call.rows) == 1 else None


def _search(call: RuleCall) -> Answer:
    return (
        # Each value is looked up in a table, which must have no rows.
        elementwise(call) if call.of(call.given.get("sorted_sequence", call.given.get("boundaries"))) is None else None
    )


def _gather(call: RuleCall) -> Answer:
    rows = _common(call.rows.values())
    indexed = call.of(call.given["index"]) is not None and call.of(call.first) is not None
    return rows if rows and indexed and call.given["dim"] % call.result_rank != rows.dim else None


def _scatter(call: RuleCall) -> Answer:
    """Return the rows of a scatter; None if it is along the dim that holds them, or if the index has no rows.

    The target need not have rows.
    """
    rows = _common(call.rows.values())
    is_own = call.of(call.given["index"]) is not None and call.given["dim"] % call.result_rank != (rows and rows.dim)
    return rows if is_own else None


def _index(call: RuleCall) -> Answer:
    """Return the rows of `x[index]` in three cases; None in any other case:

    - Only the index has rows. For example, in `table[tokens]` each token is a row.
    - Only `x` has rows, and the index selects along other dims.
    - Only `x` has rows, and the index permutes them.
    """
    source, indices = call.of(call.first), call.node.args[1]
    places = [i for i, x in enumerate(indices) if x is not None]  # type: ignore[arg-type]
    used: list[Node] = [indices[i] for i in places]  # type: ignore[index, misc]
    # If indexed dims are not adjacent, as in x[i, :, j], torch moves them to the front.
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None
    found = [x for x in used if call.of(x)]
    rank = max(map(rank_of, used))
    # The indices are broadcast to `rank` dims, which take the place of the indexed dims in the result.
    if source is None:
        rows = _common(replace(call.rows[x], dim=call.rows[x].dim + rank - rank_of(x)) for x in found)
        return rows and replace(rows, dim=rows.dim + places[0])
    # Rows in both: a row of the index may pick the table's row of another chunk.
    if found:
        return None
    if source.dim in places:
        permutation = call.permutations.get(used[0]) if len(used) == 1 else None
        return permuted(source, permutation) if permutation else None
    return replace(source, dim=source.dim + (rank - len(places) if source.dim > places[0] else 0))


def _index_put(call: RuleCall) -> Answer:
    """Return the rows of `x[permutation] = values`, which moves the rows of `values` by the inverse permutation.

    The elements of `x` have no effect, as all are overwritten. Return None for any other index, or if the rows of
    `values` are not in dim 0.
    """
    indices, values = call.given["indices"], call.of(call.given["values"])
    permutation = call.permutations.get(indices[0]) if len(indices) == 1 else None
    if values is None or permutation is None or values.dim != 0:
        return None
    base, is_inverse = permutation
    return permuted(values, (base, not is_inverse))


def permuted(rows: Rows, permutation: tuple[Node, bool]) -> Rows:
    """Return `rows` with a permutation added to their `order`.

    If the permutation is the inverse of the last entry of `order`, that entry is removed instead.
    """
    base, is_inverse = permutation
    if rows.order and rows.order[-1] == ("sort", base, not is_inverse):
        return replace(rows, order=rows.order[:-1])
    return replace(rows, order=(*rows.order, ("sort", base, is_inverse)))


def _all_to_all(call: RuleCall) -> Answer:
    """Return the rows of an all-to-all, which sends them to other ranks; None if they are not in dim 0.

    An all-to-all with swapped sizes sends them back.
    """
    rows = call.rows[call.first]
    if rows.dim != 0:
        return None
    received, sent, group = tuple(call.node.args[1]), tuple(call.node.args[2]), call.node.args[3]  # type: ignore[arg-type]
    if rows.order and rows.order[-1][:4] == ("all-to-all", sent, received, group):
        _, _, _, _, outer, inner = rows.order[-1]
        return replace(rows, outer=outer, inner=inner, order=rows.order[:-1])
    if len(received) == 1:
        # With one rank, rows stay in place.
        return rows
    # The way back is recognized by the swapped sizes, and restores the sizes of the rows from this token.
    token = ("all-to-all", received, sent, group, rows.outer, rows.inner)
    return replace(rows, outer=None, inner=None, order=(*rows.order, token))


def _all_gather(call: RuleCall) -> Answer:
    """Return the rows of an all-gather, which joins the rows of all ranks.

    Return None if they are not in dim 0, which is gathered, or if they were reordered or divided before.
    """
    rows = call.rows[call.first]
    is_known = rows.dim == 0 and rows.outer is not None and not rows.share and not rows.order
    return replace(rows, outer=rows.outer * call.given["group_size"]) if is_known else None


def _reduce_scatter(call: RuleCall) -> Answer:
    """Return the rows of a reduce-scatter, which sums each row over ranks; None if it mixes rows.

    The result has the rows that this rank gave to an all-gather.
    """
    rows, size = call.rows[call.first], call.given["group_size"]
    is_known = rows.dim == 0 and rows.outer is not None and rows.outer % size == 0 and call.given["reduce_op"] == "sum"
    return replace(whole(rows), outer=rows.outer // size) if is_known and not rows.order else None


RULES: dict[RowFlow, Rule] = {
    RowFlow.ELEMENTWISE: elementwise,
    RowFlow.EACH_ELEMENTWISE: _all_results(elementwise),
    RowFlow.VIEW: _view,
    RowFlow.PERMUTE: _permute,
    RowFlow.SQUEEZE: _squeeze,
    RowFlow.UNSQUEEZE: _unsqueeze,
    RowFlow.CUT: _slice,
    RowFlow.SPLIT: _split,
    RowFlow.TAKE: _select,
    RowFlow.EACH_TAKE: _all_results(_select),
    RowFlow.JOIN: _join,
    RowFlow.STACK: _stack,
    RowFlow.REDUCE: _reduce,
    RowFlow.EACH_REDUCE: _all_results(_reduce),
    RowFlow.ALONG: _along,
    RowFlow.EACH_ALONG: _all_results(_along),
    RowFlow.MATMUL: _matmul,
    RowFlow.MATRIX_VECTOR: _matrix_vector,
    RowFlow.GROUPED: _grouped,
    RowFlow.NORMALIZED: _normalized,
    RowFlow.EACH_NORMALIZED: _all_results(_normalized),
    RowFlow.CONVOLUTION: _per_sample,
    RowFlow.EACH_CONVOLUTION: _all_results(_per_sample),
    RowFlow.EMBEDDING: _embedding,
    RowFlow.SEARCH: _search,
    RowFlow.GATHER: _gather,
    RowFlow.SCATTER: _scatter,
    RowFlow.INDEX: _index,
    RowFlow.INDEX_PUT: _index_put,
    RowFlow.ALL_TO_ALL: _all_to_all,
    RowFlow.ALL_GATHER: _all_gather,
    RowFlow.REDUCE_SCATTER: _reduce_scatter,
    RowFlow.SELECT: selected,
    RowFlow.COPY_INTO: copied_into,
    RowFlow.EACH_OF_BATCH: _all_results(_attention),
}


def rule_of(node: Node) -> Rule | None:
    """Return the rule for a call; None if its operator has none.

    All operators that torch tags as pointwise share a rule.
    """
    if (flow := named(operators.operator_name(node)).rows) is not None:
        return RULES[flow]
    return elementwise if torch.Tag.pointwise in getattr(node.target, "tags", ()) else None


def follow(rule: Rule, call: RuleCall) -> Answer:
    """Apply a rule to a call, and return the `Rows` of its result; None if the call mixes rows.

    If ranks divide the rows, only a few operators may read them; all others count as mixing.
    """
    forms = {rows.share.form for rows in call.rows.values() if rows.share}
    if forms & {"cut", "cut summand"} and rule not in (_view, selected):
        return None
    if "summand" in forms and rule not in (elementwise, _view, _permute, _squeeze, _unsqueeze, _reduce_scatter):
        return None
    return rule(call)

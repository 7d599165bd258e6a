"""Errors of the chunk pass. An error about a node names the node and its source line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from sympy import Symbol
from torch import Tensor
from torch.fx import Node

from bitproof.harness.case import Chunking, pattern_of
from bitproof.harness.errors import ChunkError
from bitproof.harness.graph import operators
from bitproof.harness.graph.origin import ModuleCall, origin_of
from bitproof.harness.graph.symbols import carries, number, source_of


def refuse_idle_modules(chunking: Chunking, module_calls: Mapping[str, int]) -> None:
    """Raise ChunkError for a chosen module that the step never called.

    The pass would chunk its submodules, but eager would not.
    """
    idle = [name for name, calls in module_calls.items() if chunking.root_of(name) == name and not calls]
    if idle:
        running = sorted({pattern_of(name) for name, calls in module_calls.items() if calls})
        raise ChunkError(
            f"{', '.join(idle)} cannot be chunked: the pattern {chunking.modules!r} matches, but no call runs",
            expected="a pattern of modules that the step calls: " + ", ".join(running),
            found="no call of " + ", ".join(idle),
            fix="correct `modules` in the case's Chunking",
        )


def refuse_no_match(chunking: Chunking, nodes: Iterable[Node]) -> ChunkError:
    known = sorted({origin_of(node).module or "" for node in nodes} - {""})
    error = ChunkError(
        f"the chunking pattern {chunking.modules!r} matches no module of the graph",
        expected="a pattern over the modules that ran: " + ", ".join(known),
        found="no match",
        fix="correct `modules` in the case's Chunking",
    )
    error.finds_nothing = True
    return error


def refuse_whole_calls(module_calls: Mapping[str, int], written: Mapping[str, Collection[int]]) -> None:
    """Raise ChunkError if not every call of a chosen module is written in chunks.

    - `module_calls`: module name -> number of its calls in the trace.
    - `written`: module name -> its calls that are written in chunks.
    """
    for name, calls in module_calls.items():
        num_written = len(written.get(name, ()))
        if num_written != calls:
            raise ChunkError(
                f"{name} cannot be chunked: not every call of it is left in the graph and depends on the chunked dim",
                expected=f"{calls} calls in chunks, as many as were traced",
                found=f"{num_written}",
                fix="choose modules whose every call computes with the chunked activation",
            )


def refuse_nested_calls(node: Node, calls: Sequence[ModuleCall]) -> ChunkError:
    """Return the error for a chosen module that runs within another chosen module, and so would be split in four.

    `calls` are the calls of chosen modules around the node, outermost first.
    """
    return ChunkError(
        f"cannot chunk {calls[-1].module}: it runs within {calls[-2].module}, which is chunked too",
        expected="chosen modules that do not call each other",
        found=f"node {node.name}, within " + " within ".join(call.module for call in reversed(calls)),
        where=source_of(node),
        fix="correct `modules` in the case's Chunking, or name the outer modules in `only`",
    )


def refuse_foreign_collective(node: Node, reductions: set[Node], chunk_groups: frozenset[str]) -> None:
    """Raise ChunkError for a collective that must not run once per chunk.

    Allowed are collectives of a group in `chunk_groups`, and reductions of gradients.
    """
    if not operators.is_collective(node) or node in reductions or operators.group_name(node) in chunk_groups:
        return
    raise ChunkError(
        f"cannot run collective `{node.name}` ({operators.operator_name(node)}) once a chunk",
        expected=f"a collective of one of the groups {', '.join(sorted(chunk_groups))}, or a parameter gradient's own "
        "reduction",
        found=f"group {operators.group_name(node)!r}",
        where=source_of(node),
        fix="chunk only modules whose other collectives do not depend on the chunked dim (sequence parallelism's do)",
    )


def refuse_divided_dim(node: Node, root: str, symbol: Symbol, extent: int) -> None:
    """Raise ChunkError for a collective of the module `root` if each rank has only a part of the chunked dim.

    A chunk would then consist of a part of each rank's part. `extent` is the dim's whole size.
    """
    if not operators.joins_ranks(node):
        return
    for value in (x.meta["val"] for x in (*node.all_input_nodes, node)):
        if any(carries(size, symbol) and number(size, symbol, extent) < extent for size in value.shape):
            raise ChunkError(
                f"cannot chunk {root}: ranks divide the chunked dim, and {operators.operator_name(node)} `{node.name}` "
                "runs over them",
                expected="ranks that hold the chunked dim whole",
                found=f"{list(map(str, value.shape))}, where the dim has {symbol}",
                where=source_of(node),
                fix="chunk along the other dim, or leave out parallelism.sequence",
            )


def refuse_attention_over_sequence(node: Node, dim: str) -> None:
    if dim == "seq" and operators.attends(node):
        raise ChunkError(
            f"cannot chunk attention `{node.name}` along the sequence: every position reads earlier ones",
            expected="modules that treat each token alone, such as layers.*.moe",
            found=operators.operator_name(node),
            where=source_of(node),
            fix="chunk along batch, or choose modules='layers.*.moe'",
        )


def refuse_baked_view(node: Node, symbol: object) -> None:
    """Raise ChunkError for a view that states the size of the chunked dim as a number, which is wrong for a chunk."""
    if node.target not in operators.SIZED_VIEWS:
        return
    source, value = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if carries(source, symbol) and not carries(value, symbol):
        raise ChunkError(
            f"view `{node.name}` has a baked constant instead of the chunked dim",
            expected=f"a size computed from x.shape; its input has {list(map(str, source.shape))}",
            found=f"sizes {list(node.args[1])}",  # type: ignore[arg-type]
            where=source_of(node),
            fix="write the view with x.shape[...], not with a number",
        )


def refuse_write(node: Node, written: Node) -> None:
    """Raise ChunkError for a node that writes to a value in place, if the value is also split or joined, or is in
    chunks of another module."""
    raise ChunkError(
        f"cannot write in place to `{written.name}` in `{node.name}`: its elements also exist split or joined",
        expected="in-place writes to buffers without the chunked dim, or to values of the same module",
        found=f"shape {list(map(str, written.meta['val'].shape))}",
        where=source_of(node),
        fix="write the update out of place",
    )


def refuse_early_read(node: Node, reader: Node) -> None:
    """Raise ChunkError for an in-place write of chunk 0 that chunk 1 misses, since it has read the value already."""
    raise ChunkError(
        f"cannot write in place in `{node.name}`: chunk 1 of the same call has run `{reader.name}` before",
        expected="a write of chunk 0 before chunk 1 reads the tensor, as in eager",
        found=f"`{reader.name}`, needed whole between its read and this write",
        where=source_of(node),
        fix="write the tensor directly after reading it",
    )


def refuse_second_use(addition: Node) -> ChunkError:
    """Return the error for a parameter that is used twice, at least once in chunks.

    Its gradient is a sum over uses and chunks, which eager adds in another order than the pass would.
    """
    uses = ", ".join(f"{x.name} in {origin_of(x)}" for x in addition.all_input_nodes)
    return ChunkError(
        f"cannot add the gradients of two uses of one parameter in `{addition.name}`: at least one is chunked",
        expected="a parameter that is read once, in one chunked module (eager adds chunks and uses in another order)",
        found=uses,
        where=source_of(addition),
        fix="read the parameter once in the module, or chunk modules that do not share it",
    )


def refuse_join(node: Node, value: object) -> ChunkError:
    """Return the error for a value that is read whole, but cannot be joined from its chunks.

    It lacks the chunked dim, and is no gradient of a parameter.
    """
    shape = list(map(str, value.shape)) if isinstance(value, Tensor) else type(value).__name__
    readers = ", ".join(sorted(user.name for user in node.users))
    return ChunkError(
        f"live-out `{node.name}` exists once per chunk but is also read whole, and does not carry the chunked dim",
        expected="a tensor with the chunked dim (concatenated) or a parameter gradient (added)",
        found=f"shape {shape}, read by {readers}",
        where=source_of(node),
        fix="keep its readers inside the chunked module, or choose a larger module",
    )

"""Join the all-gathers of a block's parameters into buckets, and the reduce-scatters of their gradients likewise.

Needs:    parameters are the graph's first inputs; their gradients are its outputs after the loss, in the same
          order; every collective names a group of `context.groups`.
Promises: same bits, as sums are element by element in rank order; a module's calls keep their
          order; reductions run in their own groups, so that they can overlap with gathers.
Refuses:  a collective whose group is unknown. Collectives of values that are neither parameters nor gradients stay
          unchanged.

1. Find the all-gathers whose input is a parameter, after casts, changes of shape and padding at most.
2. Drop repeated gathers: same parameter, same casts, same group.
3. Find the reduce-scatters whose result is a gradient, after casts, changes of shape, cuts and additions at most.
4. Sort the gathers into buckets, and the reduce-scatters into other buckets. A bucket's members have the same group,
   operation, dtype, block and direction. In a graph divided into forward and backward, they are in the same half. These
   have separate buckets: recomputed gathers, each chunk, each module outside all blocks. With `join_chunks`, reductions
   of all chunks are joined. Inside a bucket, parameters have the order of the graph's inputs.
5. Insert a bucket's gathered values where its first member was. Launch its gather earlier, where the previous bucket's
   values are inserted, if both are in the same half.
6. Write a bucket's reduction after its last gradient. Wait for it when the next reduction is launched, so that a single
   reduction is in flight.
7. Move every node after the nodes that it now reads.
"""

# Names of sizes: W is the number of the group's ranks, n_i the number of elements in member i's shard, N their sum.

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.dependencies import reorder
from bitproof.harness.graph.analysis.halves import HALF_KEY, Half
from bitproof.harness.graph.analysis.parameters import chain_to_input, parameters_of
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.dead_code import drop_dead_code
from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.graph.origin import META_KEY, RECOMPUTED_KEY, Direction, Origin, origin_of
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.step.storages import Storages
from bitproof.harness.torch_compat import FakeTensor, FakeTensorMode, tree_leaves

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

REDUCTIONS = "reduce"
"""The purpose of a group that runs only reductions of gradients."""

_TO_GRADIENT = operators.VIEWS | {aten._to_copy.default, aten.slice.Tensor, aten.add.Tensor}


class _Member(NamedTuple):
    """The collective of a single parameter: its launch, its wait, and the parameter's index among
    the graph's inputs.
    """

    launch: Node
    wait: Node
    parameter: int

    @property
    def source(self) -> Node:
        return _source(self.launch)


def _source(launch: Node) -> Node:
    source = launch.args[0]
    assert isinstance(source, Node)
    return source


class _Kind(NamedTuple):
    """The properties that all members of a bucket share.

    `arguments` are the collective's arguments between the tensor and the group: the group's size and, before it, the
    operation of a reduction, "sum" or "avg".
    """

    group: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    block: str
    direction: Direction
    recomputed: bool
    chunk: int | None
    half: Half | None

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata for the bucket's calls, except for their fake values."""
        origin = Origin(self.block, self.direction)
        marks = {META_KEY: origin, RECOMPUTED_KEY: self.recomputed or None, CHUNK_KEY: self.chunk, HALF_KEY: self.half}
        return {key: mark for key, mark in marks.items() if mark is not None}


class _Bucket(NamedTuple):
    kind: _Kind
    members: list[_Member]


def bucket(module: GraphModule, context: PassContext, *, blocks: str, join_chunks: bool = True) -> GraphModule:
    """Join collectives of a block's parameters into buckets.

    - `blocks`: a pattern of modules, such as layers.*. Each match is a block.
    - `join_chunks`: True if reductions of both chunks share buckets.
    """
    graph = module.graph
    place = {node: index for index, node in enumerate(graph.nodes)}
    gathers, reductions = _find_gathers(graph), _find_reductions(graph)

    def kind_of(member: _Member, *, with_chunk: bool) -> _Kind:
        node = member.launch
        return _Kind(
            group=operators.group_name(node),
            # Without the tensor, which is the first argument, and the group, which is the last.
            arguments=node.args[1:-1],
            dtype=node.meta["val"].dtype,
            block=_block_of(origin_of(node).module or "", blocks),
            direction=origin_of(node).direction,
            recomputed=bool(node.meta.get(RECOMPUTED_KEY)),
            chunk=node.meta.get(CHUNK_KEY) if with_chunk else None,
            half=node.meta.get(HALF_KEY),
        )

    # 1. to 4. Members, without repeated gathers, in buckets.
    distinct = _drop_repeated(gathers, lambda member: kind_of(member, with_chunk=True))
    gather_buckets = _sort(distinct, lambda member: kind_of(member, with_chunk=True))
    reduction_buckets = _sort(reductions, lambda member: kind_of(member, with_chunk=not join_chunks))
    # A gather is due at its first reader, a reduction only after its last gradient: hence min and max.
    gather_buckets.sort(key=lambda bucket: min(place[member.launch] for member in bucket.members))
    reduction_buckets.sort(key=lambda bucket: max(place[member.launch] for member in bucket.members))
    # 5. to 7. The new calls, then the order that they need.
    writer = _Writer(graph, place)
    writer.write_gathers(gather_buckets)
    writer.write_reductions(reduction_buckets, context.groups)
    context.facts["all_gathers"] = {"before": len(gathers), "after": len(gather_buckets)}
    context.facts["reduce_scatters"] = {"before": len(reductions), "after": len(reduction_buckets)}
    if gathers or reductions:
        drop_dead_code(module)
        reorder(module)
        module.recompile()
    return module


# -- finding ----------------------------------------------------------------------------------------


def _find_gathers(graph: Graph) -> list[_Member]:
    parameters = parameters_of(graph)
    return [
        _Member(launch, wait, parameters[source])
        for launch, wait in _launches(graph, "all_gather_into_tensor")
        if (source := chain_to_input(launch)[-1]) in parameters
    ]


def _find_reductions(graph: Graph) -> list[_Member]:
    output = graph.output_node()
    outputs: Any = output.args[0]
    # Reversed, so that a node that is several outputs gets its first index.
    indices = {node: index for index, node in reversed(list(enumerate(outputs[1:]))) if isinstance(node, Node)}
    found = []
    for launch, wait in _launches(graph, "reduce_scatter_tensor"):
        node = wait
        # With a second reader, the value is more than a step on the way to a gradient.
        while len(node.users) == 1 and (user := next(iter(node.users))).target in _TO_GRADIENT:
            node = user
        if node in indices:
            found.append(_Member(launch, wait, indices[node]))
    return found


def _launches(graph: Graph, name: str) -> Iterable[tuple[Node, Node]]:
    """Yield (launch, wait) for each call of the collective `name`.

    A launch is left out if a call other than a single wait reads it, or if some call writes its input or output in
    place.
    """
    storages = Storages(graph.nodes)
    for launch in graph.nodes:
        if operators.is_collective(launch) and operators.operator_name(launch) == name:
            waits = list(launch.users)
            # A bucket moves the launch. Across an in-place write it would read or leave another value.
            touched = storages.of([launch, *chain_to_input(launch)])
            if len(waits) == 1 and operators.is_wait(waits[0]) and touched.isdisjoint(storages.writers):
                yield launch, waits[0]


# -- sorting ----------------------------------------------------------------------------------------


def _drop_repeated(gathers: list[_Member], kind_of: Callable[[_Member], _Kind]) -> list[_Member]:
    """Drop gathers that repeat an earlier gather, and return the others.

    Readers of a dropped gather read the earlier gather.
    """
    first: dict[Any, _Member] = {}
    for member in gathers:
        kind = kind_of(member)
        casts = tuple((x.target, str(x.args[1:]), str(x.kwargs)) for x in chain_to_input(member.launch)[:-1])
        # A recomputed gather repeats only another recomputed gather with the same properties, so that a block in
        # backward still gathers its parameters again.
        key = member.parameter, casts, kind if kind.recomputed else kind.group
        same = first.setdefault(key, member)
        if same is not member:
            member.wait.replace_all_uses_with(same.wait)
    return list(first.values())


def _sort(members: list[_Member], kind_of: Callable[[_Member], _Kind]) -> list[_Bucket]:
    buckets: dict[_Kind, list[_Member]] = {}
    # In the order of the graph's inputs, which is the same on all ranks.
    for member in sorted(members, key=lambda member: member.parameter):
        buckets.setdefault(kind_of(member), []).append(member)
    return [_Bucket(kind, sorted_members) for kind, sorted_members in buckets.items()]


def _block_of(module: str, pattern: str) -> str:
    """Return the name of the block that contains a module. A module outside all blocks is its own block."""
    # As many parts of the name as the pattern has: layers.3 of layers.3.attention.wq, for layers.*
    block = ".".join(module.split(".")[: pattern.count(".") + 1])
    return block if fnmatch.fnmatchcase(block, pattern) else module


# -- writing ----------------------------------------------------------------------------------------


class _Writer:
    """Writes buckets into the graph. The collectives that a bucket replaces stay in the graph, without readers.

    `place` has each node's index before the pass. A bucket with a single member moves the collective, without copies.
    """

    def __init__(self, graph: Graph, place: dict[Node, int]) -> None:
        self.graph = graph
        self.place = place

    def write_gathers(self, buckets: list[_Bucket]) -> None:
        """Write the wait and results of each bucket at its members' first wait. Before that, launch the next bucket."""
        launched: list[Node] = []
        for index, bucket in enumerate(buckets):
            anchor = min((member.wait for member in bucket.members), key=self.place.__getitem__)
            # The first bucket of a half launches two gathers: its own, and that of the next bucket.
            with self.graph.inserting_before(anchor):
                # `launched` is always a prefix of `buckets`. If the next bucket belongs to the other half, it is
                # launched at its own anchor: a launch must not move into an earlier half.
                for ahead in buckets[len(launched) : index + 2]:
                    if ahead.kind.half == bucket.kind.half:
                        launched.append(self._launch_gather(ahead, anchor))
                self._finish_gather(bucket, launched[index])

    def write_reductions(self, buckets: list[_Bucket], groups: GroupTable) -> None:
        """Launch each bucket after its last gradient. Write its wait just before the next bucket's launch."""
        waiting: tuple[_Bucket, Node] | None = None
        for bucket in buckets:
            anchor = max((member.launch for member in bucket.members), key=self.place.__getitem__)
            group = groups.derive(bucket.kind.group, REDUCTIONS)
            with self.graph.inserting_before(anchor):
                if waiting:
                    # Before the next launch, so that a single reduction is in flight.
                    self._finish_reduction(*waiting, anchor)
                waiting = bucket, self._launch_reduction(bucket, group)
        if waiting:
            output = self.graph.output_node()
            with self.graph.inserting_before(output):
                self._finish_reduction(*waiting, output)

    def _launch_gather(self, bucket: _Bucket, anchor: Node) -> Node:
        """Launch a bucket's gather before `anchor`.

        Shards of n_i elements are joined to (N,), and gathered to (W * N,).
        """
        kind, members = bucket
        # The launch moves ahead, so the casts of all members must move with it.
        for member in members:
            for node in reversed(chain_to_input(member.launch)[:-1]):
                if self.place[node] > self.place[anchor]:
                    anchor.prepend(node)
        if len(members) == 1:
            anchor.prepend(members[0].launch)
            return members[0].launch
        shards = [self._call(kind, aten.reshape.default, member.source, [-1]) for member in members]
        flat_N = self._call(kind, aten.cat.default, shards)
        return self._call(kind, members[0].launch.target, flat_N, *kind.arguments, kind.group)

    def _finish_gather(self, bucket: _Bucket, launch: Node) -> None:
        """Write a bucket's wait and results: (W * N,) is viewed as (W, N), and split into copies of shape (W, n_i)."""
        kind, members = bucket
        if len(members) == 1:
            return
        sizes = [member.source.meta["val"].numel() for member in members]
        gathered = self._call(kind, c10d.wait_tensor.default, launch)
        rows_WN = self._call(kind, aten.view.default, gathered, [-1, sum(sizes)])
        # Copies, not views: they are contiguous, like the results of separate gathers.
        self._replace_waits(kind, members, self._call(kind, aten.split_with_sizes_copy.default, rows_WN, sizes, 1))

    def _launch_reduction(self, bucket: _Bucket, group: str) -> Node:
        """Launch a bucket's reduction.

        Gradients, viewed as (W, n_i), are joined to (W, N), and reduce-scattered to (1, N).
        """
        kind, members = bucket
        first = members[0].launch
        if len(members) == 1:
            first.args = (*first.args[:-1], group)
            return first
        # Row r of each gradient is the shard that rank r keeps. Joined along dim 1, each element is still the sum of
        # the same W numbers in the same order.
        _, size = kind.arguments
        rows = [self._call(kind, aten.reshape.default, member.source, [size, -1]) for member in members]
        rows_WN = self._call(kind, aten.cat.default, rows, 1)
        return self._call(kind, first.target, rows_WN, *kind.arguments, group)

    def _finish_reduction(self, bucket: _Bucket, launch: Node, anchor: Node) -> None:
        """Write a bucket's wait and results before `anchor`: (1, N) is split into views of shape (1, n_i)."""
        kind, members = bucket
        if len(members) == 1:
            anchor.prepend(members[0].wait)
            return
        sizes = [member.launch.meta["val"].numel() for member in members]
        reduced = self._call(kind, c10d.wait_tensor.default, launch)
        self._replace_waits(kind, members, self._call(kind, aten.split_with_sizes.default, reduced, sizes, 1))

    def _replace_waits(self, kind: _Kind, members: list[_Member], parts: Node) -> None:
        for index, member in enumerate(members):
            part = self._call(kind, operator.getitem, parts, index)
            shape = list(member.wait.meta["val"].shape)
            member.wait.replace_all_uses_with(self._call(kind, aten.view.default, part, shape))

    def _call(self, kind: _Kind, target: Any, *args: Any) -> Node:
        values = map_arg(args, lambda node: node.meta["val"])
        with torch.no_grad(), _fake_mode_of(values):
            value = target(*values)
        node = self.graph.call_function(target, args)
        node.meta |= {"val": value, **kind.meta}
        return node


def _fake_mode_of(values: Any) -> FakeTensorMode:
    return next(x.fake_mode for x in tree_leaves(values) if isinstance(x, FakeTensor))

"""Reorder the graph so that a chunk's collectives overlap with other compute, mostly with compute of the other chunk.

With `context.pipeline.overlap`, the collectives are the all-to-alls of experts. With `context.pipeline.async_tensor`,
they are the gathers, sums and reduce-scatters of a tensor group. For example, the input of chunk 1 is gathered during
the matrix products of chunk 0.

Needs:    collectives as a launch and a wait; the chunk pass's marks; the part of each all-to-all in its origin; a cost
          model in `context.pipeline.overlap_costs` or, on the CPU, bitproof's own.
Promises: the same nodes, hence the same bits, in an order that depends only on the graph and the model; no node
          moves further ahead than into the previous chunked region; the simulated step gets shorter.
Refuses:  a graph without an all-to-all of dispatch or combine that runs once per chunk, or without such a collective
          of a tensor group, as there is nothing to overlap; such a collective with another reader than its wait; a
          collective that is not in the model; an invalid model file.

Below, an all-to-all is a collective that sends rows to their experts (dispatch) or back (combine). With `async_tensor`,
it may also be a collective of a tensor group that runs once per chunk.

1. Divide the graph into regions, each a module's forward or backward. Divide each region into chunk 0, chunk 1 and the
   rest.
2. Simulate a rank, and choose the next node among those whose inputs are ready. Launches of all-to-alls come first.
   Other nodes are ordered by region, and chunk 0 comes before chunk 1. Then come nodes that the next all-to-all of
   their chunk needs, and then all others in the graph's order. A wait for an all-to-all is ready once the all-to-all
   has arrived. Until then, waits for other collectives are postponed in the same way.
3. Move the wait for each all-to-all directly before its first reader, since the model may be wrong about the arrival.
4. Report how many all-to-alls overlap with compute, and the model's times before and after.

If the model finds no shorter order, the graph stays unchanged. On devices other than the CPU, the pass can run without
a model. Then it assumes that each all-to-all takes longer than all compute that may hide it.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from bitproof.harness.case import Chunking
from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.dependencies import dependencies, reorder
from bitproof.harness.graph.analysis.expert_exchanges import is_exchange, only_wait
from bitproof.harness.graph.analysis.halves import HALF_KEY
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.origin import origin_of
from bitproof.harness.graph.passes.overlap.costs import CPU_GLOO, Cost, CostModel, node_costs
from bitproof.harness.graph.passes.overlap.timeline import Timeline, simulate
from bitproof.harness.graph.writer import CHUNK_KEY
from bitproof.harness.step.storages import Storages

log = logging.getLogger(__name__)


class NodePosition(NamedTuple):
    """A node's position before the pass.

    - `region`: the index of its region, which is a module's forward or backward.
    - `part`: 0 for chunk 0, 1 for chunk 1, 2 for nodes that belong to neither.
    - `position`: its index in the graph.
    """

    region: int
    part: int
    position: int


def overlap(module: GraphModule, context: PassContext) -> GraphModule:
    nodes = list(module.graph.nodes)
    launches = [node for node in nodes if is_exchange(node)] if context.pipeline.overlap else []
    chunked = [launch for launch in launches if context.chunking and CHUNK_KEY in launch.meta]
    of_tensors = [node for node in nodes if context.pipeline.async_tensor and _is_of_tensor_group(node, context)]
    _refuse_nothing_to_hide(context, launches, chunked, of_tensors)
    assert context.chunking is not None
    hidden = launches + of_tensors
    waits = [only_wait(launch) for launch in hidden]
    path = _path_of_model(nodes, context)
    model = CostModel.load(path) if path else None
    sizes = {name: len(group.partition[0]) for name, group in context.groups.groups.items()}
    costs = node_costs(module.graph, model, sizes)
    before = dependencies(module.graph)
    after = _reversed(before)
    order = schedule(nodes, before, after, find_places(nodes, context.chunking), costs, set(hidden))
    key = _sort_keys(order, waits, after)
    order.sort(key=key.__getitem__)
    simulated = [simulate(x, costs) for x in (nodes, order)]
    is_better = model is None or simulated[1].time < simulated[0].time
    if is_better:
        reorder(module, key.__getitem__)
    final = simulated[1] if is_better else simulated[0]
    context.facts.update(
        all_to_alls=len(launches),
        in_chunks=len(chunked),
        in_flight=_num_in_flight(module.graph.nodes, launches, waits[: len(launches)]),
        reordered=is_better,
        **_facts(simulated[0], final, model, path),
    )
    if context.pipeline.async_tensor:
        context.facts["of_tensor_group"] = {
            "collectives": len(of_tensors),
            "in_flight": _num_in_flight(module.graph.nodes, of_tensors, waits[len(launches) :]),
        }
        if model is not None:
            shares = {"before": simulated[0], "after": final}
            context.facts["of_tensor_group"] |= {
                f"hidden_fraction_{name}": each.hidden_fraction(of_tensors) for name, each in shares.items()
            }
    log.debug("overlap: %s", context.facts)
    return module


def _is_of_tensor_group(node: Node, context: PassContext) -> bool:
    is_chunks_own = CHUNK_KEY in node.meta and operators.is_collective(node)
    return (
        context.chunking is not None
        and is_chunks_own
        and operators.group_name(node) in context.chunk_groups
        and operators.operator_name(node) != "all_to_all_single"
    )


def _refuse_nothing_to_hide(
    context: PassContext, launches: list[Node], chunked: list[Node], of_tensors: list[Node]
) -> None:
    """Raise PassError if a setting finds no collective to hide, since the case would not test the setting.

    In a pipeline, a stage needs collectives only for one of the two settings.
    """
    chunking, pipeline = context.chunking, context.pipeline
    where = f"in chunks of {chunking.modules!r}: 0" if chunking else "in chunks of nothing, as the case has no chunking"
    lacks_exchange = pipeline.overlap and not chunked
    lacks_tensor = pipeline.async_tensor and not of_tensors
    if context.cuts.num_stages > 1 and (chunked or of_tensors):
        return
    if lacks_exchange:
        error = PassError(
            "there is no all-to-all that overlap could hide",
            expected="an expert layer's all-to-alls within the chunked modules, as with modules='layers.*.moe', which "
            'the model annotates {"EP": "dispatch"} or {"EP": "combine"}',
            found=f"all-to-alls of dispatch and combine in the graph: {len(launches)}; {where}",
            fix="chunk modules with experts on more than one rank, or leave out overlap",
        )
    elif lacks_tensor:
        error = PassError(
            "there is no collective of a tensor group that async_tensor could hide",
            expected="layers that a tensor group splits within the chunked modules, as with tp=2 and "
            "modules='layers.*'",
            found=f"collectives of a tensor group {where}",
            fix="chunk modules that are split over tensor ranks, or leave out async_tensor",
        )
    else:
        return
    error.finds_nothing = True
    raise error


def _path_of_model(nodes: list[Node], context: PassContext) -> Path | None:
    if context.pipeline.overlap_costs is not None:
        return Path(context.pipeline.overlap_costs)
    devices = {x.device.type for node in nodes if isinstance(x := node.meta.get("val"), Tensor)}
    return CPU_GLOO if devices == {"cpu"} else None


def find_places(nodes: list[Node], chunking: Chunking) -> dict[Node, NodePosition]:
    """Return each node's region and its part of the region (step 1 at the top of this file).

    - A region begins at the first chunked node of a module in a direction.
    - A node that is written once belongs to chunk 0 if chunk 0 follows in the region. It belongs to chunk 1 if only
      chunk 1 follows, and otherwise to neither.
    - If the graph has halves (forward and backward), a region number is skipped between them, so that no node moves to
      the other half.
    """
    regions, region, running, half = [], 0, None, None
    for node in nodes:
        if half is not None and node.meta.get(HALF_KEY, half) != half:
            region, running = region + 2, None
        half = node.meta.get(HALF_KEY, half)
        module, direction = origin_of(node)[:2]
        root = chunking.root_of(module) if module and CHUNK_KEY in node.meta else None
        if root and (root, direction) != running:
            region, running = region + 1, (root, direction)
        regions.append(region)
    # From the end: a node written once serves the earliest chunk that follows it in its region.
    places, last = {}, (-1, 2)
    for index in reversed(range(len(nodes))):
        chunk = nodes[index].meta.get(CHUNK_KEY)
        part = min(2 if chunk is None else chunk, last[1] if last[0] == regions[index] else 2)
        last = regions[index], part
        places[nodes[index]] = NodePosition(regions[index], part if chunk is None else chunk, index)
    return places


def schedule(
    nodes: list[Node],
    before: dict[Node, set[Node]],
    after: dict[Node, list[Node]],
    places: dict[Node, NodePosition],
    costs: dict[Node, Cost],
    hidden: set[Node],
) -> list[Node]:
    """Return the nodes in the topological order of step 2 (see the top of this file). Takes O(n log n).

    - `before`, `after`: for each node, the nodes that must run before it and after it.
    - `hidden`: the launches of the collectives that compute should hide.
    """
    needed_by = _next_hidden(nodes, after, places, hidden)
    timeline = Timeline(costs)
    waiting_for = {node: len(before[node]) for node in nodes}
    unfinished = [0] * (places[nodes[-1]].region + 1)
    for place in places.values():
        unfinished[place.region] += 1
    # `oldest` is the oldest region with unfinished nodes; `all_arrived` is the time when every launched all-to-all has
    # arrived; `parked` has, by region, nodes that could run but are too far ahead.
    oldest, all_arrived = 0, 0.0
    ready: list[tuple[Any, Node]] = []
    in_flight: list[tuple[float, int, Node]] = []
    parked: dict[int, list[Node]] = {}
    order: list[Node] = []

    def release(node: Node) -> None:
        # No node moves further ahead than into the previous chunked region.
        if places[node].region > oldest + 1:
            parked.setdefault(places[node].region, []).append(node)
        elif operators.is_wait(node) and operators.launch_of(node) in hidden:
            put_off(node)
        else:
            heapq.heappush(ready, (key_of(node), node))

    def put_off(wait: Node) -> None:
        heapq.heappush(in_flight, (timeline.arrival[operators.launch_of(wait)], places[wait].position, wait))

    def key_of(node: Node) -> Any:
        region, part, position = places[node]
        # A launch of a later region goes before compute of an earlier region: the sooner it is in flight, the more it
        # hides.
        rank = {"placeholder": 0, "output": 3}.get(node.op, 1 if node in hidden else 2)
        return rank, region, part, needed_by[node], position

    for node in nodes:
        if not before[node]:
            release(node)
    while ready or in_flight:
        while in_flight and in_flight[0][0] <= timeline.time:
            wait = heapq.heappop(in_flight)[-1]
            heapq.heappush(ready, (key_of(wait), wait))
        # If no node is ready, the rank has to block: run the wait that ends first.
        node = heapq.heappop(ready)[-1] if ready else heapq.heappop(in_flight)[-1]
        # A wait for another collective that would block is postponed as well, while there is an all-to-all to hide.
        if (
            ready
            and timeline.time < all_arrived
            and operators.is_wait(node)
            and not timeline.has_arrived(operators.launch_of(node))
        ):
            put_off(node)
            continue
        timeline.run(node)
        if node in hidden:
            all_arrived = max(all_arrived, timeline.arrival[node])
        order.append(node)
        unfinished[places[node].region] -= 1
        for later in after[node]:
            waiting_for[later] -= 1
            if not waiting_for[later]:
                release(later)
        # The oldest region has ended, so nodes of the region after the next no longer move too far ahead.
        while oldest < len(unfinished) - 1 and not unfinished[oldest]:
            oldest += 1
            for later in parked.pop(oldest + 1, ()):
                release(later)
    assert len(order) == len(nodes), "the oldest unfinished region always has a node that is ready"
    return order


def _next_hidden(
    nodes: list[Node], after: dict[Node, list[Node]], places: dict[Node, NodePosition], hidden: set[Node]
) -> dict[Node, int]:
    """Return a dict: each node -> the position of the first launch in `hidden` that needs the node.

    If no launch needs it, this is the number of nodes. Only launches in the same part of the same region count.
    """
    found: dict[Node, int] = {}
    for node in reversed(nodes):
        own = [later for later in after[node] if places[later][:2] == places[node][:2]]
        found[node] = min((found[later] for later in own), default=len(nodes))
        if node in hidden:
            found[node] = places[node].position
    return found


def _sort_keys(order: list[Node], waits: list[Node], after: dict[Node, list[Node]]) -> dict[Node, tuple[int, int]]:
    """Return each node's sort key for step 3 at the top of this file: (index in `order`, 1).

    A wait has (index of its first reader, 0), and so moves directly before that reader.
    """
    key = {node: (index, 1) for index, node in enumerate(order)}
    for wait in waits:
        if after[wait]:
            key[wait] = min(key[later][0] for later in after[wait]), 0
    return key


def _reversed(before: dict[Node, set[Node]]) -> dict[Node, list[Node]]:
    after: dict[Node, list[Node]] = {node: [] for node in before}
    for node, earlier in before.items():
        for x in earlier:
            after[x].append(node)
    return after


def _num_in_flight(nodes: Iterable[Node], launches: list[Node], waits: list[Node]) -> int:
    """Return the number of collectives that overlap with compute.

    A collective counts if a call between its launch and its wait computes. Views and other collectives do not compute.
    """
    nodes = list(nodes)
    storages = Storages(nodes)
    num_before: dict[Node, int] = {}
    num_computed = 0
    for node in nodes:
        num_before[node] = num_computed
        is_of_collective = operators.is_collective(node) or operators.is_wait(node)
        computes = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
        num_computed += computes and not storages.is_view(node) and not is_of_collective
    return sum(num_before[launch] < num_before[wait] for launch, wait in zip(launches, waits, strict=True))


def _facts(before: Timeline, after: Timeline, model: CostModel | None, path: Path | None) -> dict[str, Any]:
    if model is None or path is None:
        return {"costs": None}
    times = {"before": before.summary(), "after": after.summary()}
    return {"costs": path.name, "fitted_on": model.description} | times

"""Move the collectives of sharded parameters into dense regions, away from the all-to-alls of experts.

Needs:    collectives as a launch and a wait; the part of each all-to-all in its origin; parameters are the graph's
          first inputs; every collective names a group of `context.groups`; all-to-alls have their final order.
Promises: the same nodes, hence the same bits; the collectives of a process-group object keep their order, which is
          the same on all ranks; no gather is launched later than before, and no reduction earlier; no node moves to
          the other half of a partitioned graph.
Refuses:  a graph without an all-to-all of dispatch or combine, as there is nothing to keep away from; an
          all-to-all with another reader than its wait; a collective whose group is unknown.

Both kinds of traffic share links between machines: a gather in flight beside an all-to-all slows the exchange, which
often has less compute to hide behind. A dense region is a part of the graph without an all-to-all in flight, with
attention or a matrix product outside the experts' layers.

1. Find the dense regions, in order.
2. Find the all-gathers of parameters, and the reduce-scatters of gradients, that are in flight beside an all-to-all.
3. Plan each gather: in the last dense region that has compute before the gathered values are read. Launch it where the
   region starts, and wait before the region ends. For example, if the experts' weights of layers.1 are read between two
   all-to-alls, they are gathered during the attention of layers.1.
4. Plan each reduction: in the first dense region with compute after its gradients are there, or at the graph's end.
5. Leave a collective unmoved if no place in the region keeps the order of its process-group object.
6. Move the nodes. The casts and packing that a gather reads move ahead with it, and the readers of a delayed wait move
   behind the wait.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

from torch.fx import GraphModule, Node

from bitproof.harness.errors import PassError
from bitproof.harness.graph import operators
from bitproof.harness.graph.analysis.dependencies import reorder
from bitproof.harness.graph.analysis.expert_exchanges import is_exchange, only_wait
from bitproof.harness.graph.analysis.halves import HALF_KEY
from bitproof.harness.graph.analysis.parameters import parameters_of
from bitproof.harness.graph.context import PassContext
from bitproof.harness.graph.group_objects import collectives_by_object
from bitproof.harness.graph.origin import origin_of


class _Region(NamedTuple):
    """A dense region.

    - `start`, `end`: the index of its first node, and the index of the first node after it.
    - `half`: in a partitioned graph 0 for forward and 1 for backward, otherwise always 0.
    - `is_last`: True if no all-to-all follows in the half.
    """

    start: int
    end: int
    half: int
    is_last: bool


class _Key(NamedTuple):
    """A node's new place in the graph, for sorting.

    - `place`: the index of a node in the graph before the pass.
    - `side`: -1 if this node moves before that node, 1 if it moves after that node, and 0 if it does not move.
    - `original`: the node's own index before the pass.
    """

    place: int
    side: int
    original: int


class _Collective(NamedTuple):
    launch: Node
    wait: Node


class _Plan(NamedTuple):
    """The new places of a collective's launch and wait, and the region that contains them."""

    launch: _Key
    wait: _Key
    region: _Region


def dense_traffic(module: GraphModule, context: PassContext) -> GraphModule:
    by_object = collectives_by_object(module.graph, context.groups)
    traffic = _Traffic(module)
    if not traffic.exchanges:
        raise _refuse_without_exchange()
    before = len(traffic.beside())
    keys = _new_places(traffic, by_object)
    if keys:
        reorder(module, lambda node: keys.get(node, traffic.own(node)))
        after = collectives_by_object(module.graph, context.groups)
        assert _as_names(after) == _as_names(by_object), "the order in a group must stay"
        module.recompile()
    context.facts.update(
        all_to_alls=len(traffic.exchanges),
        dense_regions=len(traffic.regions),
        moved=sum(x.launch in keys for x in (*traffic.gathers, *traffic.reductions)),
        beside_all_to_alls={"before": before, "after": len(_Traffic(module).beside())},
    )
    return module


def _refuse_without_exchange() -> PassError:
    error = PassError(
        "there is no all-to-all that other traffic could be kept away from",
        expected='experts on more than one rank, whose all-to-alls the model annotates {"EP": "dispatch"} or '
        '{"EP": "combine"}',
        found="all-to-alls of dispatch and combine in the graph: 0",
        fix="leave out dense_traffic",
    )
    error.finds_nothing = True
    return error


def _as_names(by_object: list[list[Node]]) -> set[tuple[str, ...]]:
    return {tuple(node.name for node in collectives) for collectives in by_object}


class _Traffic:
    def __init__(self, module: GraphModule) -> None:
        self.nodes = list(module.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        exchanges = (_Collective(node, only_wait(node)) for node in self.nodes if is_exchange(node))
        self.exchanges = [(self.place[x.launch], self.place[x.wait]) for x in exchanges]
        self._dense = [place for place, node in enumerate(self.nodes) if _is_dense_compute(node)]
        self.half_of_place, self.regions = self._find_regions()
        parameters = parameters_of(module.graph)
        self.gathers = [x for x in self._launched("all_gather_into_tensor") if _reads_only(x.launch, parameters)]
        self.reductions = [x for x in self._launched("reduce_scatter_tensor") if _is_of_gradient(x.wait)]

    def own(self, node: Node) -> _Key:
        return _Key(self.place[node], 0, self.place[node])

    def has_compute(self, start: int, end: int) -> bool:
        """Return whether a matrix product or attention outside the experts' layers is in [start, end)."""
        return bisect.bisect_left(self._dense, end) > bisect.bisect_left(self._dense, start)

    def is_beside(self, x: _Collective) -> bool:
        """Return whether a collective and an all-to-all are in flight at the same time."""
        launch, wait = self.place[x.launch], self.place[x.wait]
        return any(start < wait and launch < end for start, end in self.exchanges)

    def beside(self) -> list[_Collective]:
        return [x for x in (*self.gathers, *self.reductions) if self.is_beside(x)]

    def _launched(self, name: str) -> list[_Collective]:
        launches = [x for x in self.nodes if operators.is_collective(x) and operators.operator_name(x) == name]
        # Only collectives whose results a single wait reads.
        only_users = [(x, next(iter(x.users))) for x in launches if len(x.users) == 1]
        return [_Collective(x, user) for x, user in only_users if operators.is_wait(user)]

    def _find_regions(self) -> tuple[list[int], list[_Region]]:
        """Return (the half of each node, the dense regions): step 1 at the top of this file.

        A half is a number, as in `_Region`.
        """
        opened = {start: end for start, end in self.exchanges}
        halves, half, name = [], 0, None
        gaps: list[tuple[int, int, int]] = []
        start = num_in_flight = 0
        ends = Counter(opened.values())
        for place, node in enumerate(self.nodes):
            if name is not None and node.meta.get(HALF_KEY, name) != name:
                gaps.append((start, place, half))
                half, start = half + 1, place
            name = node.meta.get(HALF_KEY, name)
            halves.append(half)
            if place in opened:
                if not num_in_flight:
                    gaps.append((start, place, half))
                num_in_flight += 1
            elif place in ends:
                num_in_flight -= ends[place]
                start = place + 1
        gaps.append((start, len(self.nodes) - 1, half))
        last = {half: max(end for _, end, other in gaps if other == half) for half in range(half + 1)}
        regions = [_Region(start, end, half, end == last[half]) for start, end, half in gaps]
        return halves, [x for x in regions if x.start < x.end and (x.is_last or self.has_compute(x.start, x.end))]


def _is_dense_compute(node: Node) -> bool:
    return node.op == "call_function" and operators.is_compute_heavy(node) and origin_of(node).part is None


def _reads_only(launch: Node, parameters: Container[Node]) -> bool:
    """Whether a gather's input is computed only from parameters: by casts, padding, or packing into a bucket."""
    return all(
        x in parameters or (x.op == "call_function" and not operators.is_collective(x))
        for x in _reached(launch, lambda node: node.all_input_nodes)
    )


def _is_of_gradient(wait: Node) -> bool:
    """Whether a reduction leads only to outputs, without another collective, matrix product or attention between."""
    last = wait
    for last in _reached(wait, lambda node: node.users):
        if last.op == "call_function" and (operators.is_collective(last) or operators.is_compute_heavy(last)):
            return False
    return last is not wait


def _reached(node: Node, step: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yield each node that can be reached from `node` by `step`, which returns a node's inputs or its readers.

    A caller may stop early: from an activation that ranks of a tensor group gather, the whole graph may be reached.
    """
    found, waiting = {node}, [node]
    while waiting:
        for x in step(waiting.pop()):
            if x not in found:
                found.add(x)
                waiting.append(x)
                yield x


def _plan_gather(traffic: _Traffic, gather: _Collective) -> _Plan | None:
    launch, wait = traffic.own(gather.launch), traffic.own(gather.wait)
    # Step 3 at the top of this file.
    read = min((traffic.place[x] for x in gather.wait.users), default=wait.place)
    for region in reversed(traffic.regions):
        end = min(region.end, read)
        is_same_half = region.half == traffic.half_of_place[launch.place]
        if is_same_half and region.start <= launch.place and traffic.has_compute(region.start, end):
            is_inside = launch.place < end and traffic.has_compute(launch.place, end)
            start = launch if is_inside else _Key(region.start, -1, launch.place)
            return _Plan(start, _Key(end, -1, wait.place), region)
    return None


def _plan_reduction(traffic: _Traffic, reduction: _Collective) -> _Plan | None:
    launch, wait = traffic.own(reduction.launch), traffic.own(reduction.wait)
    # Step 4 at the top of this file.
    for region in traffic.regions:
        start = max(region.start, launch.place)
        is_same_half = region.half == traffic.half_of_place[launch.place]
        if is_same_half and start < region.end and (region.is_last or traffic.has_compute(start, region.end)):
            is_inside = region.start <= launch.place
            ends_inside = start < wait.place < region.end and (region.is_last or traffic.has_compute(start, wait.place))
            return _Plan(
                launch if is_inside else _Key(region.start, -1, launch.place),
                wait if ends_inside else _Key(region.end, -1, wait.place),
                region,
            )
    return None


def _new_places(traffic: _Traffic, by_object: list[list[Node]]) -> dict[Node, _Key]:
    # Steps 2 to 5 at the top of this file.
    keys: dict[Node, _Key] = {}
    gathers = {x.launch: x for x in traffic.gathers if traffic.is_beside(x)}
    reductions = {x.launch: x for x in traffic.reductions if traffic.is_beside(x)}
    for launches in by_object:
        for earlier, launch in itertools.pairwise([None, *launches]):
            if launch in gathers and (plan := _plan_gather(traffic, gathers[launch])):
                _add_plan(traffic, keys, gathers[launch], plan, earlier, 1)
        # From the last to the first: a reduction may follow another that moves back.
        for later, launch in itertools.pairwise([None, *reversed(launches)]):
            if launch in reductions and (plan := _plan_reduction(traffic, reductions[launch])):
                _add_plan(traffic, keys, reductions[launch], plan, later, -1)
    return keys


def _add_plan(
    traffic: _Traffic, keys: dict[Node, _Key], x: _Collective, plan: _Plan, neighbor: Node | None, side: int
) -> None:
    """Add a plan to `keys`, as far as `neighbor` allows (step 5 at the top of this file).

    `neighbor` is the previous (`side` 1) or next (`side` -1) launch of the same process-group object, or None. The
    order of the two launches must not change.
    """
    launch, own = plan.launch, (traffic.own(x.launch), traffic.own(x.wait))
    if neighbor is not None:
        other = keys.get(neighbor, traffic.own(neighbor))
        bound = _Key(other.place, other.side or side, own[0].place)
        launch = max(launch, bound) if side == 1 else min(launch, bound)
    is_inside = plan.region.start <= launch.place <= plan.region.end and launch < plan.wait
    has_compute = traffic.has_compute(launch.place, plan.wait.place) or plan.region.is_last
    if is_inside and has_compute and (launch, plan.wait) != own:
        keys |= {x.launch: launch, x.wait: plan.wait}
        # What a gather reads moves ahead with it.
        for node in _reached(x.launch, lambda node: node.all_input_nodes) if side == 1 else ():
            if node.op == "call_function" and keys.get(node, traffic.own(node)) > launch:
                keys[node] = _Key(launch.place, launch.side, traffic.place[node])

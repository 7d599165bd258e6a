"""Finds memory races in a finished graph, and possible deadlocks between ranks.

Equal bits do not show that a graph has no race. For example, a GPU call may read memory that another stream is still
writing. On an idle machine such a graph may still compute the right bits every time.

1. Follow the step's calls in order (`walk`), with their memory (`harness.step`). The rules for races are in
   `harness.operators.happens_before`.
2. Check the order in which ranks launch collectives (`launch_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.groups import Partition
from bitproof.harness.graph.hazards.launch_order import RanksIn, find_order_problems, name_of_call, queue_entries
from bitproof.harness.graph.hazards.walk import GraphWalk
from bitproof.harness.operators import ROWS, Launch
from bitproof.harness.operators.crossings import Deadlock, QueueEntry
from bitproof.harness.operators.happens_before import Race
from bitproof.harness.step.step_program import LocatedCall

MOST_SHOWN = 3


@dataclass(frozen=True)
class Hazard:
    """A race: two calls use the same memory without an order between them, and at least one of them writes or frees it.

    - `first`, `second`: the two calls, in the graph's order.
    - `memory`: the call that allocated the memory.
    - `does`: a description of the race.
    - `missing`: a description of the call that would order the two, such as a wait.
    """

    first: LocatedCall
    second: LocatedCall
    memory: LocatedCall
    does: str
    missing: str

    def __str__(self) -> str:
        calls = dict.fromkeys((self.second, self.first))
        named = ", ".join(f"`{call}` is {name_of_call(call)}" for call in calls if call.node.op != "output")
        return f"{self.does}{self.second.where}: {named}; memory of `{self.memory}`; missing: {self.missing}"


@gc_paused()
def find_hazards(
    module: GraphModule, groups: Mapping[str, Partition] | None = None
) -> tuple[list[Hazard], list[Deadlock]]:
    """Return (races, possible deadlocks) of a graph, both in the graph's order.

    `groups` maps the name of each process group to its instances, each a tuple of ranks. With None, calls are not
    compared with groups.
    """
    walk = GraphWalk(module)
    found = sorted(walk.races, key=lambda race: race[0])
    return [_hazard(walk, who, race) for _, who, race in found], find_order_problems(walk.entries, groups)


def hazard_lines(module: GraphModule, groups: Mapping[str, Partition] | None = None) -> list[str]:
    """Return a line of text for each race and each possible deadlock, at most MOST_SHOWN.

    If there are more, a last line states their number, such as `and 3 more`.
    """
    hazards, deadlocks = find_hazards(module, groups)
    found = list(dict.fromkeys(map(str, [*hazards, *deadlocks])))
    left = len(found) - MOST_SHOWN
    return [*found[:MOST_SHOWN], *([f"and {left} more"] if left > 0 else [])]


def find_queue_entries(module: GraphModule, ranks_in: RanksIn, rank: int | None = None) -> list[QueueEntry]:
    """Return a rank's launches of collectives and messages, and its waits for them, in order.

    - `ranks_in`: maps a group's name to the ranks in this rank's instance of the group. It returns None for an unknown
      group.
    - `rank`: the rank's number. With None, messages between two single ranks are left out.
    """
    return queue_entries(GraphWalk(module).entries, ranks_in, rank)


def _hazard(walk: GraphWalk, second: LocatedCall, race: Race) -> Hazard:
    assert isinstance(race.first, LocatedCall)
    who = "the step's result" if second.node.op == "output" else f"`{second}`"
    return Hazard(race.first, second, walk.step.made[race.key], race.describe(who), _missing(race, second))


def _missing(race: Race, second: LocatedCall) -> str:
    # Without a launch, the race is between ordinary calls on two streams.
    if race.work is None and second.node.op == "output":
        return f"a wait, before the end of the step, for an event recorded after `{race.first}`"
    if race.work is None:
        return f"a wait, on the stream of `{second}`, for an event recorded after `{race.first}`"
    [wait, *_] = _waits_for(race.first, race.work)
    before = "the end of the step" if second.node.op == "output" else f"`{second}`"
    # The launch reads its source until the wait, and nothing else keeps that memory alive so long.
    if race.work.holds_source and race.is_freed:
        return f"a use of that memory at `{second}` or later"
    return f"{wait} of `{race.first}` before {before}"


def _waits_for(first: object, work: Launch) -> list[str]:
    # All operators that wait for this kind of work, such as a collective. Those in the namespace of `first` come first.
    waits = [row.name for row in ROWS.values() if row.wait is not None and row.wait.work is work.work]
    namespace = str(getattr(first.node.target, "namespace", "")) if isinstance(first, LocatedCall) else ""
    return sorted(waits, key=lambda name: not name.startswith(f"{namespace}."))

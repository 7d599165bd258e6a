"""Finds memory races in a finished graph, and possible deadlocks between ranks.

Equal bits do not show that a graph has no race. For example, a GPU call may read memory that another stream is still
writing. On an idle machine such a graph may still compute the right bits every time.

1. Follow the graph's calls in order (`walk`), with their effects on memory (`effects`). The rules for races are in
   `harness.operators.happens_before`.
2. Check the order in which ranks launch collectives (`turns`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from bitproof.harness.graph.collector import collector_paused
from bitproof.harness.graph.groups import Partition
from bitproof.harness.graph.hazards.turns import RanksIn, name_of_call, one_order, rank_turns
from bitproof.harness.graph.hazards.walk import At, GraphWalk
from bitproof.harness.operators import ROWS, Launch
from bitproof.harness.operators.crossings import Deadlock, RankTurn
from bitproof.harness.operators.happens_before import Race

MOST_TOLD = 3


@dataclass(frozen=True)
class Hazard:
    """A race: two calls use the same memory without an order between them, and at least one of them writes or frees it.

    - `first`, `second`: the two calls, in the graph's order.
    - `memory`: the call that allocated the memory.
    - `does`: a description of the race.
    - `missing`: a description of the call that would order the two, such as a wait.
    """

    first: At
    second: At
    memory: At
    does: str
    missing: str

    def __str__(self) -> str:
        calls = dict.fromkeys((self.second, self.first))
        named = ", ".join(f"`{call}` is {name_of_call(call)}" for call in calls if call.node.op != "output")
        return f"{self.does}{self.second.where}: {named}; memory of `{self.memory}`; missing: {self.missing}"


@collector_paused()
def find_hazards(
    module: GraphModule, groups: Mapping[str, Partition] | None = None
) -> tuple[list[Hazard], list[Deadlock]]:
    """Return (races, possible deadlocks) of a graph, both in the graph's order.

    `groups` maps the name of each process group to its instances, each a tuple of ranks. With None, calls are not
    compared with groups.
    """
    walk = GraphWalk(module)
    # With streams, memory freed on one stream may be reused while another still uses it. The walk learns only at its
    # end when each piece of memory is last used, so a second walk checks that.
    if walk.names_streams:
        walk = GraphWalk(module, walk.last_use)
    found = sorted(walk.races, key=lambda race: race[0])
    return [_hazard(walk, who, race) for _, who, race in found], one_order(walk.turns, groups)


def hazard_lines(module: GraphModule, groups: Mapping[str, Partition] | None = None) -> list[str]:
    """Return a line of text for each race and each possible deadlock, at most MOST_TOLD.

    If there are more, another line states how many, such as `and 3 more`.
    """
    hazards, deadlocks = find_hazards(module, groups)
    found = list(dict.fromkeys(map(str, [*hazards, *deadlocks])))
    left = len(found) - MOST_TOLD
    return [*found[:MOST_TOLD], *([f"and {left} more"] if left > 0 else [])]


def turns_of(module: GraphModule, ranks_in: RanksIn, rank: int | None = None) -> list[RankTurn]:
    """Return a rank's launches of collectives and messages, and its waits for them, in order.

    - `ranks_in`: maps a group's name to the ranks in this rank's instance of the group. It returns None for an unknown
      group.
    - `rank`: the rank's number. With None, messages between two single ranks are left out.
    """
    return rank_turns(GraphWalk(module).turns, ranks_in, rank)


def _hazard(walk: GraphWalk, second: At, race: Race) -> Hazard:
    assert isinstance(race.first, At)
    who = "the step's result" if second.node.op == "output" else f"`{second}`"
    return Hazard(race.first, second, walk.made[race.key], race.told(who), _missing(race, second))


def _missing(race: Race, second: At) -> str:
    # Without a launch, the race is between ordinary calls on two streams.
    if race.work is None and second.node.op == "output":
        return f"a wait, before the end of the step, for an event recorded after `{race.first}`"
    if race.work is None:
        return f"a wait, on the stream of `{second}`, for an event recorded after `{race.first}`"
    [wait, *_] = _waits_for(race.first, race.work)
    before = "the end of the step" if second.node.op == "output" else f"`{second}`"
    # The launch reads its source until the wait, and nothing else keeps that memory alive so long.
    if race.work.holds_source and race.is_let_go:
        return f"a use of that memory at `{second}` or later"
    return f"{wait} of `{race.first}` before {before}"


def _waits_for(first: object, work: Launch) -> list[str]:
    # All operators that wait for this kind of work, such as a collective. Those in the namespace of `first` come first.
    waits = [row.name for row in ROWS.values() if row.wait is not None and row.wait.work is work.work]
    namespace = str(getattr(first.node.target, "namespace", "")) if isinstance(first, At) else ""
    return sorted(waits, key=lambda name: not name.startswith(f"{namespace}."))

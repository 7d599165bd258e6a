"""What may go wrong in a finished graph though its bits are right where it ran: two calls that use one memory, of
which one writes it or lets go of it, and neither comes before the other; ranks that wait for each other for ever.

Where ranks meet in shared memory, or a machine has nothing else to do, such a graph may compute the right bits every
time; on a GPU it reads what a stream is still writing. So equal bits of it show nothing.

1. Follow the graph's calls in their order (`walk`), by what each does to memory (`effects`), over the rules of
   `harness.operators.happens_before`. Where a graph names streams it is followed twice: when memory is let go is known
   only once the whole graph is.
2. Look at the order in which ranks launch collectives (`turns`).

The graph may be anybody's: besides operators it may call methods, modules and functions, whose names say what they
do. What is not known reads all that it is handed, and shares memory with none of it.
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
    """`second` meets `first`, an earlier call, in the memory that `memory` made. `does` says how, `missing` what would
    put one before the other.
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
    """The pairs of calls that nothing orders, in the graph's order, and what may have ranks wait for ever.

    `groups` are the ranks of every instance of each process group, by name; without, groups are taken to be right.
    """
    walk = GraphWalk(module)
    if walk.names_streams:
        walk = GraphWalk(module, walk.last_use)
    found = sorted(walk.races, key=lambda race: race[0])
    return [_hazard(walk, who, race) for _, who, race in found], one_order(walk.turns, groups)


def hazard_lines(module: GraphModule, groups: Mapping[str, Partition] | None = None) -> list[str]:
    """A line for each hazard and for each possible deadlock; of many the first few, and how many more."""
    hazards, deadlocks = find_hazards(module, groups)
    found = list(dict.fromkeys(map(str, [*hazards, *deadlocks])))
    left = len(found) - MOST_TOLD
    return [*found[:MOST_TOLD], *([f"and {left} more"] if left > 0 else [])]


def turns_of(module: GraphModule, ranks_in: RanksIn) -> list[RankTurn]:
    """The collectives that a rank's graph launches and waits for, in order. `ranks_in` says which ranks are in the
    rank's instance of a group, None where nobody knows the group.
    """
    return rank_turns(GraphWalk(module).turns, ranks_in)


def _hazard(walk: GraphWalk, second: At, race: Race) -> Hazard:
    assert isinstance(race.first, At)
    who = "the step's result" if second.node.op == "output" else f"`{second}`"
    return Hazard(race.first, second, walk.made[race.key], race.told(who), _missing(race, second))


def _missing(race: Race, second: At) -> str:
    """What would order the two calls."""
    if race.work is None:
        return f"a wait, on the stream of `{second}`, for an event recorded after `{race.first}`"
    [wait, *_] = _waits_for(race.first, race.work)
    before = "the end of the step" if second.node.op == "output" else f"`{second}`"
    if race.work.holds_source and "nobody keeps" in race.does:
        return f"a use of that memory at `{second}` or later"
    return f"{wait} of `{race.first}` before {before}"


def _waits_for(first: object, work: Launch) -> list[str]:
    """The operators that wait for what a call launches, those of its own namespace first."""
    waits = [row.name for row in ROWS.values() if row.wait is not None and row.wait.work is work.work]
    namespace = str(getattr(first.node.target, "namespace", "")) if isinstance(first, At) else ""
    return sorted(waits, key=lambda name: not name.startswith(f"{namespace}."))

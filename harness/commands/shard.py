"""Split a selection of cases into shards, one per machine. The machines need not communicate."""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.case import Case
from bitproof.harness.errors import UsageError
from bitproof.harness.records import Shard

# Tracing a case and starting its ranks takes about as long as this many steps: 63 cases of 5 steps took 15
# minutes where 20 steps took 32 s.
_START_IN_STEPS = 7


def parse_shard(text: str, selection: Sequence[Case]) -> Shard:
    """Return the shard for a text such as `2/4`: part 2 of 4 of `selection`. Raises UsageError for other texts."""
    shard = Shard.parse(text, selection)
    if shard is None:
        raise UsageError("--shard has a value of the wrong form", expected="i/n with 1 <= i <= n", found=repr(text))
    return shard


def cases_of(shard: Shard) -> list[Case]:
    """Return the cases of a shard, in the selection's order; none if there are more shards than cases.

    Every machine computes the same shards.
    """
    # The most expensive cases first, each to the shard with the lowest total so far. Cost depends on the case alone,
    # and not on times measured by a machine.
    loads = [0] * shard.count
    mine = set()
    for case in sorted(shard.selection, key=_cost, reverse=True):
        # `index` returns the first, so all machines break ties alike.
        lightest = loads.index(min(loads))
        loads[lightest] += _cost(case)
        if lightest == shard.index - 1:
            mine.add(case.name)
    return [case for case in shard.selection if case.name in mine]


def _cost(case: Case) -> int:
    return case.parallelism.world_size * (case.steps + _START_IN_STEPS)

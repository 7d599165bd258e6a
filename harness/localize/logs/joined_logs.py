"""Order the calls of all ranks: each rank's calls in their order, and all launches of a collective before its results.

For example, a send of rank 0 comes before the call of rank 1 that reads the message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.packing import name_of

CallId = tuple[int, int]
"""A rank, and a call's index in its log."""

RECEIVES = {"recv_", "recv_any_source_"}
_Group = tuple[tuple[int, ...], str | None]
_ONE_WAY = {"send", *RECEIVES}
"""Point-to-point operators; their `peers` are the sender and the receiver."""


class JoinedLogs:
    """The logs of all ranks, with the calls of each collective matched.

    The n-th collectives that the ranks of a group launch in it belong together, and the n-th messages of two ranks with
    one tag. If the group is not stated, collectives must also have the same operator and place.
    """

    def __init__(self, logs: Sequence[Sequence[Call]]) -> None:
        self.logs = logs
        # By rank: the turn of each collective, which counts its group's earlier launches, and the indices of each
        # group's launches. `_rounds` is computed on the first use.
        self._turns: list[dict[int, int]] = []
        self._at: list[dict[_Group, list[int]]] = []
        for calls in logs:
            at: dict[_Group, list[int]] = defaultdict(list)
            turns: dict[int, int] = {}
            for index, call in enumerate(calls):
                if call.collective:
                    group = at[_group(call)]
                    turns[index] = len(group)
                    group.append(index)
            self._turns.append(turns)
            self._at.append(at)
        self._rounds: list[list[int]] | None = None

    def together(self, site: CallId) -> list[CallId]:
        """Return the calls of all ranks that belong to the same collective as `site`, in the order of the ranks.

        If `site` is no collective, returns only `site`.
        """
        rank, index = site
        call = self.logs[rank][index]
        if not call.collective:
            return [site]
        turn, found = self._turns[rank][index], []
        # Without `peers`, a rank may have launched another collective as its n-th, so the calls must be alike.
        for peer in call.peers or range(len(self.logs)):
            group = self._at[peer].get(_group(call), []) if peer < len(self._at) else []
            if turn < len(group) and (peer == rank or self._is_one(call, self.logs[peer][group[turn]])):
                found.append((peer, group[turn]))
        return found or [site]

    def when(self, site: CallId) -> tuple[int, int, int]:
        """Return a sort key, smaller for earlier calls: (number of collectives before the call, rank, index)."""
        if self._rounds is None:
            self._rounds = self._count_rounds()
        rank, index = site
        return self._rounds[rank][index], rank, index

    def before(self, sites: Iterable[CallId], producers: Callable[[CallId], Iterable[int]]) -> set[CallId]:
        """Return `sites`, and every call from which a path of values leads to one of them.

        `producers` returns the indices of the calls that produced a call's inputs.
        """
        pending, seen = list(sites), set[CallId]()
        while pending:
            if (site := pending.pop()) in seen:
                continue
            for rank, index in self.together(site):
                seen.add((rank, index))
                pending += [(rank, producer) for producer in producers((rank, index))]
        return seen

    def first_of(self, sites: Collection[CallId]) -> CallId:
        """Return a call of `sites` to which no path of values leads from another call of `sites`."""
        # Go from call to call against the paths. Logs that contradict each other may have cycles, so no call is passed
        # twice.
        first, passed = min(sites, key=self.when), set[CallId]()
        while True:
            passed.update(self.together(first))
            earlier = self.before([first], self._producers).intersection(sites) - passed
            if not earlier:
                return first
            first = min(earlier, key=self.when)

    def _producers(self, site: CallId) -> list[int]:
        return [index for index in self.logs[site[0]][site[1]].producers if index is not None]

    def _is_one(self, call: Call, other: Call) -> bool:
        # With a known group, the n-th launch is the same collective on all of its ranks, even if they call different
        # operators, such as a send and its receive.
        if call.peers:
            return True
        return (call.operator, call.place) == (other.operator, other.place)

    def _count_rounds(self) -> list[list[int]]:
        """Return, for each call of each rank, the number of collectives in the longest sequence of them before it.

        As in a Lamport clock, this number never decreases within a rank. A call that reads the result of a collective
        has a larger number than that collective.
        """
        rounds: list[list[int]] = [[] for _ in self.logs]
        stuck = False
        # Follow each log up to a call that reads from a collective which another rank has not reached, then go to the
        # next rank. If no rank proceeds, the logs contradict each other: ignore unknown numbers once, to cut the cycle.
        while any(len(done) < len(calls) for done, calls in zip(rounds, self.logs, strict=True)):
            moved = False
            for rank, calls in enumerate(self.logs):
                while len(rounds[rank]) < len(calls):
                    index = len(rounds[rank])
                    launches = [
                        site
                        for producer in calls[index].producers
                        if producer is not None and calls[producer].collective
                        for site in self.together((rank, producer))
                    ]
                    known = [rounds[peer][i] for peer, i in launches if i < len(rounds[peer])]
                    if len(known) < len(launches) and not stuck:
                        break
                    # At least as many as at the call before, and more than at each collective whose result it reads.
                    before = rounds[rank][-1] if index else 0
                    rounds[rank].append(max([before, *(1 + number for number in known)]))
                    moved, stuck = True, False
            stuck = not moved
        return rounds


def _group(call: Call) -> _Group:
    """Return the key of a collective's group: its ranks, and the tag of a message; None if it is no message."""
    if name_of(call) not in _ONE_WAY:
        return tuple(sorted(call.peers)), None
    # A send from 0 to 1 and a send from 1 to 0 are different groups, so the order of a message's peers is kept. Tags
    # matter, too: in a V of pipeline stages, a rank reads activations and gradients in another order than was sent.
    return call.peers, call.tag

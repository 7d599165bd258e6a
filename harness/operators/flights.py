"""What is on its way while calls run one after the other, and which of them get in its way. Loads no torch.

Who follows a graph tells `Flights` of every call, in order: the memory that it reads and writes, what it launches, what
it waits for. Memory is known by keys, whatever the caller takes for one: a piece of memory has one key, and a value may
lie in several. What launches and what waits is data (`harness.operators.rows`).

A call races with a flight if, before a wait for it,

1. it reads or writes memory that the flight fills,
2. it writes memory that the flight reads,
3. nobody uses memory any more that the flight reads and its caller must keep: that may be freed, and used again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from bitproof.harness.operators.row import Launch, Wait

Key = Hashable
NEVER_FREED = float("inf")


@dataclass(frozen=True)
class Race:
    """A call that gets in the way of `launch`. `does` says how, with a gap for who does it."""

    launch: str
    does: str

    def told(self, who: str) -> str:
        """The race as a sentence; `who` is the call, or what stands for it."""
        return self.does.format(who=who)


@dataclass
class _Flight:
    launched: float
    name: str
    rule: Launch
    fills: frozenset[Key]
    takes: frozenset[Key]


class Flights:
    """What is on its way. `last_use` says at which time each piece of memory is used last: NEVER_FREED where its owner
    keeps it, as for a graph's inputs and outputs. Times count calls.
    """

    def __init__(self, last_use: Mapping[Key, float]) -> None:
        self._last_use = last_use
        self._flights: list[_Flight] = []

    def launch(
        self, name: str, time: float, rule: Launch, results: Iterable[Iterable[Key]], takes: Iterable[Key]
    ) -> None:
        """A call has launched something that fills its results, each in memory of its own, and reads `takes`.

        One wait ends the reading for all results; each result needs a wait of its own before it may be read.
        """
        taken = frozenset(takes)
        self._flights += [_Flight(time, name, rule, frozenset(result), taken) for result in results]

    def races(self, reads: Iterable[Key], writes: Iterable[Key]) -> list[Race]:
        """The races of a call that reads and writes these pieces of memory now, one for each launch and way."""
        if not self._flights:
            return []
        read, written = frozenset(reads), frozenset(writes)
        found = []
        for flight in self._flights:
            late = "before anything waits for it"
            if flight.fills & written:
                found.append(Race(flight.name, f"{{who}} writes what `{flight.name}` brings, {late}"))
            elif flight.fills & read:
                found.append(Race(flight.name, f"{{who}} reads what `{flight.name}` brings, {late}"))
            if flight.takes & written - flight.fills:
                found.append(Race(flight.name, f"{{who}} writes what `{flight.name}` {flight.rule.takes}, {late}"))
        return list(dict.fromkeys(found))

    def wait(self, rule: Wait, awaited: Iterable[Key], time: float) -> list[Race]:
        """End what fills the memory that is awaited, if it is work of the wait's kind. Gives what was freed too soon.

        A wait for anything else, or of another kind, ends nothing.
        """
        keys = frozenset(awaited)
        landed = [flight for flight in self._flights if flight.rule.work is rule.work and flight.fills & keys]
        self._flights = [flight for flight in self._flights if flight not in landed]
        found = []
        for flight in landed:
            if flight.rule.holds_source and any(self._last_use.get(key, time) < time for key in flight.takes):
                does = f"{{who}} waits for `{flight.name}`, which {flight.rule.takes} what nobody keeps until then"
                found.append(Race(flight.name, does))
            for other in self._flights:
                if other.launched == flight.launched:
                    other.takes = frozenset()
        return found

    def is_filling(self, keys: Iterable[Key]) -> bool:
        """Whether something that nobody has waited for fills any of these pieces of memory."""
        wanted = frozenset(keys)
        return any(flight.fills & wanted for flight in self._flights)

    def touching(self, keys: Iterable[Key]) -> list[float]:
        """When each was launched that is on its way and fills or reads any of these pieces of memory."""
        wanted = frozenset(keys)
        return [flight.launched for flight in self._flights if (flight.fills | flight.takes) & wanted]

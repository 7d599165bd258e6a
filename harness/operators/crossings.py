"""Turns that ranks take at collectives, as data, and what ranks wait for once none of them can go on. Loads no torch.

A launch begins once all members of its group have launched the same; one group's launches run in order; a wait holds
its rank up until then. On NCCL a wait holds up a stream and not the host, but all that the stream is given later is
behind it, launches too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadlock:
    """A possible deadlock between ranks: its reason and its call."""

    call: str
    why: str

    def __str__(self) -> str:
        return f"ranks may wait for each other for ever: {self.why}"


@dataclass(frozen=True)
class RankTurn:
    """A turn of a rank as data: the operator, its group's name and ranks, and the call's name. `waits_for` is the
    index of the turn that launched what this one waits for, `takes` the dtype and sizes that a launch must share with
    those that it meets; "" if unknown."""

    operator: str
    group: str
    ranks: tuple[int, ...]
    name: str
    waits_for: int | None = None
    takes: str = ""


def crossed(turns_of: Mapping[int, Sequence[RankTurn]]) -> list[Deadlock]:
    """What ranks still wait for once none of them can go on."""
    place = dict.fromkeys(turns_of, 0)
    launched: dict[int, dict[str, list[RankTurn]]] = {rank: {} for rank in turns_of}
    nth: dict[int, dict[int, int]] = {rank: {} for rank in turns_of}
    moved = True
    while moved:
        moved = False
        for rank, turns in turns_of.items():
            while place[rank] < len(turns):
                turn = turns[place[rank]]
                if turn.waits_for is None:
                    nth[rank][place[rank]] = len(launched[rank].setdefault(turn.group, []))
                    launched[rank][turn.group].append(turn)
                elif not _is_met(turn, nth[rank][turn.waits_for], launched):
                    break
                place[rank] += 1
                moved = True
    left = {rank: turns[place[rank]] for rank, turns in turns_of.items() if place[rank] < len(turns)}
    return [*(_stuck(rank, turn, launched) for rank, turn in left.items()), *_unlike(launched)]


def _is_met(turn: RankTurn, index: int, launched: Mapping[int, Mapping[str, Sequence[RankTurn]]]) -> bool:
    return all(len(launched.get(member, {}).get(turn.group, ())) > index for member in turn.ranks if member in launched)


def _stuck(rank: int, turn: RankTurn, launched: Mapping[int, Mapping[str, Sequence[RankTurn]]]) -> Deadlock:
    counts = {member: len(launched[member].get(turn.group, ())) for member in turn.ranks if member in launched}
    behind = min(counts, key=lambda member: counts[member])
    why = f"rank {rank} waits in {turn.name} for rank {behind}, which has launched {counts[behind]} in group"
    return Deadlock(turn.name, f"{why} {turn.group} and not the one that it waits for")


def _unlike(launched: Mapping[int, Mapping[str, Sequence[RankTurn]]]) -> list[Deadlock]:
    """Launches that meet although they are not the same call, and such as not all members make.

    If two ranks launch calls of the same names in different orders, one call meets another one of the other rank.
    """
    found = []
    for rank, by_group in launched.items():
        for group, turns in by_group.items():
            for other in turns[0].ranks:
                if other <= rank or other not in launched:
                    continue
                theirs = launched[other].get(group, ())
                is_swapped = sorted(x.name for x in turns) == sorted(x.name for x in theirs)
                for mine, their in zip(turns, theirs, strict=False):
                    if not _meet(mine, their) or (is_swapped and mine.name != their.name):
                        why = f"rank {rank} launches {_told(mine)} where rank {other} launches {_told(their)}"
                        found.append(Deadlock(mine.name, f"{why}, in group {group}"))
                        break
                else:
                    if len(turns) != len(theirs):
                        why = f"rank {rank} launches {len(turns)} collectives of group {group}, rank {other}"
                        found.append(Deadlock(turns[0].name, f"{why} {len(theirs)}"))
    return found


def _meet(mine: RankTurn, their: RankTurn) -> bool:
    return mine.operator == their.operator and (not mine.takes or not their.takes or mine.takes == their.takes)


def _told(turn: RankTurn) -> str:
    return f"{turn.name}, of {turn.takes}" if turn.takes else turn.name

"""Draw the cause of a difference on the page: ranks as lanes around the blamed call, and a map of modules by
direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitproof.harness.errors import cut
from bitproof.harness.records import BlamedCall, ModuleCalls
from bitproof.harness.report.html.heatmaps import Cell

MAX_LANES = 16
MAX_MODULES = 40
DIRECTIONS = ("forward", "backward", "update")

_STEP, _LANE, _LEFT, _TOP, _LABEL = 96, 46, 96, 30, 17


@dataclass(frozen=True, kw_only=True)
class RankLanes:
    """A picture of the calls from the blamed call to the differing tensor: a lane per rank, a line through the calls.

    `lanes` has each lane's name and y coordinate in pixels. `calls` has x, y, operator and module of each call, the
    blamed call first; `points` is the line through these calls. `alike` has the positions of the blamed call on other
    ranks. `left_out` is the number of ranks without a lane.
    """

    width: int
    height: int
    lanes: list[tuple[str, int]]
    calls: list[tuple[int, int, str, str]]
    points: str
    alike: list[tuple[int, int]]
    left_out: int


@dataclass(frozen=True, kw_only=True)
class ModuleMap:
    """A row per module with a cell per direction, which shows how many of the module's calls differ. `left_out` is the
    number of modules without a row."""

    directions: list[str]
    rows: list[tuple[str, list[Cell]]]
    left_out: int


def lanes_of(call: BlamedCall | None, num_ranks: int) -> RankLanes | None:
    """The calls from the blamed call to the differing tensor as a line through the lanes of their ranks; None if
    unknown."""
    chain = (call.chain if call else None) or []
    if call is None or not chain:
        return None
    alike = [int(rank) for rank in (call.ranks or "").split(", ") if rank.isdecimal()]
    # The chain's ranks come first, so that they have lanes even if there are too many ranks.
    wanted = [*dict.fromkeys([*(link.rank for link in chain), *alike, *range(num_ranks)])]
    shown = sorted(wanted[:MAX_LANES])
    heights = {rank: _TOP + _LANE * number for number, rank in enumerate(shown)}
    places = [(_LEFT + _STEP * number, heights[link.rank]) for number, link in enumerate(chain)]
    return RankLanes(
        width=_LEFT + _STEP * len(chain) - _STEP // 2,
        height=_TOP + _LANE * len(shown) - _LABEL,
        lanes=[(f"rank {rank}", height) for rank, height in heights.items()],
        calls=[
            (*place, cut(link.operator, 16), _end_of(link.module or ""))
            for place, link in zip(places, chain, strict=True)
        ],
        points=" ".join(f"{x},{y}" for x, y in places),
        alike=[(_LEFT, heights[rank]) for rank in alike if rank in heights and rank != chain[0].rank],
        left_out=len(wanted) - len(shown),
    )


def _end_of(module: str) -> str:
    """A module's last two names: `blocks.1` is clearer than `1`."""
    return cut(".".join(module.split(".")[-2:]), 16)


def module_map(call: BlamedCall | None) -> ModuleMap | None:
    """The modules of all calls, darker if a module's first difference is earlier; None if they are unknown."""
    found = (call.modules if call else None) or []
    if not found:
        return None
    # If there are too many modules, those that agree are left out first.
    names = dict.fromkeys(each.module for each in found)
    differing = {each.module for each in sorted(found, key=_turn) if each.differing}
    shown = [name for name in names if name in differing][:MAX_MODULES]
    shown += [name for name in names if name not in differing][: MAX_MODULES - len(shown)]
    directions = [name for name in DIRECTIONS if any(each.direction == name for each in found)]
    at = {(each.module, each.direction): each for each in found}
    last = max((each.turn or 0 for each in found), default=0)
    return ModuleMap(
        directions=directions,
        rows=[
            (_told(name), [_cell(at.get((name, direction)), last) for direction in directions])
            for name in names
            if name in shown
        ],
        left_out=len(names) - len(shown),
    )


def _turn(calls: ModuleCalls) -> int:
    return calls.turn or 0


def _told(module: str | None) -> str:
    return "no module" if module is None else module or "the step itself"


def _cell(calls: ModuleCalls | None, last: int) -> Cell:
    if calls is None:
        return "", "", ""
    if not calls.turn:
        return "agrees", "0", f"{calls.calls} calls"
    # From 4, the darkest, for the first module that differs, to 1 for the last.
    shade = 4 - (4 * (calls.turn - 1)) // max(1, last)
    return f"{calls.differing} of {calls.calls}", str(max(1, shade)), f"differs as number {calls.turn}"

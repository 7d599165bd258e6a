"""Draw a picture for report.html of the path from the blamed call to the differing tensor.

Each rank has a row, and a line leads through the calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitproof.harness.errors import cut
from bitproof.harness.records import BlamedCall

MAX_LANES = 16

# In pixels: from call to call, from lane to lane, the margins on the left and above, and a label's height. The widest
# label has 19 characters of 6 pixels.
_STEP, _LANE, _LEFT, _TOP, _LABEL = 124, 46, 96, 30, 17


@dataclass(frozen=True, kw_only=True)
class RankLanes:
    """A picture of the calls from the blamed call to the differing tensor, with a row for each rank.

    - `lanes`: each row's name and y coordinate in pixels.
    - `calls`: x, y, operator and module of each call, the blamed call first.
    - `points`: the line through these calls, as the points of an SVG polyline.
    - `alike`: x and y of the same blamed call on other ranks.
    - `left_out`: the number of ranks without a row.
    """

    width: int
    height: int
    lanes: list[tuple[str, int]]
    calls: list[tuple[int, int, str, str]]
    points: str
    alike: list[tuple[int, int]]
    left_out: int


def lanes_of(call: BlamedCall | None, num_ranks: int) -> RankLanes | None:
    """Return the picture of the calls from the blamed call to the differing tensor; None if these calls are unknown."""
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
        width=_LEFT + _STEP * (len(chain) - 1) + _STEP // 2,
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
    # Two names, as the `1` of `model.blocks.1` alone would be unclear.
    return cut(".".join(module.split(".")[-2:]), 16)

"""Finds the self-contained file with the fewest calls that still shows a difference."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from bitproof.harness.powers.shrink.standalone.reading import Scene, content_of
from bitproof.harness.powers.shrink.standalone.rendering import render

LARGEST_CONTENT = 1 << 17
"""Most characters of a file that a reader may be expected to look through. Shorter files are preferred."""


def shortest(scene: Scene, differing: Sequence[str], is_short: bool) -> tuple[str, dict[str, int]]:
    """Return a pair: the text of the file with the fewest calls, and the number of calls of each graph.

    The file computes one of the outputs `differing`. With `is_short`, values that both graphs have become inputs of the
    file.
    """
    values = {name: _values(scene, name) for name in scene.sides}
    common = set(values["reference"].values()) & set(values["candidate"].values()) if is_short else set()

    def is_known(side: str, node: Node) -> bool:
        # Known if the other graph has a value with the same bits on every rank, at whatever place.
        key = values[side].get(node.name)
        return key in common and content_of(scene, side, node) is not None

    files = [render(scene, [output], is_known, False) for output in differing]
    fitting = [file for file in files if len(file[0]) <= LARGEST_CONTENT] or files
    return min(fitting, key=lambda file: (sum(file[1].values()), len(file[0])))


def _values(scene: Scene, side: str) -> dict[str, tuple[str, ...]]:
    seen = [rank["values"][side] for rank in scene.seen]
    return {name: tuple(rank[name][0] for rank in seen) for name in seen[0] if all(name in rank for rank in seen)}

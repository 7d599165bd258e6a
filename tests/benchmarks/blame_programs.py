"""Blame over random programs with one wrong call: `python -m tests.benchmarks.blame_programs [COUNT] [FIRST SEED]`.

Where values tell which call is wrong, that one must be the answer; and nobody may be blamed from whom no path of values
leads to the record that is shown. Exits with 1 where either fails, with the seeds. "untold" are those where values do
not tell and the answer says nothing of the planted call.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from tests.figures import figure
from tests.harness.localize.programs import answer, generate

BATCH = 500


def judge(first: int, count: int) -> dict[str, list[int]]:
    """Seeds by what came of them."""
    found: dict[str, list[int]] = defaultdict(list)
    for seed in range(first, first + count):
        scene = generate(seed)
        if scene is None:
            found["nothing differs"].append(seed)
            continue
        _, problem = answer(scene)
        found[f"{scene.way}: {problem or 'named'}"].append(seed)
    return found


def main(count: int = 100_000, first: int = 0) -> int:
    """Judge the programs of `count` seeds, and tell."""
    began, totals, seeds = time.monotonic(), Counter[str](), defaultdict[str, list[int]](list)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for found in pool.map(judge, range(first, first + count, BATCH), repeat(BATCH)):
            for what, which in found.items():
                totals[what] += len(which)
                seeds[what] += which[: 20 - len(seeds[what])]
    for what, number in sorted(totals.items()):
        print(f"{number:8} {what}" + (f": seeds {seeds[what][:8]}" if "named" not in what else ""))
    seconds = time.monotonic() - began
    print(f"{count} programs in {seconds:.0f} s, {60 * count / seconds:.0f} a minute")
    is_wrong = ("another call", "upstream", "finds nothing")
    wrong = sum(number for what, number in totals.items() if what.endswith(is_wrong))
    judged = totals.total() - totals["nothing differs"]
    return figure("fuzz.programs", 1 - wrong / judged if judged else math.nan)


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))

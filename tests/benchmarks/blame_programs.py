"""Causes of random programs with one wrong call, verified: `python -m tests.benchmarks.blame_programs [COUNT] [FIRST]`.

The programs are those of the seeds from FIRST on, each run and verified in one process (see `verified_programs`). A
cause is right if it has the module, direction, operator and rank of the planted call. "unclear" are programs in which
values do not tell which call is wrong, such as one that reads a right value and gives what the reference has elsewhere.
Exits with 1 if a verified cause of any other program is wrong, with the seeds.
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
from tests.harness.localize.programs import generate
from tests.harness.localize.verified_programs import verified

BATCH = 250


def judge(first: int, count: int) -> dict[str, list[int]]:
    """Seeds by what came of them."""
    found: dict[str, list[int]] = defaultdict(list)
    for seed in range(first, first + count):
        scene = generate(seed)
        if scene is None:
            found["nothing differs"].append(seed)
            continue
        reported = verified(scene)
        status = reported.verification.status if reported.verification is not None else "no cause"
        for name in ("place", "operator", "rank", "is_right"):
            if getattr(reported, name):
                found[f"right {name}"].append(seed)
        wrong = "" if reported.is_right else ", but wrong" if scene.is_determined() else ", unclear"
        found[f"{status}{wrong}"].append(seed)
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
        print(f"{number:8} {what}" + (f": seeds {seeds[what][:8]}" if what.endswith(("wrong", "unclear")) else ""))
    seconds = time.monotonic() - began
    print(f"{count} programs in {seconds:.0f} s, {60 * count / seconds:.0f} a minute")
    judged = count - totals["nothing differs"]
    return figure("fuzz.programs", 1 - totals["verified, but wrong"] / judged if judged else math.nan)


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))

"""Causes of random programs with one wrong call, verified: `python -m tests.benchmarks.blame_programs [COUNT] [FIRST]`.

The programs are those of the seeds from FIRST on, each run and verified in one process (see `verified_programs`). A
cause is right if it has the module, direction, operator and rank of the planted call. "unclear" are programs in which
values do not tell which call is wrong, such as one that reads a right value and gives what the reference has elsewhere.
The shares are of all programs that differ, and of those that are not unclear. Exits with 1 if a verified cause of any
other program is wrong, with the seeds.
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


SHARES = "verified", "place", "operator", "rank", "right"
"""What a share counts: verified causes, those with the right place (module and direction), operator, rank, and all."""


def judge(first: int, count: int) -> tuple[dict[str, list[int]], Counter[tuple[str, str]]]:
    """Seeds by what came of them, and how many programs have what a share counts: of all, and of those not unclear."""
    found, shares = defaultdict[str, list[int]](list), Counter[tuple[str, str]]()
    for seed in range(first, first + count):
        scene = generate(seed)
        if scene is None:
            found["nothing differs"].append(seed)
            continue
        reported, is_clear = verified(scene), scene.is_determined()
        status = reported.verification.status if reported.verification is not None else "no cause"
        has = status == "verified", reported.place, reported.operator, reported.rank, reported.is_right
        for among in ("all", "clear") if is_clear else ("all",):
            shares.update((among, name) for name, is_so in zip(SHARES, has, strict=True) if is_so)
            shares[among, "programs"] += 1
        wrong = "" if reported.is_right else ", but wrong" if is_clear else ", unclear"
        found[f"{status}{wrong}"].append(seed)
    return found, shares


def main(count: int = 100_000, first: int = 0) -> int:
    """Judge the programs of `count` seeds, and tell."""
    began, totals, seeds = time.monotonic(), Counter[str](), defaultdict[str, list[int]](list)
    shares = Counter[tuple[str, str]]()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for found, counted in pool.map(judge, range(first, first + count, BATCH), repeat(BATCH)):
            shares += counted
            for what, which in found.items():
                totals[what] += len(which)
                seeds[what] += which[: 20 - len(seeds[what])]
    for what, number in sorted(totals.items()):
        print(f"{number:8} {what}" + (f": seeds {seeds[what][:8]}" if what.endswith(("wrong", "unclear")) else ""))
    for among in ("all", "clear"):
        judged = shares[among, "programs"]
        text = ", ".join(f"{name} {shares[among, name] / judged if judged else math.nan:.2%}" for name in SHARES)
        print(f"of {judged} programs that differ{'' if among == 'all' else ' and are not unclear'}: {text}")
    seconds = time.monotonic() - began
    print(f"{count} programs in {seconds:.0f} s, {60 * count / seconds:.0f} a minute")
    judged = shares["all", "programs"]
    return figure("fuzz.programs", 1 - totals["verified, but wrong"] / judged if judged else math.nan)


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))

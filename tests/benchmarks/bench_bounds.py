"""What bounds of two layouts make of correct layouts and of small defects, in one process and so in a minute or two.

    python tests/benchmarks/bench_bounds.py [defects | held_out] [NUMBER] [SALT]

The reference takes a batch as one, the candidate in two or four micro-batches: that regroups sums as ranks do. Each
defect of `small_defects.py` and NUMBER correct pairs are drawn with sizes and a seed. It counts, for the bound of three
samples alone and for the rule, CLOSE, CLOSE with a remark, and DIFFERENT. `bench_layouts.py` does the same on ranks.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from bitproof.builtin_cases.examples import mesh_loop
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare import regrouping
from bitproof.harness.compare.layout_verdict import USED_BY_ONE
from bitproof.harness.disturb.regroup import Regroup, regrouped
from bitproof.harness.records.layout_bounds import FEWEST_SAMPLES, MOST_SAMPLES
from tests.benchmarks.small_defects import APPLY, DEFECTS, HELD_OUT

Run = dict[tuple[int, str, str], Tensor]
RANK_0: Any = SimpleNamespace(rank=0)


def taken(case: Case, micro: int = 1, defect: str | None = None, regroup: Regroup | None = None) -> Run:
    """Every tensor of two steps."""
    torch.manual_seed(case.seed)
    loop = mesh_loop.ddp(case, RANK_0, micro=micro)
    if defect:
        what, *numbers = defect.split()
        APPLY[what](loop, *numbers)
    with regrouped(regroup, 0):
        return {
            (step, kind, name): x.detach().clone()
            for step in range(2)
            for kind, name, x in loop.step(step)
            if kind != "buffer"
        }


def held(reference: Run, candidate: Run, samples: list[Run]) -> tuple[int, int, float]:
    """How many tensors are beyond their bound, how many are near it, and the largest used share."""
    level = (1 - regrouping.CONFIDENCE) / 2 / len(reference)
    factor = regrouping.student_quantile(level, len(samples))
    beyond, near, used = 0, 0, 0.0
    for key, own in reference.items():
        error, *spread = (math.sqrt(regrouping.squared_distance(own, run[key])) for run in (candidate, *samples))
        norm = float(own.double().norm())
        least = regrouping.FEWEST_UNITS * torch.finfo(own.dtype).eps * norm
        found = regrouping.Distances(0, error, tuple(spread), norm, least)
        share = found.relative(error) / found.bound(factor) if error else 0.0
        beyond, used = beyond + (share > 1), max(used, share)
        near += bool(error) and found.is_near and share <= 1
    return beyond, near, used


def judged(case: Case, micro: int, defect: str | None) -> tuple[str, str, float]:
    """The verdict of three samples alone, that of the rule, and the largest used share."""
    reference, candidate = taken(case), taken(case, micro, defect)
    samples = [taken(case, regroup=Regroup(seed=seed, parts=2)) for seed in range(1, FEWEST_SAMPLES + 1)]
    beyond, near, used = held(reference, candidate, samples)
    alone = "DIFFERENT" if beyond else "CLOSE"
    if beyond or not near:
        return alone, alone, used
    more = range(FEWEST_SAMPLES + 1, MOST_SAMPLES + 1)
    samples += [taken(case, regroup=Regroup(seed=seed, parts=2)) for seed in more]
    beyond, near, used = held(reference, candidate, samples)
    is_told = near > 1 or (near == 1 and used >= USED_BY_ONE)
    return alone, "DIFFERENT" if beyond else "CLOSE with a remark" if is_told else "CLOSE", used


def main(which: str = "held_out", number: str = "60", salt: str = "0") -> int:
    """Run them; exits with 1 if a correct pair is DIFFERENT."""
    torch.set_num_threads(1)
    defects: list[str | None] = [*(DEFECTS if which == "defects" else HELD_OUT)]
    counts: Counter[tuple[str, str, str]] = Counter()
    for at, defect in enumerate(defects + [None] * int(number)):
        draw = random.Random(f"{which} {salt} {at}")
        micro = draw.choice((2, 4))
        sizes = {"dim": 8 * draw.randint(1, 6), "rows": 8 * draw.randint(1, 2), "length": 4 * draw.randint(2, 8)}
        case = Case(
            name="drawn",
            family="drawn",
            reference="a:b",
            candidate="a:c",
            steps=2,
            seed=draw.randrange(1 << 31),
            parallelism=Parallelism(world_size=1, ep=1),
            options=sizes,
        )
        alone, found, used = judged(case, micro, defect)
        print(f"{defect}, {micro} micro-batches, {sizes}: {alone}, {found}, {used:.2f} of a bound", flush=True)
        whose = "defects" if defect else "correct"
        counts[whose, "three samples", alone] += 1
        counts[whose, "the rule", found] += 1
    print(*(f"{' by '.join(key[:2])}: {key[2]} {count}" for key, count in sorted(counts.items())), sep="\n")
    return int(counts["correct", "the rule", "DIFFERENT"] > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

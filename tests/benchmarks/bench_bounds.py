"""What bounds of two layouts make of correct layouts and of small defects, in one process and so in a minute or two.

    python tests/benchmarks/bench_bounds.py [defects | held_out | fresh] [NUMBER] [SALT]

The reference takes a batch as one, the candidate in two or four micro-batches: that regroups sums as ranks do. Each
defect of `small_defects.py` and NUMBER correct pairs are drawn with sizes and a seed. It counts, for bounds alone and
with the second test, in float64, CLOSE, CLOSE with a remark, and DIFFERENT. `bench_layouts.py` does the same on ranks.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from bitproof.builtin_cases.examples import mesh_loop
from bitproof.harness.capture.recorder import Recorder
from bitproof.harness.capture.recording_files import join_parts, write_part
from bitproof.harness.capture.selection import ALL
from bitproof.harness.capture.values import write_values
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.powers.two_layouts.layout_verdict import decide_by_layout, remarks_on
from bitproof.harness.powers.two_layouts.regrouping import measure_in_float64, measure_layouts
from bitproof.harness.powers.two_layouts.reordered_sums import regrouped
from bitproof.harness.powers.two_layouts.widen import Widened, computed_in_float64
from bitproof.harness.records import Manifest, Verdict
from bitproof.harness.records.layout import Regroup
from bitproof.harness.records.layout_bounds import FEWEST_SAMPLES
from tests.benchmarks.small_defects import APPLY, DEFECTS, FRESH, HELD_OUT

Run = dict[tuple[int, str, str], Tensor]
RANK_0: Any = SimpleNamespace(rank=0)


def taken(
    case: Case, micro: int = 1, defect: str | None = None, regroup: Regroup | None = None, wide: bool = False
) -> Run:
    """Every tensor of two steps."""
    with computed_in_float64(Widened() if wide else None):
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


def written(folder: Path, case: Case, run: Run, micro: int) -> Path:
    """A run as a recording with values."""
    recorder = Recorder(0, patterns=ALL)
    for (recorder.step, kind, name), x in run.items():
        recorder.observe(kind, name, x)  # type: ignore[arg-type]
    part, values = folder.with_suffix(".part"), folder.with_suffix(".values")
    write_part(part, recorder.rows.items())
    write_values(values, recorder.values)
    met = {"phase": "forward", "what": "backward", "ranks": "", "operator": "", "backwards": micro}
    about = {"case": case.to_dict(), "system": "a:b", "world_size": 1, "steps": case.steps, "device": "cpu"}
    manifest = Manifest.of(about | {"machine": {"torch": "", "cpu": ""}, "values": [*ALL], "meetings": [met]})
    join_parts(folder, manifest, [part], [values])
    return folder


def judged(case: Case, micro: int, defect: str | None) -> tuple[str, str, float]:
    """The verdict of bounds alone, that with the second test, and the largest used share of a bound."""
    orders = [Regroup(seed=seed, parts=2) for seed in range(1, FEWEST_SAMPLES + 1)]
    with tempfile.TemporaryDirectory() as folder:
        found = [
            [
                written(Path(folder) / f"{wide}{number}", case, taken(case, parts, what, order, wide), parts)
                for number, (parts, what, order) in enumerate(
                    [
                        (1, None, None),
                        (micro, defect, None),
                        *((1, None, order) for order in orders[: 1 if wide else None]),
                    ]
                )
            ]
            for wide in (False, True)
        ]
        plain, wide = ((each[0], each[1], each[2:]) for each in found)
        layouts = measure_layouts(*plain)
        used = max((row.used or 0.0 for row in layouts.rows), default=0.0)
        if not layouts.is_within:
            return "DIFFERENT", "DIFFERENT", used
        layouts = replace(layouts, in_float64=measure_in_float64(wide, plain))
    verdict, _ = decide_by_layout(layouts)
    has_remark = verdict == Verdict.CLOSE and remarks_on(layouts)
    return "CLOSE", f"{verdict} with a remark" if has_remark else verdict, used


def main(which: str = "held_out", number: str = "60", salt: str = "0") -> int:
    """Run them; exits with 1 if a correct pair is DIFFERENT."""
    torch.set_num_threads(1)
    defects: list[str | None] = [*{"defects": DEFECTS, "held_out": HELD_OUT, "fresh": FRESH}[which]]
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
        counts[whose, "bounds alone", alone] += 1
        counts[whose, "with the second test", found] += 1
    print(*(f"{' by '.join(key[:2])}: {key[2]} {count}" for key, count in sorted(counts.items())), sep="\n")
    return int(counts["correct", "with the second test", "DIFFERENT"] > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

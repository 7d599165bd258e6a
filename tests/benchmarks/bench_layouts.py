"""What must agree when the layout changes: a table of the families' cases, and runs on drawn ones without a defect.

    python tests/benchmarks/bench_layouts.py table [PAGE [EXPRESSION]]
    python tests/benchmarks/bench_layouts.py drawn [NUMBER] [FIRST_SEED]
    python tests/benchmarks/bench_layouts.py defects | held_out | fresh

`table` runs the families' cases. It says how many tensors had to agree in every bit, how many may be regrouped, and the
largest share of a bound that one used; given a page, it writes that between the page's marks. `drawn` draws a pair of
systems, a number of ranks, sizes and a seed for each run, by its own number. Whatever is not EQUAL, or where sums are
regrouped CLOSE, is an alarm: with one it exits with 1. `defects` runs each defect of `small_defects.py` in a pair of
layouts, with sizes and a seed, that its number draws, and as many pairs without one: it counts CLOSE, CLOSE with a
remark, and DIFFERENT. `held_out` does so with defects that were written when a first rule had been chosen, `fresh` with
those that were written when the second test had.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tabulate import tabulate

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from tests.figures import figure

FAMILIES = ("two_layouts", "resume", "accumulation", "pipelines", "context_parallel", "optimizers")
EXPRESSION = f"({' or '.join(FAMILIES)}) and not pipeline_ and not early_"
"""Their cases but those that lie alike: `pipeline_*`, and one of another family."""
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"
AT_ONCE = 10
FIRST_FRESH = 7000

MESH, RING, STAGES, STEP = (
    f"bitproof.builtin_cases.examples.{module}"
    for module in ("mesh_loop", "ring_attention", "pipelined", "optimizer_loop")
)
PAIRS: tuple[tuple[str, str, str, str, tuple[tuple[int, int], ...], dict[str, Any]], ...] = (
    (MESH, "ddp", "fsdp", "EQUAL", ((2, 2),), {}),
    (MESH, "ddp", "fsdp", "CLOSE", ((1, 2), (1, 4), (2, 4), (4, 4)), {}),
    (MESH, "fsdp", "hsdp", "CLOSE", ((4, 4), (2, 4)), {}),
    (MESH, "fsdp", "fsdp_tp", "CLOSE", ((1, 2), (2, 4), (4, 4)), {"tp": 2}),
    (MESH, "ep", "ep", "CLOSE", ((2, 2), (2, 4), (4, 4)), {"ep": 2}),
    (MESH, "ddp", "halves", "CLOSE", ((1, 1), (2, 2), (1, 4)), {}),
    (MESH, "uneven", "uneven_halves", "CLOSE", ((1, 1), (2, 2), (1, 4)), {}),
    (MESH, "fsdp", "fsdp", "EQUAL", ((2, 2), (4, 4)), {"resume_at": 1}),
    (MESH, "ddp", "ddp", "EQUAL", ((2, 2),), {"resume_at": 1}),
    (STAGES, "gpipe", "one_f_one_b", "EQUAL", ((2, 2), (4, 4)), {}),
    (STAGES, "one_f_one_b", "interleaved", "EQUAL", ((2, 2), (4, 4), (2, 4)), {}),
    (STAGES, "unstaged", "zero_bubble", "EQUAL", ((1, 2), (1, 4)), {}),
    (STAGES, "whole", "gpipe", "CLOSE", ((1, 2), (1, 4)), {}),
    (RING, "whole", "ring", "CLOSE", ((1, 2), (1, 4)), {}),
    (RING, "ring", "ring", "CLOSE", ((2, 4),), {}),
    (RING, "gathered", "ring", "EQUAL", ((2, 2), (4, 4)), {}),
    (STEP, "adamw", "adamw_foreach", "EQUAL", ((2, 2), (4, 4)), {}),
    (STEP, "muon", "muon_by_layer", "EQUAL", ((2, 2), (4, 4)), {}),
    (STEP, "muon", "muon_fsdp", "EQUAL", ((2, 2),), {}),
)
"""Module, reference, candidate, verdict, numbers of ranks of both, and what else the candidate needs."""


def drawn(number: int) -> Case:
    """The case of this number."""
    draw = random.Random(number)
    module, reference, candidate, expected, sizes, more = draw.choice(PAIRS)
    here, there = draw.choice(sizes)
    split = {name: more[name] for name in ("tp", "ep") if name in more}
    return Case(
        name=f"drawn_{number}_{reference}_{candidate}_{here}_{there}",
        family="drawn",
        reference=f"{module}:{reference}",
        candidate=f"{module}:{candidate}",
        expected=expected,  # type: ignore[arg-type]
        steps=2,
        seed=draw.randrange(1 << 31),
        resume_at=more.get("resume_at"),
        parallelism=Parallelism(world_size=there, **{"ep": 1, **split}),
        reference_parallelism=Parallelism(world_size=here, ep=1) if expected == "CLOSE" or here != there else None,
        preload=("torch.distributed.pipelining",) if module == STAGES else (),
        options={"dim": 8 * draw.randint(1, 6), "rows": 8 * draw.randint(1, 2), "length": 4 * draw.randint(2, 8)},
    )


def run_drawn(number: int, first: int) -> int:
    """Run so many, and count the alarms."""
    verdicts: Counter[str] = Counter()
    alarms = 0
    for start in range(first, first + number, AT_ONCE):
        cases = [drawn(each) for each in range(start, min(start + AT_ONCE, first + number))]
        with tempfile.TemporaryDirectory() as folder:
            for result in run_cases(cases, RunOptions(device="cpu"), Path(folder)):
                verdicts[result.verdict] += 1
                is_alarm = result.verdict not in ("EQUAL", result.case.expected)
                alarms += is_alarm
                used = max((row.used or 0.0 for row in result.layouts.rows), default=0.0) if result.layouts else 0.0
                print(f"{result.case.name}: {result.verdict}, {100 * used:.0f}% of a bound", flush=True)
                if is_alarm:
                    print(f"  ALARM, expected {result.case.expected}: {result.case.options} {result.error}", flush=True)
    print(f"{sum(verdicts.values())} runs: {dict(verdicts)}, {alarms} alarms")
    return figure("fuzz.layouts", 1 - alarms / verdicts.total() if verdicts else math.nan)


SMALL = (
    ("ddp", "ddp", 1, 2),
    ("ddp", "fsdp", 1, 2),
    ("fsdp", "fsdp_tp", 1, 2),
    ("fsdp", "fsdp_tp", 2, 2),
    ("ddp", "halves", 1, 1),
    ("ddp", "halves", 2, 2),
    ("fsdp", "ddp", 2, 1),
    ("fsdp_tp", "ddp", 2, 1),
)
"""Reference, candidate and their numbers of ranks, whose sums are regrouped: correct pairs are CLOSE."""


def drawn_small(number: int, words: str, defect: str | None) -> Case:
    """A pair with a defect of `small_defects`, or none, of a number."""
    draw = random.Random(f"{words} {number} {defect}")
    reference, candidate, here, there = draw.choice(SMALL)
    sizes = {"dim": 8 * draw.randint(1, 6), "rows": 8 * draw.randint(1, 2), "length": 4 * draw.randint(2, 8)}
    ranks = [Parallelism(world_size=world, ep=1, tp=2 if name == "fsdp_tp" else 1)
             for name, world in ((reference, here), (candidate, there))]  # fmt: skip
    return Case(
        name=f"{words}_{number}_{reference}_{candidate}_{here}_{there}",
        family="small",
        reference=f"{MESH}:{reference}",
        candidate=f"{'tests.benchmarks.small_defects' if defect else MESH}:{candidate}",
        expected="CLOSE",
        steps=2,
        seed=draw.randrange(1 << 31),
        parallelism=ranks[1],
        reference_parallelism=ranks[0],
        options=sizes | ({"defect": defect} if defect else {}),
    )


def run_small(words: str) -> int:
    """Run each defect, and as many pairs without one. Exits with 1 if one of these is not CLOSE."""
    from tests.benchmarks.small_defects import DEFECTS, FRESH, HELD_OUT

    chosen: list[str | None] = [*{"defects": DEFECTS, "held_out": HELD_OUT, "fresh": FRESH}[words]]
    counts: Counter[tuple[bool, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        cases = [drawn_small(number, words, defect) for number, defect in enumerate(chosen + [None] * len(chosen))]
        if words == "fresh":  # of the correct pairs, half are of other layouts: experts, a ring, optimizers of matrices
            others = (case for case in map(drawn, itertools.count(FIRST_FRESH)) if case.expected == "CLOSE")
            cases[-(len(chosen) // 2) :] = itertools.islice(others, len(chosen) // 2)
        mixed = [case for pair in zip(cases[: len(chosen)], cases[len(chosen) :], strict=True) for case in pair]
        for result in run_cases(mixed, RunOptions(device="cpu"), Path(folder)):
            defect, layouts = result.case.options.get("defect"), result.layouts
            signs = "a small defect is possible", "is less accurate", "the second test"
            has_remark = any(sign in remark for remark in result.remarks for sign in signs)
            counts[defect is not None, f"{result.verdict}{' with a remark' if has_remark else ''}"] += 1
            used = max((row.used or 0.0 for row in layouts.rows), default=0.0) if layouts else 0.0
            samples = layouts.samples if layouts else 0
            wide = layouts.in_float64 if layouts else None
            seen = "not run" if wide is None else f"{wide.beyond} beyond, accuracy {wide.less_accurate}, {wide.failed}"
            text = f"{result.verdict}{' with a remark' if has_remark else ''}, {used:.2f} of a bound of {samples}"
            print(f"{result.case.name}: {defect}: {text}; in float64 {seen}", flush=True)
            if result.verdict not in ("CLOSE", "DIFFERENT"):
                print(f"  {result.error}", flush=True)
    print(*(f"{'defects' if bad else 'correct'}, {text}: {count}" for (bad, text), count in counts.items()), sep="\n")
    return int(any(not bad and text != "CLOSE" for bad, text in counts))


def rows_of(report: Path) -> Iterator[tuple[str, ...]]:
    """A row a case."""
    for case in json.loads(report.read_text())["cases"]:
        layouts = case["layouts"] or {}
        compared = sum(case["compared"].values())
        rows = [row for row in layouts.get("rows", ()) if row["bound"] and row["error"] is not None]
        used = max((row["error"] / row["bound"] for row in rows), default=None)
        widest = max(rows, key=lambda row: row["error"] / row["bound"], default=None)
        regrouped = layouts.get("regrouped", 0)
        ranks = sorted({case["world_size"], (case["case"].get("reference_parallelism") or case)["world_size"]})
        yield (
            case["case"]["family"],
            f"`{case['name']}`",
            " and ".join(map(str, ranks)),
            case["verdict"],
            str(layouts.get("exact", compared)),
            f"{regrouped}, from {layouts['regrouped_from']} on" if regrouped else "0",
            f"{widest['kind']} `{widest['name']}`: {widest['error']:.1e} of {widest['bound']:.1e}" if widest else "",
            "" if used is None else f"{100 * used:.0f}%",
        )


def write_table(page: Path | None, expression: str) -> int:
    """Run the cases, and write the table."""
    folder = Path("reports") / "layouts"
    words = ["-k", expression, "--report-dir", str(folder)]
    status = subprocess.run([sys.executable, "-m", "bitproof", "run", *words], check=False).returncode
    heads = ("family", "case", "ranks", "verdict", "must agree", "may be regrouped", "nearest to its bound", "used")
    table = tabulate(list(rows_of(folder / "latest" / "report.json")), heads, "github")
    print(table)
    if page is not None:
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")
    return status


def main(what: str, *words: str) -> int:
    """Do what the command line says."""
    if what == "table":
        return write_table(Path(words[0]) if words else None, words[1] if words[1:] else EXPRESSION)
    if what in ("defects", "held_out", "fresh"):
        return run_small(what)
    number, first = (*map(int, words), *(200, 0)[len(words) :])
    return run_drawn(number, first)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

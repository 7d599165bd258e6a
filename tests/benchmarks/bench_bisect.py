"""Does bisection name the pass, in how many runs? `python tests/benchmarks/bench_bisect.py [--world-size N] [NAME ...]`

For each defect inside a pass of the nightly pipeline, each extra pass that changes bits, put at several places in the
column, and a backend: the pass to blame and the pass blamed, the region and the call, the runs of the search
and the bound on them, and seconds. Ends with status 1 when a pass is not named, or after more runs than promised.

With --prefixes instead: every prefix of each nightly case's column, run for a step, and how many values are not the
bits of its reference. Ends with status 1 when there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.builtin_cases import CASES, nightly
from bitproof.harness.capture.digest import digest
from bitproof.harness.case import Case
from bitproof.harness.commands.bisect import BISECT_FILE, bisect
from bitproof.harness.options import RunOptions
from bitproof.harness.systems.graph import GraphProgram, make_graph_system, prepare
from bitproof.reference.parallel.mesh import Mesh
from bitproof.reference.step import Trainer, make_eager
from tests.harness.localize.pass_defects import DEFECTS, hosts_with
from tests.ranks import on_ranks

CPU = torch.device("cpu")

NIGHTLY, UNCHUNKED = CASES["blocks_batch_nightly"], CASES["unchunked"]
# A bucket leaves no sum of two chunks for a pass to find.
UNBUCKETED = replace(NIGHTLY, pipeline=replace(NIGHTLY.pipeline, bucket=False))
GRADIENTS = "cases/examples/extra_passes.py:add_gradients_in_bfloat16"
NORMS = "tests/harness/localize/pass_defects.py:merge_norms"

EXTRA_PASSES = [
    (f"{GRADIENTS}@after=chunk", "add_gradients_in_bfloat16"),
    (f"{GRADIENTS}@before=overlap", "add_gradients_in_bfloat16"),
    (GRADIENTS, "add_gradients_in_bfloat16"),
    (f"{NORMS}@before=clean_up", "merge_norms"),
    (f"{NORMS}@before=chunk", "merge_norms"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prefixes", action="store_true")
    parser.add_argument("names", nargs="*", help="defects, or places such as @after=chunk; by default all")
    options = parser.parse_args()
    if options.prefixes:
        sys.exit(run_prefixes(options.world_size))
    rows = []
    for name, wanted, case, texts in searches():
        if not options.names or any(part in name for part in options.names):
            case = replace(case, parallelism=replace(case.parallelism, world_size=options.world_size), steps=2)
            rows.append(measure(name, wanted, case, RunOptions(device=options.device, extra_passes=texts)))
            print(tabulate(rows[-1:], headers="keys"), flush=True)
    print(tabulate(rows, headers="keys"))
    sys.exit(any(row["pass"] != row["blamed"] or row["runs"] > row["at most"] for row in rows))


def searches() -> list[tuple[str, str, Case, tuple[str, ...]]]:
    """What is searched for, the pass to blame, the case, and the extra passes in it."""
    found = [
        (name, defect.of, UNCHUNKED if name == "drop_a_write" else NIGHTLY, ()) for name, defect in DEFECTS.items()
    ]
    found += [(text.rpartition(":")[2], name, UNBUCKETED, (text,)) for text, name in EXTRA_PASSES]
    return [
        *found,
        ("early accumulation", "chunk", CASES["early_accumulation"], ()),
        ("inductor", "backend", CASES["inductor_dense"], ()),
    ]


def measure(name: str, wanted: str, case: Case, options: RunOptions) -> dict[str, Any]:
    """One search, by the command's own function."""
    began = time.monotonic()
    defect = DEFECTS.get(name)
    with tempfile.TemporaryDirectory() as folder:
        with hosts_with(name) if defect else contextlib.nullcontext(), contextlib.redirect_stdout(sys.stderr):
            bisect(case, options, Path(folder))
        found = json.loads((Path(folder) / "latest" / BISECT_FILE).read_text())
        report = json.loads((Path(folder) / "latest" / "report.json").read_text())
    num_passes = len(report["cases"][0]["passes"])
    first = found["first_divergence"] or {}
    return {
        "defect": name,
        "pass": wanted,
        "blamed": found["pass"],
        "region": found["region"],
        "call": f"{first.get('operator')} of {first.get('module')}",
        "passes": num_passes,
        "runs": len(found["probes"]),
        "at most": math.floor(math.log2(num_passes) + 4) if num_passes else 0,
        "seconds": round(time.monotonic() - began),
    }


def run_prefixes(world_size: int) -> bool:
    """Print a row a prefix; whether any differs."""
    rows = []
    for case in nightly.CASES:
        case = replace(case, parallelism=replace(case.parallelism, world_size=world_size))
        column = [entry["name"] for entry in prepare(case, CPU).passes]
        programs = {
            until: prepare(replace(case, pipeline=replace(case.pipeline, until=until)), CPU) for until in ("", *column)
        }
        answers = on_ranks(case.parallelism, functools.partial(digests_of, case, programs))
        for index, until in enumerate(programs):
            reference = "eager_chunked" if "chunk" in column[:index] else "eager"
            found = [answer[until][name] != bits for answer in answers for name, bits in answer[reference].items()]
            rows.append((case.name, until or "trace", reference, len(found), sum(found)))
    print(tabulate(rows, headers=("case", "until", "reference", "compared", "differ")))
    return any(row[-1] for row in rows)


def digests_of(case: Case, programs: dict[str, GraphProgram], mesh: Mesh) -> dict[str, dict[str, str]]:
    """What one step of each system computes on this rank, by the name of the prefix."""

    def step(trainer: Trainer) -> dict[str, str]:
        seen: dict[str, str] = {}
        trainer.step(0, lambda kind, name, value: seen.__setitem__(f"{kind} {name}", digest(value)))
        return seen

    found = {
        until: step(make_graph_system(case, mesh, CPU, program, lambda f: f)) for until, program in programs.items()
    }
    for name, is_chunked in (("eager", False), ("eager_chunked", True)):
        found[name] = step(make_eager(case, mesh, CPU, is_chunked, lambda f: f))
    return found


if __name__ == "__main__":
    main()

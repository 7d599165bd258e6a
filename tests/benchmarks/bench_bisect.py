"""Does bisection name the pass, and in how many runs? `python tests/benchmarks/bench_bisect.py [--world-size N] [NAME ...]`.

For each defect inside a pass of the nightly pipeline, each extra pass that changes bits, put at several places in the
column, and a backend: the pass to blame and the pass blamed, the region and the call, the runs of the search
and the bound on them, and seconds. Ends with status 1 when a pass is not named, or after more runs than promised.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from cases import CASES
from harness import searching
from harness.case import Case
from harness.run_options import RunOptions
from tests.harness.localize.pass_defects import DEFECTS, hosts_with

NIGHTLY, UNCHUNKED = "blocks_batch_nightly", "unchunked"
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
    parser.add_argument("names", nargs="*", help="defects, or places such as @after=chunk; by default all")
    options = parser.parse_args()
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
        (name, defect.of, CASES[UNCHUNKED if name == "drop_a_write" else NIGHTLY], ())
        for name, defect in DEFECTS.items()
    ]
    found += [(text.rpartition(":")[2], name, CASES[NIGHTLY], (text,)) for text, name in EXTRA_PASSES]
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
            searching.bisect(case, options, Path(folder))
        found = json.loads((Path(folder) / "latest" / searching.BISECT_FILE).read_text())
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
        "at most": math.floor(math.log2(num_passes) + 2) if num_passes else 0,
        "seconds": round(time.monotonic() - began),
    }


if __name__ == "__main__":
    main()

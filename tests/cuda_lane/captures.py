"""Which steps a CUDA graph could hold: `captures.py [--facts DIR]` looks at every traced case, and runs none.

Each step is traced as CUDA would trace it, without a GPU, goes through its passes, and is searched for calls that no
capture can hold (harness/graph/backend/cuda_graphs.py has the rules). Prints a table. `--facts DIR` keeps what was
found, so that a call that was cut goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tabulate import tabulate

from bitproof.harness.case import Case
from bitproof.harness.case.traced import AUTOPLACE, JOINT
from tests.cuda_lane import stand_in
from tests.cuda_lane.selection import PLAIN, traced_cases, traced_step
from tests.figures import figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=Path, help="keep what was found here, a file a case")
    options = parser.parse_args()
    if problem := stand_in.why_not():
        print(problem, file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        facts = options.facts or Path(folder)
        facts.mkdir(parents=True, exist_ok=True)
        look(graph_cases(), facts)
        found = {case.name: json.loads((facts / f"{case.name}.json").read_text()) for case in graph_cases()}
    print(table(found))
    return figure("cuda-graphs", sum(not facts["obstacles"] for facts in found.values()))


def graph_cases() -> list[Case]:
    """The cases whose step our passes rewrite, those of one traced step side by side.

    Left out are steps that are placed when the case runs, and those of models too large for this machine.
    """
    found = [case for case in traced_cases() if case.candidate != AUTOPLACE]
    return [case for case in found if case.model.flavor not in ("debugmodel", "16B")]


def look(cases: Iterable[Case], facts: Path) -> None:
    """Write down, for each case without a file, its finished graph's obstacles: (why, module, number of calls)."""
    os.environ.setdefault("BITPROOF_LANE_DEVICES", "0")
    stand_in.build()
    stand_in.load()
    import torch

    from bitproof.harness.graph.backend.cuda_graphs import obstacles
    from bitproof.harness.graph.origin import origin_of
    from bitproof.harness.machine.determinism import set_determinism
    from bitproof.harness.systems import graph
    from tests.cuda_lane import operators
    from tests.cuda_lane.operators import current_device

    torch.set_num_threads(1)
    set_determinism(0)
    operators.install()

    def note(case: Case, module: Any) -> None:
        found = Counter(_place(x.why, origin_of(x.node).module) for x in obstacles(module))
        lines = [[why, part, count] for (why, part), count in found.items()]
        written = facts / f"{case.name}.json"
        written.with_suffix(".part").write_text(json.dumps({"nodes": len(module.graph.nodes), "obstacles": lines}))
        written.with_suffix(".part").rename(written)
        print(f"{case.name}: {sum(found.values())} calls that cannot be captured", file=sys.stderr, flush=True)

    left = [case for case in cases if not (facts / f"{case.name}.json").exists()]
    for _, group in itertools.groupby(left, key=traced_step):
        alike = list(group)
        system = JOINT if alike[0].candidate == JOINT else "graph"
        with current_device(0) as cuda:
            traced = graph.trace(alike[0], cuda, system=system)
            for case in alike:  # passes write into the traced step: each case has a process
                if (child := os.fork()) == 0:
                    plain = replace(case, pipeline=replace(case.pipeline, **PLAIN))
                    note(case, graph.finish(traced, plain, cuda).module)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                if status:
                    raise SystemExit(f"{case.name}: its passes failed, see above")


def _place(why: str, module: str | None) -> tuple[str, str]:
    parts = (module or "the model").split(".")
    return why, ".".join("*" if part.isdigit() else part for part in parts)


def table(found: dict[str, Any]) -> str:
    """A row for cases with the same obstacles in the same modules; those that can be captured first."""
    rows: dict[Any, list[str]] = {}
    for name, facts in found.items():
        rows.setdefault(tuple(sorted({(why, part) for why, part, _ in facts["obstacles"]})), []).append(name)
    lines = []
    for places, names in sorted(rows.items(), key=lambda row: len(row[0])):
        whys: dict[str, list[str]] = {}
        for why, part in places:
            whys.setdefault(why, []).append(f"`{part}`")
        counts = [sum(count for *_, count in found[name]["obstacles"]) for name in names]
        calls = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        said = "; ".join(f"{why} ({', '.join(parts)})" for why, parts in whys.items()) or "\\-"
        cases = f"{len(names)}: " + ", ".join(f"`{name}`" for name in names)
        lines.append([cases, "no" if places else "yes", calls, said])
    return tabulate(lines, ["cases", "captured", "calls", "why not, and in which modules"], tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())

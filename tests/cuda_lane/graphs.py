"""Hold the finished graph of each traced case to what a GPU needs of it, and run nothing: `graphs.py [--device cpu]`.

A step is traced for one device and goes through every pass of each case. Its finished graph must have

1. no hazard: two calls that use the same memory on two streams, or beside a collective or copy, without an order,
2. on CUDA few places where the host waits for the device: two, and two more for each layer of experts,
3. a check of 1 that takes less than 5 % of the time of the passes, over several cases.

A line a case, those that could not be traced included, then the cases that have no graph of ours. `--facts DIR` keeps
what was found, a file a case, so that a call that was cut goes on. Ends with 1 if a graph does not hold to these or was
not looked at, 3 without a C++ compiler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Case
from bitproof.harness.case.traced import JOINT
from tests.cuda_lane import stand_in
from tests.cuda_lane.selection import PLAIN, every_graph_case, slice_of, traced_cases, traced_step

MOST_SHARE = 0.05


@dataclass(frozen=True)
class Held:
    """What was found of a case's graph: nodes, the host's waits and the CPU seconds of the check and of the passes."""

    problems: list[str]
    nodes: int = 0
    waits: int | None = None
    check_seconds: float = 0.0
    pass_seconds: float = 0.0


def most_host_waits(parameter_names: list[str]) -> int:
    """The most often that the host may wait for the device in a step: by its layers of experts."""
    return 2 + 2 * len({name.partition(".experts.")[0] for name in parameter_names if ".experts." in name})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what the steps are traced for")
    parser.add_argument("--slice", metavar="i/n", default="1/1", help="one of n parts, whose steps are alike")
    parser.add_argument("--names", default="", help="these cases alone, with commas between")
    parser.add_argument("--facts", type=Path, help="keep what was found here, a file a case")
    options = parser.parse_args()
    if options.device == "cuda" and (problem := stand_in.why_not()):
        print(problem, file=sys.stderr)
        return 3
    names = {*filter(None, options.names.split(","))}
    cases = [case for case in slice_of(traced_cases(), options.slice, 1) if not names or case.name in names]
    if options.device == "cuda":
        stand_in.load()
    status = hold(cases, device=options.device, facts=options.facts)
    print(f"no graph before they run: {', '.join(sorted(CASES.keys() - {case.name for case in traced_cases()}))}")
    return status


def hold(
    cases: list[Case],
    change: Callable[[Any], None] = lambda module: None,
    *,
    device: str = "cuda",
    facts: Path | None = None,
) -> int:
    """Trace and rewrite the cases, and tell of each; returns the exit status. `change` is for tests: it spoils graphs.

    For CUDA the stand-in must be loaded.
    """
    import torch

    from bitproof.harness.machine.determinism import set_determinism

    torch.set_num_threads(1)
    set_determinism(0)
    if device == "cuda":
        from tests.cuda_lane import operators

        operators.install()
    found: list[Held] = []
    for _, group in itertools.groupby(cases, key=traced_step):
        step: list[Any] = []  # the traced step, once a case of it asks for it
        for case in group:
            kept = facts / device / f"{case.name}.json" if facts else None
            if kept is not None and kept.exists():
                held = Held(**json.loads(kept.read_text()))
            else:
                held = _held(case, step, device, change)
                _keep(held, kept)
            found.append(held)
            waits = "" if held.waits is None else f", the host waits {held.waits} times"
            share = held.check_seconds / held.pass_seconds if held.pass_seconds else 0
            text = "; ".join(held.problems) or f"{held.nodes} nodes{waits}, the check took {share:.1%} of the passes"
            print(f"{'FAIL' if held.problems else 'pass'}  {case.name:<28} {text}", flush=True)
    took, passes = sum(held.check_seconds for held in found), sum(held.pass_seconds for held in found)
    wrong, share = sum(bool(held.problems) for held in found), took / passes if passes else 1.0
    print(f"{len(found)} graphs for {device}, {wrong} wrong; the check took {share:.2%} of the time of the passes")
    return 1 if wrong or (len(found) > 1 and share > MOST_SHARE) else 0


def _held(case: Case, step: list[Any], device: str, change: Callable[[Any], None]) -> Held:
    """Trace the case's step unless `step` has it, and look at its finished graph."""
    import torch

    from bitproof.harness.errors import BitproofError
    from bitproof.harness.graph.graph_options import GraphOptions
    from bitproof.harness.systems import graph
    from bitproof.harness.systems.graph_key import placed_case
    from tests.cuda_lane.operators import current_device
    from tests.cuda_lane.to_cpu import host_waits
    from tests.harness.graph.graphs import copied

    system = JOINT if case.candidate == JOINT else "graph"
    try:
        with current_device(0) if device == "cuda" else nullcontext(torch.device("cpu")) as on:
            case = placed_case(replace(case, pipeline=replace(case.pipeline, **PLAIN)))
            if not step:
                step.append(graph.trace(case, on, system=system))
            joint = copied(step[0].joint)
            began, began_cpu = time.perf_counter(), time.process_time()
            program = graph.finish(replace(step[0], joint=joint), case, on, GraphOptions())
            share = (time.process_time() - began_cpu) / (time.perf_counter() - began)  # of a CPU, which others use, too
    except BitproofError as error:
        return Held([f"not looked at: {str(error).splitlines()[0]}"])
    change(program.module)
    began = time.process_time()
    problems = [*program.hazards(case)]
    took = time.process_time() - began
    waits = None
    if device == "cuda" and case.name in {each.name for each in every_graph_case()}:
        waits, most = host_waits(program.module).total(), most_host_waits(program.parameter_names)
        if waits > most:
            problems.append(f"the host waits {waits} times for the device, at most {most} are allowed")
    passes = share * sum(report.seconds for report in program.passes)
    return Held(problems, len(program.module.graph.nodes), waits, took, passes)


def _keep(held: Held, kept: Path | None) -> None:
    """Write what was found, whole or not at all."""
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(held)))
        part.rename(kept)


if __name__ == "__main__":
    sys.exit(main())

"""The host of a run in the CUDA lane: `bitproof/harness/runtime/start.py`, but programs are traced for CUDA.

1. torch is told of the stand-in for CUDA before anything imports it.
2. A step is traced for each device index in BITPROOF_LANE_DEVICES, once for cases in a row that share it, and goes
   through every pass for the first index and the last; all must be one code.
3. The first is mapped to the CPU, where its ranks run it: whatever records, compares and reports is the real thing.
4. A reference that several cases share is run once, and again as its own control.

What each program was is written to the folder BITPROOF_LANE_FACTS, a file a case; beside them, whether references were
run or shared, a word each.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FACTS, REFERENCES = "BITPROOF_LANE_FACTS", "references"


def finish_for_cuda() -> Callable[..., Any]:
    """What finishes a program for the devices of the lane, of what `trace_all` traced."""

    def prepared(traced: Any, case: Any, options: Any, enter: Callable[[str], None] = lambda place: None) -> Any:
        from bitproof.harness.errors import PassError
        from bitproof.harness.graph.backend.cuda_graphs import obstacles
        from bitproof.harness.systems import graph
        from tests.cuda_lane import tracer
        from tests.cuda_lane.operators import current_device
        from tests.cuda_lane.to_cpu import host_waits, map_to_cpu

        programs = []
        for index in tracer.rewritten_for():
            with current_device(index) as cuda:
                programs.append(graph.finish(traced[index], case, cuda, options, enter))
        hashes = [program.code_hash for program in programs]
        if len(set(hashes)) != 1:
            raise PassError("the step's code depends on the device's index", found=", ".join(hashes))
        hazards = programs[0].hazards(case)  # of the graph for CUDA: they are looked for once
        not_captured = Counter(found.why for found in obstacles(programs[0].module))
        enter("in mapping to the CPU")
        facts = {
            "case": case.name,
            "nodes": len(programs[0].module.graph.nodes),
            "traced for": len(tracer.devices()),
            "rewritten for": len(programs),
            "code hash": hashes[0],
            "hazards": hazards,
            "not captured": not_captured,
            "host waits": dict(host_waits(programs[0].module)),
            "mapped": dict(map_to_cpu(programs[0].module)),
        }
        print(f"cuda lane: {facts}")
        if folder := os.environ.get(FACTS):
            Path(folder, f"{case.name}.json").write_text(json.dumps(facts))
        return programs[0]

    return prepared


def note_reference(word: str) -> None:
    """Write down what became of a reference's run."""
    if folder := os.environ.get(FACTS):
        with Path(folder, REFERENCES).open("a") as file:
            file.write(f"{word}\n")


def main() -> None:
    """Become a host."""
    sys.path.insert(0, str(ROOT))
    from tests.cuda_lane import stand_in

    stand_in.load()
    from bitproof.harness.execute.host import runners
    from tests.cuda_lane import operators, tracer
    from tests.cuda_lane.references import taken_once

    operators.install()
    runners.trace_step = lambda case, system, enter: tracer.trace_all(case)
    runners.finish_program = finish_for_cuda()
    runners.run_ranks = taken_once(runners.run_ranks, note_reference)
    sys.path.pop(0)
    runpy.run_path(str(ROOT / "bitproof" / "harness" / "runtime" / "start.py"), run_name="__main__")


if __name__ == "__main__":
    main()

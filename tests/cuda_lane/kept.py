"""Keep the graphs of ranks that trace for CUDA, and read them again as another run would: `kept.py CASE.json FOLDER`.

Prints a line a call: whether the rank read its graph, the code hash and the hazards. The rank's own code runs
(`execute/host/rank_system.py`), on fake devices.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cuda_lane import stand_in

H100 = {"name": "H100", "multi_processor_count": 132, "major": 9, "minor": 0, "total_memory": 80 << 30}


def main() -> int:
    case_file, folder = map(Path, sys.argv[1:])
    if problem := stand_in.why_not():
        print(problem, file=sys.stderr)
        return 3
    stand_in.load()
    import torch

    from bitproof.harness.case import Case
    from bitproof.harness.execute.host import rank_system
    from bitproof.harness.graph.graph_options import GraphOptions
    from bitproof.harness.machine.determinism import set_determinism
    from bitproof.harness.runtime import sources
    from bitproof.harness.runtime.sources import Installation, read_sources
    from bitproof.harness.systems import graph
    from bitproof.harness.systems.graph_key import graph_cache_of
    from bitproof.harness.systems.graph_program import code_hash
    from tests.cuda_lane import operators

    torch.set_num_threads(1)
    set_determinism(0)
    operators.install()
    installation = Installation(read_sources(), "others")
    sources.at_start = (time.time(), installation.sources)
    case = Case.from_dict(json.loads(case_file.read_text()))
    torch.__config__.show = lambda: "a build with CUDA's libraries, which are not here"
    shared = graph_cache_of(case, folder, installation, device="cuda")
    assert shared is not None
    run = SimpleNamespace(
        case=case, system="graph", precompiled=None, graph_options=GraphOptions(), fault=None, replay=None
    )

    def call(reported: str, rank: int = 0, index: int | None = None, spoiled: str | None = None, **facts: Any) -> None:
        """A rank of another run makes its program, on its own device."""
        index = rank if index is None else index
        gpu = SimpleNamespace(**H100 | facts)
        finish = graph.finish

        def spoil(*given: Any) -> Any:
            program = finish(*given)
            wait = next(node for node in program.module.graph.nodes if spoiled and spoiled in str(node.target))
            wait.replace_all_uses_with(wait.args[0])
            program.module.graph.erase_node(wait)
            program.module.recompile()
            return replace(program, code_hash=code_hash(program.module))

        with (
            operators.current_device(index) as cuda,
            mock.patch.object(torch.cuda, "get_device_properties", lambda device: gpu),
            mock.patch.object(graph, "finish", spoil if spoiled else finish),
        ):
            cache = shared.of_rank(rank, cuda)
            job: Any = SimpleNamespace(run=run, graph_cache=cache, program=None)
            program = rank_system.program_of(job, rank, cuda)
            found = {"call": reported, "is_kept": program.is_kept, "code": program.code_hash}
            print(json.dumps(found | {"hazards": program.hazards(case)}), flush=True)

    call("first")
    call("second")
    call("another rank", rank=1)
    call("another rank's second", rank=1)
    call("a rank on another device", rank=1, index=5)
    call("another GPU", major=8)
    torch.backends.cuda.matmul.allow_tf32 = True
    call("another switch")
    call("without a wait", rank=2, spoiled="wait_tensor")
    call("without a wait, again", rank=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What solving for placements takes: seconds, MiB and the program's size, from a tiny model to 671B with 61 layers.

    python tests/benchmarks/bench_placement.py [NAME ...]     tiny, debug, 671B; all by default

Each model in a process of its own, whose peak memory is told. Nothing is computed: tensors are fake. Seconds are of the
processor, so that a busy machine tells the same. Fails where solving at 61 layers takes longer than its budget.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.case import Autoplace, Batch, Case, Model, Parallelism
from tests.figures import figure

_TINY = Parallelism(ep=4, tp=2)
SIZES: dict[str, tuple[Model, Parallelism, Batch, float]] = {
    "tiny": (Model(), _TINY, Batch(), 4.5),
    "debug": (Model(flavor="debugmodel"), _TINY, Batch(), 400.0),
    "671B": (Model(flavor="671B"), Parallelism(world_size=2048, ep=64, tp=8), Batch(sequences=1, seq_len=4096), 6e5),
}


def measure(name: str, answers: multiprocessing.Queue[tuple[str, ...]]) -> None:
    """One model's row."""
    from bitproof.harness.errors import PlacementError
    from bitproof.harness.placement.solve import MIB, least_bytes, solve
    from bitproof.harness.systems.autoplace import by_hand, trace_placements

    model, parallelism, batch, bound = SIZES[name]
    autoplace = Autoplace(memory_mib=bound)
    case = Case(
        name="bench",
        family="bench",
        reference="eager",
        candidate="autoplace",
        model=model,
        parallelism=parallelism,
        batch=batch,
        autoplace=autoplace,
    )
    imported = time.process_time()
    traced = trace_placements(case)
    built = time.process_time()
    hand = by_hand(traced)
    least = least_bytes(traced.program)
    began = time.process_time()
    try:
        found = solve(traced.program, bound * MIB)
    except PlacementError as error:
        answers.put((name, str(error)))
        return
    solved = time.process_time()
    answers.put(
        (
            name,
            str(sum(map(len, traced.kinds.values()))),
            f"{built - imported:.1f}",
            f"{solved - began:.1f}",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}",
            str(len(traced.program.nodes)),
            str(found.num_variables),
            str(found.num_constraints),
            f"{found.gap:.0e}",
            f"{found.taken.cost:.0f}",
            " / ".join(f"{x.cost:.0f}" for x in hand.values()),
            f"{found.taken.bytes / MIB:.2f} of {bound:g}, at least {least / MIB:.2f}",
            " / ".join(f"{x.bytes / MIB:.2f}" for x in hand.values()),
        )
    )


HEADERS = (
    "model",
    "layers",
    "trace and build s",
    "solve s",
    "peak MiB",
    "nodes",
    "variables",
    "constraints",
    "gap",
    "cost us",
    "fsdp / fsdp and tp us",
    "MiB a rank",
    "fsdp / fsdp and tp MiB",
)


def main(names: list[str]) -> int:
    """Print a row a model; 1 if 61 layers miss their goal, or are not asked for."""
    context = multiprocessing.get_context("spawn")
    print("| " + " | ".join(HEADERS) + " |\n|" + "---|" * len(HEADERS))
    seconds = math.inf
    for name in names or SIZES:
        answers: multiprocessing.Queue[tuple[str, ...]] = context.Queue()
        process = context.Process(target=measure, args=(name, answers))
        process.start()
        row = answers.get(timeout=900)
        process.join()
        print("| " + " | ".join(row) + " |", flush=True)
        if name == "671B" and len(row) == len(HEADERS):
            seconds = float(row[2]) + float(row[3])
    return figure("bench.placement", seconds)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What precompiling a step, reading it and starting ranks with it cost: seconds and MiB, and the time to a first step.

    python tests/benchmarks/bench_precompile.py [--sizes tiny,debug,671B] [--starts tiny,debug] [--layers 61]

    tiny, debug   moe_seq on 8 ranks, the latter with DeepSeek-V3's debug model
    671B          moe_seq with DeepSeek-V3 671B, 61 layers, 4 x 4,096 tokens, ep 8 on 8 ranks; values are fake

Each size has a process of its own, so that its peak memory is its own. Seconds are CPU seconds of that process, which
computes on one thread, and in brackets those of the clock. `--starts` runs 8 ranks for a step, precompiled and traced
in turns, in a host that has imported torch: seconds of the clock until the step is read or made, until ranks have
joined their groups, and until the end of the first step; their ratio is of one run, and so worth more than they are.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

SIZES = ("tiny", "debug", "671B")
PAIRS = 2
WHOLE = "to the end of a first step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--starts", default="tiny,debug")
    parser.add_argument("--layers", type=int, default=61, help="of 671B")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        part, _, size = options.measure.partition(":")
        found = (make if part == "make" else read)(case_of(size, options.layers), options.folder)
        print(json.dumps(found | {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return
    for size in filter(None, options.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            common = ["--folder", folder, "--layers", str(options.layers)]
            for part in ("make", "read"):
                command = [sys.executable, __file__, "--measure", f"{part}:{size}", *common]
                reported = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                print(f"{size:6} {part:5} {'  '.join(map(_describe, reported.items()))}", flush=True)
    for size in filter(None, options.starts.split(",")):
        for row in starts(size, options.layers):
            print(row, flush=True)


def _describe(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name} {value[0]:.2f} s ({value[1]:.2f})" if isinstance(value, list) else f"{name} {value:,.2f}"


def case_of(size: str, layers: int) -> Any:
    """The case of a size."""
    from bitproof.builtin_cases import CASES
    from bitproof.harness.case import Batch, Model, Parallelism

    case = replace(CASES["precompiled_experts_seq"], steps=1)
    if size == "tiny":
        return case
    if size == "debug":
        return replace(case, model=Model(flavor="debugmodel"))
    return replace(
        case,
        model=Model(flavor="671B", layers=layers, dense_layers=min(3, layers - 1)),
        parallelism=Parallelism(world_size=8, ep=8),
        batch=Batch(sequences=4, seq_len=4096),
    )


def _times() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _since(began: tuple[float, float]) -> list[float]:
    return [now - then for now, then in zip(_times(), began, strict=True)]


def _set_up(case: Any) -> Any:
    import torch

    from bitproof.harness.execute.host.worker import preload
    from bitproof.harness.machine.determinism import set_determinism

    preload()
    set_determinism(case.seed)
    return torch.device("cpu")


def make(case: Any, folder: Path) -> dict[str, Any]:
    """Seconds to precompile a case, and of that to trace it as the first and as the last rank; the file's MiB."""
    from bitproof.harness.precompile.artifact import precompile

    device, began = _set_up(case), _times()
    made = precompile(case, "graph", device, folder)
    first, last = made.trace_seconds
    return {
        "precompile": _since(began),
        "of the clock: trace as rank 0": first,
        "as the last": last,
        "passes": made.pass_seconds,
        "write": made.write_seconds,
        "nodes": made.artifact.nodes,
        "file MiB": made.artifact.bytes / 2**20,
    }


def read(case: Any, folder: Path) -> dict[str, Any]:
    """Seconds to read it: its fingerprint, which has all of our sources, and all."""
    from bitproof.harness.precompile.artifact import read_program
    from bitproof.harness.precompile.fingerprint import fingerprint_of

    device, began = _set_up(case), _times()
    fingerprint_of(case, "graph", device)
    fingerprint, began = _since(began), _times()
    read_program(folder, case, "graph", device)
    return {"read": _since(began), "of that the fingerprint": fingerprint}


def starts(size: str, layers: int) -> list[str]:
    """Rows: from a host that has imported torch to ranks that are started, and to the end of their one step."""
    from bitproof.harness.execute.requests import PrecompileRequest, StepFolder
    from bitproof.harness.execute.session import open_session
    from bitproof.harness.options import RunOptions

    case, rows, ratios = replace(case_of(size, layers), name="bench", reference="eager", candidate="graph"), [], []
    with tempfile.TemporaryDirectory() as folder, open_session(Path(folder), RunOptions(device="cpu")) as client:
        step = Path(folder) / "step"
        client.ask(PrecompileRequest(case=case, system="graph", out=step), 600.0)
        for pair in range(PAIRS):
            times = {}
            for way, read_from in (("precompiled", StepFolder(step)), ("traced", None)):
                times[way] = _one(client, case, read_from, Path(folder) / f"{way}{pair}")
                text = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in times[way].items())
                rows.append(f"{size:6} {way:11} {text}")
            ratios.append(
                times["precompiled"]["to the end of a first step"] / times["traced"]["to the end of a first step"]
            )
    return [*rows, f"{size:6} first step, precompiled to traced: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"]


def _one(client: Any, case: Any, precompiled: Any, folder: Path) -> dict[str, float]:
    """A run of the graph alone, recorded as ever."""
    from bitproof.harness.execute.requests import RunRequest
    from bitproof.harness.machine.devices import place

    began = time.perf_counter()
    request = RunRequest(
        case=case,
        system="graph",
        arm="first",
        placement=place("cpu", case.parallelism.world_size, 0, "auto"),
        out=folder / "out",
        logs=folder / "logs",
        work=folder / "work",
        timeout=600.0,
        case_timeout=600.0,
        precompiled=precompiled,
    )
    seconds = client.ask(request, 600.0).seconds
    return {
        "prepare": seconds.prepare,
        "start ranks": seconds.start_ranks,
        "both": seconds.prepare + seconds.start_ranks,
        WHOLE: time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()

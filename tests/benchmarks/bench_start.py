"""How a thousand ranks would start: what was measured on up to 64 real ones here, and what is extrapolated from that.

    python tests/benchmarks/bench_start.py [--sizes 2,4,8,16,32,64] [--to 128,256,512,1024]

Forked ranks, as torchrun's would: each connects to rank 0, says what it is made of (this process's own facts), and is
welcomed; then all join the process groups of a mesh (expert parallel over 8, the others FSDP) by torch's store, which a
process of its own serves. Counted are CPU seconds of rank 0, of another rank (the mean) and of the store, open
connections, and the growth of rank 0's memory. They depend little on what else the machine does; the clock does.

Each quantity is fitted as a + b N + c N^2, none of which is negative, by least squares of the relative error. A fit
without the largest size has to foretell that one: the column `foretold` says by what factor it misses. The rows of
sizes above the largest measured one are extrapolated, and no rank ran for them. Seconds there are those of the slowest
part with a core for each rank: rank 0's own work, and the larger of the store's and a rank's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tabulate import tabulate

from bitproof.harness.capture.rank_fingerprint import Facts, facts_of_process
from bitproof.harness.case import Parallelism
from bitproof.harness.execute.requests import RankFingerprint
from bitproof.harness.powers.torchrun.messages import Hello
from bitproof.harness.powers.torchrun.peers import Peers
from bitproof.harness.powers.torchrun.rendezvous import Rendezvous
from bitproof.harness.torch_compat import import_tracing
from bitproof.reference.parallel.mesh import Mesh, join_groups, leave_groups
from tests.figures import figure

QUANTITIES = {
    "rank 0 meets": "rank 0's CPU seconds until all have come and were compared",
    "a rank meets": "another rank's",
    "a rank joins": "a rank's CPU seconds in joining the process groups",
    "the store": "the CPU seconds of the process that serves torch's store",
    "sockets": "a rank's connections then",
    "MiB": "growth of rank 0's memory while all come",
}


@dataclass(frozen=True)
class Used:
    """What this process has used."""

    cpu: float
    memory: float

    @classmethod
    def now(cls) -> Used:
        """By now."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(usage.ru_utime + usage.ru_stime, resident / (1 << 20))


def _forked(act: Callable[[], dict[str, float]], answer: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        answer.write_text(json.dumps(act()))
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _serve(port_file: Path, is_over: Path) -> dict[str, float]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began = Used.now()
    unnamed = port_file.with_suffix(".unnamed")
    unnamed.write_text(str(store.port))
    unnamed.rename(port_file)
    while not is_over.exists():
        time.sleep(0.05)
    return {"the store": Used.now().cpu - began.cpu}


def _rank(rank: int, size: int, port: int, facts: Facts, folder: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="bench", GLOO_SOCKET_IFNAME="lo")
    spool = folder / f"work{rank}"
    spool.mkdir()
    began = Used.now()
    peers = Peers(rank, size, spool)
    rendezvous = Rendezvous(peers, 600.0, lambda is_gone: RankFingerprint(facts))
    hello = Hello(token="", rank=rank, world_size=size, node=f"node{rank // 8}", run_dir=str(spool))
    if rank:
        rendezvous.come(hello)
    else:
        rendezvous.wait_for_ranks(hello)
    met = Used.now()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=600))
    before = Used.now()
    mesh = Mesh(rank, Parallelism(world_size=size, ep=min(8, size)))
    join_groups(mesh, torch.device("cpu"), store, backend="gloo", timeout=600.0)
    joined = Used.now()
    sockets = sum("socket" in os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    dist.barrier()
    leave_groups()
    peers.close(1.0)
    found = {"a rank joins": joined.cpu - before.cpu, "sockets": float(sockets)}
    if rank:
        return found | {"a rank meets": met.cpu - began.cpu}
    return found | {"rank 0 meets": met.cpu - began.cpu, "MiB": met.memory - began.memory}


def measured(size: int, facts: Facts) -> dict[str, float]:
    """What that many ranks took; of what each of several took, the mean."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        server = _forked(lambda: _serve(folder / "port", folder / "over"), folder / "server")
        while not (folder / "port").exists():
            time.sleep(0.01)
        port = int((folder / "port").read_text())
        ranks = [
            _forked(lambda rank=rank: _rank(rank, size, port, facts, folder), folder / f"rank{rank}")  # type: ignore[misc]
            for rank in range(size)
        ]
        statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
        seconds = time.monotonic() - began
        (folder / "over").touch()
        statuses.append(os.waitpid(server, 0)[1])
        assert not any(statuses), f"{size} ranks: {statuses}"
        lines: list[dict[str, float]] = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(size)]
        lines.append(json.loads((folder / "server").read_text()))
    means = {key: [one[key] for one in lines if key in one] for key in QUANTITIES}
    return {key: sum(values) / len(values) for key, values in means.items()} | {"seconds": seconds}


def fitted(sizes: Sequence[int], values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Coefficients of 1, N and N^2, the best ones of which none is negative."""
    powers = np.array([[1.0, n, n * n] for n in sizes])
    weights = 1.0 / np.maximum(np.array(values), 1e-6)
    best, least = np.zeros(3), float("inf")
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
        some, *_ = np.linalg.lstsq(powers[:, used] * weights[:, None], np.ones(len(sizes)), rcond=None)
        error = float(np.sum((powers[:, used] @ some * weights - 1) ** 2))
        if (some >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[list(used)] = some
    return best


def at(coefficients: np.ndarray[Any, Any], size: int) -> float:
    """The fit's value for so many ranks."""
    return float(coefficients @ np.array([1.0, size, size * size]))


def main() -> int:
    """Measure, extrapolate, print; 1 if the most ranks take longer than the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2,4,8,16,32,64")
    parser.add_argument("--to", default="128,256,512,1024")
    options = parser.parse_args()
    import_tracing()
    facts = facts_of_process()
    reported = len(json.dumps(facts))
    sizes, beyond = ([int(each) for each in text.split(",")] for text in (options.sizes, options.to))
    found = {}
    for size in sizes:
        found[size] = measured(size, facts)
        print(size, {key: round(value, 3) for key, value in found[size].items()}, flush=True)
    rows = [[size, "measured", *(found[size][key] for key in QUANTITIES), found[size]["seconds"]] for size in sizes]
    fits = {key: fitted(sizes, [found[size][key] for size in sizes]) for key in QUANTITIES}
    for size in beyond:
        each = {key: at(fits[key], size) for key in QUANTITIES}
        seconds = each["rank 0 meets"] + max(each["the store"], each["a rank joins"])
        rows.append([size, "extrapolated", *each.values(), seconds])
    slowest = rows[-1][-1]
    print(
        f"\nEach rank says {reported / 1024:.1f} KiB of what it is made of. Seconds of measured rows are those of this"
    )
    print(f"machine's {os.cpu_count()} cores, on which all ranks ran.\n")
    print(tabulate(rows, headers=["ranks", "", *QUANTITIES, "seconds"], tablefmt="github", floatfmt=".3g"))
    checks = []
    for key, meaning in QUANTITIES.items():
        without = fitted(sizes[:-1], [found[size][key] for size in sizes[:-1]])
        a, b, c = fits[key]
        checks.append(
            [key, meaning, f"{a:.3g} + {b:.3g} N + {c:.3g} N^2", at(without, sizes[-1]) / found[sizes[-1]][key]]
        )
    print()
    print(tabulate(checks, headers=["", "what it is", "fit", "foretold"], tablefmt="github", floatfmt=".2f"))
    return figure("bench.start", slowest)


if __name__ == "__main__":
    sys.exit(main())

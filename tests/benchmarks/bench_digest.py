"""How fast digests are, beside a plain copy, sha256, torch.hash_tensor and XXH3-128 of the whole.

    python tests/benchmarks/bench_digest.py [--device cpu|cuda] [--largest MIB]

Medians on one CPU thread, or one GPU. Budgets for tensors of 64 MiB and more: 5 GB/s on a CPU; on a GPU half the
memory bandwidth of a plain copy, which reads every byte and writes it. The exit status is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.capture import xxh3
from bitproof.harness.capture.digest import digest, octets, tensor_bytes
from bitproof.harness.capture.leaves import leaf_hasher
from tests.figures import figure

SIZES = {"64 B": 64, "4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20, "1 GiB": 1 << 30}
LARGE = 64 << 20
BUDGET_CPU = 5e9
BUDGET_GPU = 0.5
MIN_SECONDS, MIN_CALLS = 0.5, 5

Methods = dict[str, Callable[[torch.Tensor], object]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--largest", type=int, default=1024, metavar="MIB", help="leave out tensors above this size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    methods = on_gpu(device) if device.type == "cuda" else on_cpu()
    rows, missed, speed = [], [], 0.0
    for name, size in SIZES.items():
        if size > options.largest << 20:
            continue
        tensor = torch.randint(2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
        seconds = {method: median_seconds(call, tensor) for method, call in methods.items()}
        rows.append([name] + [f"{value * 1e6:.1f} us\n{size / value / 1e9:.2f} GB/s" for value in seconds.values()])
        speed = size / seconds["digest"] / 1e9
        if size >= LARGE:
            missed += judge(name, size, seconds, device)
    print(tabulate(rows, headers=["size", *methods], tablefmt="grid", stralign="right"))
    print("\n".join(missed) or "within budget")
    is_missed = device.type == "cpu" and figure("bench.digest", speed)
    return int(bool(missed or is_missed))


def on_cpu() -> Methods:
    """What is measured on a CPU."""
    return {
        "copy": copier(),
        "sha256": lambda tensor: hashlib.sha256(tensor_bytes(tensor)).digest(),
        "torch.hash_tensor": torch.hash_tensor,
        "xxh3_128, whole": lambda tensor: xxhash.xxh3_128_digest(tensor_bytes(tensor)),
        "digest": digest,
    }


def on_gpu(device: torch.device) -> Methods:
    """What is measured on a GPU: as on a CPU, after a copy to the host where a method knows none but its memory."""
    hasher = leaf_hasher(device)
    print(f"leaves are hashed by {hasher.__module__}")
    return {
        "copy": copier(),
        "sha256, on the host": lambda tensor: hashlib.sha256(tensor_bytes(tensor)).digest(),
        "torch.hash_tensor": torch.hash_tensor,
        "xxh3_128, on the host": lambda tensor: xxhash.xxh3_128_digest(tensor_bytes(tensor)),
        "digest, on the host": lambda tensor: digest(tensor.cpu()),
        "leaves, torch's operators": lambda tensor: xxh3.hash_leaves(whole_leaves(tensor)),
        "leaves": lambda tensor: hasher(whole_leaves(tensor)),
        "digest": digest,
    }


def copier() -> Callable[[torch.Tensor], object]:
    """A copy into memory that is there already."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> object:
        if tensor.nbytes not in copies:
            copies.clear()
            copies[tensor.nbytes] = torch.empty_like(tensor)
        return copies[tensor.nbytes].copy_(tensor)

    return copy


def whole_leaves(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's words as leaves, those of less than one leaf as none."""
    num_leaves = tensor.nbytes // xxh3.LEAF_BYTES
    return octets(tensor)[: num_leaves * xxh3.LEAF_BYTES].view(torch.int64).view(num_leaves, xxh3.LEAF_WORDS)


def median_seconds(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Median seconds of one call, on a GPU by its own events; calls of microseconds are timed many at once."""
    call(tensor)
    began = time.perf_counter()
    call(tensor)
    batch = max(1, int(1e-3 / (time.perf_counter() - began)))
    seconds: list[float] = []
    while sum(seconds) * batch < MIN_SECONDS or len(seconds) < MIN_CALLS:
        seconds.append(timed(call, tensor, batch) / batch)
    return statistics.median(seconds)


def timed(call: Callable[[torch.Tensor], object], tensor: torch.Tensor, calls: int) -> float:
    """Seconds that a number of calls take."""
    if tensor.is_cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call(tensor)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    for _ in range(calls):
        call(tensor)
    return time.perf_counter() - began


def judge(name: str, size: int, seconds: dict[str, float], device: torch.device) -> list[str]:
    """What misses its budget at one size, in words."""
    speed = size / seconds["digest"]
    if device.type == "cpu":
        return [] if speed >= BUDGET_CPU else [f"MISSED at {name}: {speed / 1e9:.2f} GB/s, the budget is 5"]
    share = seconds["copy"] / 2 / seconds["digest"]
    print(
        f"{name}: digest reads at {share:.0%} of a copy's memory bandwidth, {2 * size / seconds['copy'] / 1e9:.0f} GB/s"
    )
    return [] if share >= BUDGET_GPU else [f"MISSED at {name}: {share:.0%} of a copy's bandwidth, the budget is 50%"]


if __name__ == "__main__":
    sys.exit(main())

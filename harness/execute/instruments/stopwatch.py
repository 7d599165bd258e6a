"""Measure step times, without the time for recording, and count the FLOPs of a step.

Only rank 0 of a built-in system counts FLOPs, in the first step, whose time is not used. The FLOPs of a user's system
are unknown, since no dispatch mode observes its calls.
"""

from __future__ import annotations

import functools
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from bitproof.harness.case import Case
from bitproof.harness.records import Throughput
from bitproof.harness.systems.registry import BUILT_IN

if TYPE_CHECKING:
    import torch

    from bitproof.harness.capture.recorder import Recorder
    from bitproof.harness.execute.status_messages import Done

MOST_STEPS = 1000
"""The most steps whose times a rank reports."""
_SIZE, _TRIES = 512, 5
_MIB = 2**20

# Dense tensor cores, without sparsity, by the vendor's data sheets: bfloat16, in operations per second.
_PEAKS = {"H100 80GB HBM3": 989.4e12, "H200": 989.4e12, "A100": 312e12, "B200": 2250e12}


class Stopwatch:
    """Times a rank's steps. `flops` are the FLOPs of the first step; None if they are not counted."""

    def __init__(self, recorder: Recorder, device: torch.device, *, is_on: bool, counts: bool) -> None:
        self.seconds: list[float] = []
        self.flops: int | None = None
        self._recorder = recorder
        self._device = device
        self._is_on = is_on
        self._counts = counts

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for a step, whose time is measured. The time for recording is excluded."""
        if not self._is_on:
            yield
            return
        import torch

        from bitproof.harness.torch_operators import FlopCount

        # torch's own mode would decompose some calls into others, which have other bits.
        counter = FlopCount() if self._counts and not self.seconds else None
        recorded, began = self._recorder.seconds, time.perf_counter()
        with counter or nullcontext():
            yield
        # Kernels may still run on the GPU, and they are part of the step.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        took = time.perf_counter() - began - (self._recorder.seconds - recorded)
        # At least a nanosecond, as rates are divided by it.
        if len(self.seconds) < MOST_STEPS:
            self.seconds.append(max(took, 1e-9))
        if counter is not None:
            self.flops = counter.flops


def counts_flops(system: str, rank: int) -> bool:
    return system in BUILT_IN and rank == 0


def peak_of_process() -> float:
    # In MiB. Memory that is shared with the parent counts, too.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def throughput_of(case: Case, system: str, device: str, done: Sequence[Done]) -> Throughput | None:
    """Compute the throughput from the `Done` messages of all ranks; None if no step was timed."""
    # A step takes as long as its slowest rank.
    times = [max(each) for each in zip(*(rank.step_seconds for rank in done), strict=False)]
    if not times:
        return None
    # The first step also warms up caches, and counts operations.
    times = times[1:] or times
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (0.0, 0.0, 0.0)
    peak, source = peak_flops(case, device, done[0])
    memory = max((rank.peak_mib for rank in done if rank.peak_mib is not None), default=None)
    return Throughput(
        steps=len(times),
        step_seconds=statistics.median(times),
        spread_seconds=max(0.0, high - low),
        tokens=tokens_of(case) if system in BUILT_IN else None,
        flops=done[0].flops,
        peak_flops=peak,
        peak_source=source,
        peak_mib=memory if memory is not None else max(rank.process_mib for rank in done),
        peak_of="process" if memory is None else "device",
    )


def tokens_of(case: Case) -> int:
    """Return the number of tokens in a step, over all ranks.

    A token that several ranks read, such as the ranks of a tensor-parallel group, counts once.
    """
    return case.batch.sequences * case.batch.seq_len * case.parallelism.data_ranks


def peak_flops(case: Case, device: str, first: Done) -> tuple[float | None, str | None]:
    """Return a pair: the peak FLOPs per second of a rank's device, and the source of that number in words, such as
    "H100's data sheet, bfloat16".

    Both are None if the peak is unknown.
    """
    if device == "cpu":
        cores, ranks = len(os.sched_getaffinity(0)), case.parallelism.world_size
        # If ranks outnumber cores, a rank has only a share of a core.
        share = min(1.0, cores / ranks)
        text = f"measured by products of {_SIZE} in {case.precision.compute} on a core"
        return measured_peak(case.precision.compute) * share, text + (
            f", {cores} for {ranks} ranks" if share < 1 else ""
        )
    # The fact `gpu` has the name first, then further properties.
    name = str((first.gpu or {}).get("gpu", "")).partition(",")[0]
    known = next((peak for part, peak in _PEAKS.items() if part in name), None)
    if known is None or case.precision.compute != "bfloat16":
        return None, None
    return known, f"{name}'s data sheet, bfloat16"


@functools.lru_cache
def measured_peak(dtype: str) -> float:
    """Measure and return the FLOPs per second of one core: the fastest of five 512 x 512 matrix products in `dtype`."""
    import torch

    # A single thread, so that no thread pool exists when ranks are forked.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ones: Any = torch.ones(_SIZE, _SIZE, dtype=getattr(torch, dtype))
        best = float("inf")
        for _ in range(_TRIES):
            began = time.perf_counter()
            torch.mm(ones, ones)
            best = min(best, time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    # A product of n x n matrices takes n^3 multiplications and as many additions.
    return 2 * _SIZE**3 / best

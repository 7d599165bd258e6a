"""Run checks, each in separate processes that end with it:

    harness.gpu_checks.run FD --device cuda --ranks 8 --name digests --name offload

A check that crashes, raises or exceeds its time has failed, and the others still run. Each result is sent through FD
immediately.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterator

import torch

from bitproof.harness.case import Parallelism
from bitproof.harness.gpu_checks.checks import ALONE, NAMES, TOGETHER, Answer, Setting, check_native_sums
from bitproof.harness.gpu_checks.found import CheckResult
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.machine.nccl import pin_nccl
from bitproof.harness.processes import framing
from bitproof.harness.processes.channel import send
from bitproof.harness.processes.forked import Send, fork
from bitproof.harness.processes.watching import Watch

SECONDS = 180.0


def run_checks(setting: Setting, seconds: float = SECONDS, names: Container[str] = NAMES) -> Iterator[CheckResult]:
    """The checks of these names, each in processes that are forked for it; of one rank, those that need no other.

    This process touches no device: it is forked from.
    """
    set_determinism(0)  # imports what takes a second, once
    for name, alone in ALONE.items():
        if name not in names:
            continue
        yield _forked(name, [_on_one_device(alone, setting)], seconds)
    for name, together in TOGETHER.items() if setting.ranks > 1 else ():
        if name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="bitproof-gpu-") as folder:
            yield _forked(name, [_on_a_rank(together, setting, f"{folder}/store")] * setting.ranks, seconds)


def _on_one_device(check: Callable[[Setting], Answer], setting: Setting) -> Callable[[int], Answer]:
    return lambda rank: check(setting)


def _on_a_rank(check: Callable[[Setting, int], Answer], setting: Setting, store: str) -> Callable[[int], Answer]:
    return lambda rank: _joined(setting, rank, store, check)


def _joined(setting: Setting, rank: int, store: str, check: Callable[[Setting, int], Answer]) -> Answer:
    from torch.distributed import FileStore

    from bitproof.reference.parallel.mesh import Mesh, join_groups, leave_groups

    native = check is check_native_sums
    device, backend = setting.device_of(rank), "gloo" if setting.device == "cpu" else "nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        pin_nccl(os.environ, native=native)
    mesh = Mesh(rank, Parallelism(world_size=setting.ranks, ep=1), device)
    join_groups(mesh, device, FileStore(store, setting.ranks), backend=backend, timeout=SECONDS, native=native)
    answer = check(setting, rank)
    torch.distributed.barrier()
    leave_groups()
    return answer


def _forked(name: str, bodies: list[Callable[[int], Answer]], seconds: float) -> CheckResult:
    """Run each body in a process of its own. The check passes if all pass; else the first failure is reported."""
    processes = [fork(functools.partial(_live, name, body, rank)) for rank, body in enumerate(bodies)]
    answers: dict[int, Answer] = {}
    limit = time.monotonic() + seconds
    try:
        with Watch(processes) as watch:
            while not watch.is_over and time.monotonic() < limit:
                for process, line in watch.look(0.2):
                    answered: CheckResult = framing.read(line, CheckResult)
                    answers[processes.index(process)] = answered.is_ok, answered.found
        late = [rank for rank, process in enumerate(processes) if process.status is None]
    finally:
        for process in processes:
            process.kill()
    found = [answers.get(rank) for rank in range(len(bodies))]
    for rank, answer in enumerate(found):
        where = f"rank {rank}: " if len(bodies) > 1 else ""
        if answer is None:
            how = f"no answer within {seconds:g} s" if rank in late else "its process ended without an answer"
            return CheckResult(name=name, is_ok=False, found=where + how)
        if not answer[0]:
            return CheckResult(name=name, is_ok=False, found=where + answer[1])
    assert found[0] is not None, "all answered"
    return CheckResult(name=name, is_ok=True, found=found[0][1])


def _live(name: str, body: Callable[[int], Answer], rank: int, send: Send) -> None:
    set_determinism(0)
    try:
        is_ok, found = body(rank)
    except Exception as error:
        traceback.print_exc()
        is_ok, found = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    send(CheckResult(name=name, is_ok=bool(is_ok), found=str(found)))


def main() -> None:
    """Run all checks, and report each result at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", type=int, help="file descriptor to answer through")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--name", action="append", required=True, help="a check to run")
    options = parser.parse_args()
    os.set_inheritable(options.answers, False)
    for found in run_checks(Setting(device=options.device, ranks=options.ranks), names=options.name):
        send(options.answers, found)

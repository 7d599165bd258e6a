"""Runs GPU checks, each in separate processes that end with the check.

    harness.powers.doctor.run FD --device cuda --ranks 8 --name digests --name offload

Each result is written to the file descriptor FD at once. A check fails if it crashes, raises or takes too long.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from bitproof.harness.case import Parallelism
from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.machine.nccl import allow_shared_gpu, pin_nccl
from bitproof.harness.powers.doctor import checks, grouped, processes, together, topology
from bitproof.harness.powers.doctor.check_result import CheckResult
from bitproof.harness.powers.doctor.setting import Answer, Setting
from bitproof.harness.processes import framing
from bitproof.harness.processes.channel import send
from bitproof.harness.processes.forked import Send, fork
from bitproof.harness.processes.watching import Watch

SECONDS = 180.0
_MAX_BYTES_SHARED = 8 * 2**20  # ranks that share a GPU use the loopback device

ALONE: dict[str, Callable[[Setting], Answer]] = {
    "topology": topology.check_topology,
    "digests": checks.check_digests,
    "attention": checks.check_attention,
    "grouped products": grouped.check_grouped_mm,
    "rows without tokens": grouped.check_no_rows,
    "offload": checks.check_offload,
    "digest bandwidth": checks.check_bandwidth,
}
"""Checks of a single device."""
PROCESSES: dict[str, Callable[[Setting, int], Answer]] = {"repeatability": processes.compute}
"""Checks that run in a process per GPU, started twice. All processes must give the same answer."""
TOGETHER: dict[str, Callable[[Setting, int], Answer]] = {
    "NCCL": together.check_joined,
    "sums in rank order": together.check_rank_order_sums,
    "sums by parts": together.check_sums_by_parts,
    "all-to-all": together.check_all_to_all,
    "two groups at once": together.check_groups_at_once,
    "native sums": together.check_native_sums,
    "native order": together.check_native_order,
}
"""Checks with all ranks."""
NATIVE = ("native sums", "native order")
"""Checks that use NCCL's own sums."""
NAMES = (*ALONE, *PROCESSES, *TOGETHER)


def run_checks(setting: Setting, seconds: float = SECONDS, names: Container[str] = NAMES) -> Iterator[CheckResult]:
    """Run the named checks, each in newly forked processes. With a single rank, checks for several ranks are left out.

    This process must not touch a device: its forks could not use CUDA.
    """
    set_determinism(0)  # import torch's slow parts once, before forking
    for name, alone in ALONE.items():
        if name not in names:
            continue
        yield _forked(name, [_on_one_device(alone, setting)], seconds)[0]
    for name, compute in PROCESSES.items():
        if name in names:
            yield _repeated(name, functools.partial(compute, setting), setting.ranks, seconds)
    for name, check in TOGETHER.items() if setting.ranks > 1 else ():
        if name not in names:
            continue
        # A store for each check, so that its ranks find no keys of an earlier check.
        with tempfile.TemporaryDirectory(prefix="bitproof-gpu-") as folder:
            body = _on_a_rank(check, setting, f"{folder}/store", native=name in NATIVE)
            yield _forked(name, [body] * setting.ranks, seconds)[0]


def _on_one_device(check: Callable[[Setting], Answer], setting: Setting) -> Callable[[int], Answer]:
    return lambda rank: check(setting)


def _on_a_rank(
    check: Callable[[Setting, int], Answer], setting: Setting, store: str, native: bool
) -> Callable[[int], Answer]:
    return lambda rank: _answer_in_groups(setting, rank, store, check, native)


def _answer_in_groups(
    setting: Setting, rank: int, store: str, check: Callable[[Setting, int], Answer], native: bool
) -> Answer:
    from torch.distributed import FileStore

    from bitproof.reference.parallel.mesh import Mesh, join_groups, leave_groups

    device, backend = setting.device_of(rank), "gloo" if setting.device == "cpu" else "nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Before the groups are joined: NCCL reads its variables when it starts.
        pin_nccl(os.environ, native=native)
        if setting.shared_gpus:
            allow_shared_gpu(os.environ, rank)
    # An even number of ranks also gets groups of a part of the ranks, which are checked, too.
    mesh = Mesh(rank, Parallelism(world_size=setting.ranks, ep=1 if setting.ranks % 2 else 2), device)
    board: Any = SimpleNamespace(write=together.note)
    rooms = FileStore(store, setting.ranks)
    join_groups(mesh, device, rooms, backend=backend, timeout=SECONDS, native=native, board=board)
    answer = check(setting, rank)
    # No rank leaves while another still needs it for its last collective.
    torch.distributed.barrier()
    leave_groups()
    return answer


def _repeated(name: str, compute: Callable[[int], Answer], ranks: int, seconds: float) -> CheckResult:
    said: list[str] = []
    for _ in range(processes.GENERATIONS):
        result, found = _forked(name, [compute] * ranks, seconds)
        if not result.is_ok:
            return result
        # One list for all starts: a second start must agree with the first as well.
        said += found
    unlike = processes.first_unlike(said)
    text = f"{len(said)} processes: {said[0]}"
    return CheckResult(name=name, is_ok=unlike is None, found=unlike or text)


def _forked(name: str, bodies: list[Callable[[int], Answer]], seconds: float) -> tuple[CheckResult, list[str]]:
    """Run each function of `bodies` in a forked process. Returns (result of the check, findings of each process).

    If processes fail, the result has the first failure, and the list of findings is empty.
    """
    forked = [fork(functools.partial(_answer_from_fork, name, body, rank)) for rank, body in enumerate(bodies)]
    answers: dict[int, Answer] = {}
    limit = time.monotonic() + seconds
    try:
        with Watch(forked) as watch:
            while not watch.is_over and time.monotonic() < limit:
                for process, line in watch.look(0.2):
                    answered: CheckResult = framing.read(line, CheckResult)
                    answers[forked.index(process)] = answered.is_ok, answered.found
        # Before the kill below, which gives every process a status.
        late = [rank for rank, process in enumerate(forked) if process.status is None]
    finally:
        for process in forked:
            process.kill()
    # A rank that raised has answered; a rank without an answer has crashed or is late.
    found = [answers.get(rank) for rank in range(len(bodies))]
    for rank, answer in enumerate(found):
        where = f"rank {rank}: " if len(bodies) > 1 else ""
        if answer is None:
            how = f"no answer within {seconds:g} s" if rank in late else "its process ended without an answer"
            return CheckResult(name=name, is_ok=False, found=where + how), []
        if not answer[0]:
            return CheckResult(name=name, is_ok=False, found=where + answer[1]), []
    texts = [answer[1] for answer in found if answer is not None]
    return CheckResult(name=name, is_ok=True, found=texts[0]), texts


def _answer_from_fork(name: str, body: Callable[[int], Answer], rank: int, send: Send) -> None:
    set_determinism(0)
    try:
        is_ok, found = body(rank)
    except Exception as error:
        # Into the log; the answer has only the first line.
        traceback.print_exc()
        is_ok, found = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    send(CheckResult(name=name, is_ok=bool(is_ok), found=str(found)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", type=int, help="file descriptor to answer through")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--shared-gpus", type=int, help="the GPUs that ranks share")
    parser.add_argument("--name", action="append", required=True, help="a check to run")
    options = parser.parse_args()
    # The programs that checks start must not hold this end open: the reader would wait for them.
    os.set_inheritable(options.answers, False)
    max_bytes = _MAX_BYTES_SHARED if options.shared_gpus else Setting.max_bytes
    setting = Setting(device=options.device, ranks=options.ranks, shared_gpus=options.shared_gpus, max_bytes=max_bytes)
    for found in run_checks(setting, names=options.name):
        send(options.answers, found)

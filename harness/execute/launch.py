"""Run cases: record both systems, compare, judge, and find the cause of a difference.

The caller's process does not load torch. A host process does all work that requires torch; see
`harness.execute.host.main`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bitproof.harness.case import Case
from bitproof.harness.checks.power_modules import power_module
from bitproof.harness.errors import CaseError
from bitproof.harness.execute.precompiled import check_precompiled
from bitproof.harness.execute.session import Client, Session
from bitproof.harness.execute.transport import follow, follows, open_client
from bitproof.harness.graph.graph_options import check_extra_passes
from bitproof.harness.machine.describe import commit, describe_machine
from bitproof.harness.machine.devices import Placement, lease_gpus
from bitproof.harness.options import DeviceRequest, OnEvent, RunOptions
from bitproof.harness.records import CaseResult
from bitproof.harness.systems.registry import BUILT_IN, check_preload, check_system

if TYPE_CHECKING:
    from bitproof.harness.execute.case_run import CaseRun


def run_cases(
    cases: Iterable[Case], options: RunOptions, run_dir: Path, on_event: OnEvent = lambda event: None
) -> Iterator[CaseResult]:
    """Run cases in order, and yield each result as soon as its case is judged.

    - The host process starts at the call, not at the first `next()`. All processes end if the iterator is closed, or at
      an interrupt or SIGTERM.
    - `on_event` is always called in the caller's thread.
    - With concurrent cases, results are in the order in which the cases are judged.
    - Under torchrun, rank 0 runs the cases on all ranks, and the other ranks yield the same results.

    Before any rank has started, these errors are raised:

    - UsageError for a fault that cannot fire, and for a missing system or extra pass.
    - UsageError for concurrent cases if cases must run in sequence.
    - CaseError if the option `names` is given for a built-in candidate, which always uses the names of the reference.
    - CaseError for a case that does not fit the machine.
    """
    cases = list(cases)
    for check in options.active:
        check.refuse(options)
    if options.inject is not None:
        from bitproof.harness.disturb.faults import check_fault, parse_fault

        fault = parse_fault(options.inject)
        for case in cases:
            check_fault(fault, case)
    for case in cases:
        # Usage errors are found here, before the host starts.
        check_precompiled(case, options)
        check_extra_passes(options.extra_passes, case)
    for system in dict.fromkeys(system for case in cases for system in (case.reference, case.candidate)):
        check_system(system)
    for case in cases:
        check_preload(case)
    for case in cases if options.names else ():
        _refuse_built_in_candidate(case)
    num_at_once = 1
    if options.jobs != 1:
        num_at_once = power_module("side_by_side.concurrency").plan_concurrency(cases, options).num_cases
    # All checks come first, so every rank of torchrun raises the same error, whether it leads or follows.
    if follows():
        return follow(cases, Path(run_dir), options)
    # The generator's first item is None: advancing to it starts the host now, and not at the caller's first request.
    results = _run_cases(cases, options, Path(run_dir), on_event, num_at_once)
    next(results)  # starts the host; all later items are results
    return cast(Iterator[CaseResult], results)


def environment(device: DeviceRequest = "auto") -> dict[str, Any]:
    """Return facts about this machine for the report, without importing torch.

    `commit` in the result is the variable GITHUB_SHA, which GitHub Actions sets, or else the working directory's
    commit. `device` is the requested device.
    """
    found = os.environ.get("GITHUB_SHA") or commit()
    return describe_machine() | {"device": device} | ({"commit": found} if found else {})


def record_system(
    case: Case,
    system: str,
    options: RunOptions,
    out: Path,
    run_dir: Path,
    on_event: OnEvent = lambda event: None,
    then: Callable[[CaseRun], object] = lambda run: None,
) -> Path:
    """Record a system once, into the folder `out`, and return that folder. If the run fails, raise its error.

    `then(run)` is called after the recording, while the host process still exists, for example to log calls. Under
    torchrun, rank 0 runs the system on all ranks.
    """
    check_system(system)
    if follows():
        for _ in follow([case], Path(run_dir), options):
            pass
        return Path(out)
    with open_client([case], Path(run_dir), options) as client:
        placement = client.place(case)
        with lease_gpus(placement, case.parallelism.world_size):
            from bitproof.harness.execute.case_run import CaseRun  # while the host imports torch

            run = CaseRun(replace(case, reference=system), placement, client, options, on_event)
            run.record("reference", "first", out=Path(out))
            then(run)
    return Path(out)


def _refuse_built_in_candidate(case: Case) -> None:
    if case.candidate in BUILT_IN:
        raise CaseError(
            f"the candidate of case {case.name} has the reference's own names, so it has none to map",
            expected="a candidate of your own: --names maps the candidate's names alone",
            found=f"candidate {case.candidate}",
            fix="leave the case out with -k, or give --candidate",
        )


def _run_cases(
    cases: list[Case], options: RunOptions, run_dir: Path, on_event: OnEvent, num_cases: int
) -> Generator[CaseResult | None, None, None]:
    with open_client(cases, run_dir, options) as client:
        # All hosts start before the first yield, so that they import torch at the same time.
        others = [cast(Session, client).another() for _ in range(num_cases - 1)]
        yield None
        # While the host imports torch, this process loads its own later imports.
        from bitproof.harness.execute.case_run import CaseRun

        def judge(case: Case, placement: Placement, own: Client, on_event: OnEvent) -> CaseResult:
            with lease_gpus(placement, case.most_ranks):
                return CaseRun(case, placement, own, options, on_event).result()

        todo = list(zip(cases, [client.place(case) for case in cases], strict=True))
        if others:
            judge_at_once = power_module("side_by_side.concurrency").judge_at_once
            yield from judge_at_once([cast(Session, client), *others], todo, judge, on_event)
            return
        for case, placement in todo:
            result = judge(case, placement, client, on_event)
            client.announce(result)
            yield result

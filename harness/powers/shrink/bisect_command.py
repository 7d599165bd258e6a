"""`bitproof bisect`: searches for the first pass that changes bits, and writes a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.commands.following import follow_rank_0
from bitproof.harness.commands.localize import any_difference
from bitproof.harness.compare.outcome import complete
from bitproof.harness.disturb.faults import check_fault, parse_fault
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.launch import environment
from bitproof.harness.execute.transport import follows, open_client
from bitproof.harness.files.folder_names import file_name
from bitproof.harness.graph.graph_options import check_extra_passes
from bitproof.harness.machine.devices import lease_gpus
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.shrink.bisect_passes import Bisector, check_case
from bitproof.harness.powers.shrink.bisection_report import describe_answer, describe_probes, render
from bitproof.harness.powers.shrink.records import Bisection, Probe
from bitproof.harness.records import Report, Verdict
from bitproof.harness.report.progress import make_progress
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED, exit_status
from bitproof.harness.report.write import finish_run, prepare_run_dir
from bitproof.harness.runtime import interrupts

BISECT_FILE = "bisect.json"


def bisect(case: Case, options: RunOptions, report_dir: Path, replay: Sequence[str] = ()) -> int:
    """Find the pass that first changes a case's bits, print and write the result, and return the exit status.

    - 0: every bit agrees.
    - 1: the pass was found, or tracing without any pass already differs.
    - 3: the search had no result.

    Raises UsageError if options or case are wrong, before anything runs.
    """
    options = checked_options(case, options)
    # Under torchrun only rank 0 searches.
    if follows():
        return follow_rank_0(case, options, report_dir)
    return search(case, options, report_dir, replay)[0]


def checked_options(case: Case, options: RunOptions) -> RunOptions:
    """Return the options for the runs of a search: `options`, with two changes that save time.

    Raises UsageError or CaseError if options or case are wrong.
    """
    check_case(case)
    check_extra_passes(options.extra_passes, case)
    if options.inject is not None:
        check_fault(parse_fault(options.inject), case)
    # Causes are not verified, and a system runs a second time only if the two differ, and only up to the difference.
    return replace(options, control="up_to_difference", verify=False)


def search(case: Case, options: RunOptions, report_dir: Path, replay: Sequence[str]) -> tuple[int, Bisection]:
    # Interrupts are let in only while cases run, so the results so far are always reported.
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        print(f"bitproof: bisect {case.name}, report in {run_dir}", flush=True)
        found = _search(case, options, run_dir)
        interrupts.too_late()
        return _finish(found, case, options, run_dir, replay), found


def _search(case: Case, options: RunOptions, run_dir: Path) -> Bisection:
    def show(probe: Probe) -> None:
        print(f"{probe.applied}, against {probe.reference}: {probe.verdict} in {probe.seconds:.1f} s", flush=True)

    found = Bisection()
    try:
        with interrupts.let_in(), open_client([case], run_dir, options) as client:
            placement = client.place(case)
            with lease_gpus(placement, case.parallelism.world_size), make_progress(1) as progress:

                def run_of(case: Case, options: RunOptions) -> CaseRun:
                    return CaseRun(case, placement, client, options, progress.on_event)

                # The search fills `found` as it proceeds, so an interrupt keeps the results so far.
                bisector = Bisector(case, options, run_of, show)
                found = bisector.found
                bisector.search()
    except interrupts.STOPS:
        found.problem = "interrupted"
    return found


def _finish(found: Bisection, case: Case, options: RunOptions, run_dir: Path, replay: Sequence[str]) -> int:
    status = status_of(found)
    # The status of bisect is not that of the case: a DIFFERENT case may have no pass to blame.
    results = complete([any_difference(case)], filter(None, [found.result]), found.problem or "")
    report = Report(
        run_id=run_dir.name,
        exit_status=exit_status(results),
        environment=environment(options.device),
        cases=results,
        options=tuple(replay),
        remarks=replace(options, control="up_to_difference").remarks(),
    )
    answer = list(describe_answer(found, options.inject, dumped_diff(found, run_dir, case.name), replay, case.name))
    print("\n".join(["", *describe_probes(found), "", *answer]))
    more = {BISECT_FILE: render(found, case.name, status, options.inject, answer)}
    return finish_run(report, run_dir, status, more, shown=BISECT_FILE)


def status_of(found: Bisection) -> int:
    """Return the exit status: 0 if nothing differs, 1 if the pass was found or tracing alone differs, otherwise 3."""
    if found.problem is None and found.result is not None and found.result.verdict == Verdict.EQUAL:
        return SUCCESS
    return UNJUDGED if found.blamed is None else UNEXPECTED


def dumped_diff(found: Bisection, run_dir: Path, name: str) -> Path | None:
    # Files of graphs begin with the number of the pass, as in 03-chunk.diff.
    files = sorted((run_dir / "graphs" / name).glob(f"??-{file_name(found.blamed or '')}.diff"))
    return files[0] if files else None

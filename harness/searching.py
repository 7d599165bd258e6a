"""One `bitproof localize` or `bitproof bisect`, from the report folder to the exit status."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.compare.outcome import complete
from harness.devices import lease_gpus
from harness.errors import UsageError
from harness.faults import check_fault, parse_fault
from harness.graph.options import check_extra_passes
from harness.launch import environment
from harness.localize.bisect_passes import TRACE, Bisection, Bisector, Probe, any_difference, check_case
from harness.records import SCHEMA, CaseResult, Divergence, Report, Verdict
from harness.report.progress import make_progress
from harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED, exit_status
from harness.report.text import CASE_FILE, blame, locate, outcome
from harness.report.write import prepare_run_dir, write_atomically, write_run
from harness.run import run_and_report
from harness.run_options import RunOptions
from harness.session import open_session

BISECT_FILE = "bisect.json"
LOCALIZE_FILE = "localize.json"


def localize(case: Case, options: RunOptions, report_dir: Path, replay: Sequence[str] = ()) -> int:
    """Run a case, tell all that is known of its first difference, and return the exit status.

    0 where every bit agrees, 1 where not, whatever the case expects; 3 where it could not be judged.
    """

    def tell(report: Report, run_dir: Path) -> None:
        [result] = report.cases
        write_atomically(run_dir / LOCALIZE_FILE, _to_text(_localized(result)))
        print("\n".join(tell_story(result)), flush=True)

    return run_and_report([any_difference(case)], options, report_dir, replay, tell=tell)


def bisect(case: Case, options: RunOptions, report_dir: Path, replay: Sequence[str] = ()) -> int:
    """Find the pass that first changes a case's bits, show and write what was found, and return the exit status.

    0 where every bit agrees, 1 where the pass was found or where tracing alone differs, 3 where it could not be told.
    Raises UsageError when the call or the case is wrong, before anything runs.
    """
    from harness import torchrun

    if torchrun.is_torchrun():
        raise UsageError(
            "bisect starts ranks of its own", expected="bitproof bisect", found="bitproof bisect under torchrun"
        )
    check_case(case)
    check_extra_passes(options.extra_passes, case)
    if options.inject is not None:
        check_fault(parse_fault(options.inject), case)
    options = replace(options, control="when_different")
    run_dir = prepare_run_dir(report_dir)
    print(f"bitproof: bisect {case.name}, report in {run_dir}", flush=True)
    found = _search(case, options, run_dir)
    status = status_of(found)
    where = {"device": options.device, "backend": "unknown"}
    results = complete([any_difference(case)], filter(None, [found.result]), found.problem or "", **where)
    report = Report(
        run_id=run_dir.name,
        exit_status=exit_status(results),
        environment=environment(options.device),
        cases=results,
        options=tuple(replay),
    )
    write_run(report, run_dir)
    answer = list(tell_answer(found, options, run_dir, replay, case.name))
    write_atomically(run_dir / BISECT_FILE, _to_text(_bisected(found, case, status, options, answer)))
    print("\n".join(["", *tell_probes(found), "", *answer]))
    print(f"report: {run_dir / BISECT_FILE}", flush=True)
    return status


def _search(case: Case, options: RunOptions, run_dir: Path) -> Bisection:
    """Search until the end, an error or an interrupt; what was found until then counts."""

    def show(probe: Probe) -> None:
        print(f"{probe.applied}, against {probe.reference}: {probe.verdict} in {probe.seconds:.1f} s", flush=True)

    with open_session(run_dir, options) as session:
        placement = session.place(case)
        with lease_gpus(placement, case.parallelism.world_size), make_progress(1) as progress:
            bisector = Bisector(case, placement, session, options, progress.on_event, show)
            try:
                bisector.search()
            except (KeyboardInterrupt, SystemExit):  # a session turns SIGTERM into SystemExit
                bisector.found.problem = "interrupted"
    return bisector.found


def status_of(found: Bisection) -> int:
    """0 where nothing differs, 1 where the difference has an answer, 3 where not."""
    if found.problem is None and found.result is not None and found.result.verdict == Verdict.EQUAL:
        return SUCCESS
    return UNJUDGED if found.blamed is None else UNEXPECTED


def tell_probes(found: Bisection) -> Iterator[str]:
    """The runs as a table."""
    from tabulate import tabulate

    rows = [
        (probe.applied, probe.reference, probe.verdict.value, f"{probe.seconds:.1f}")
        for probe in (*found.probes, *found.region_probes)
    ]
    headers = ("applied", "reference", "verdict", "seconds")
    yield from tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", "left", "right")).splitlines()


def tell_answer(
    found: Bisection, options: RunOptions, run_dir: Path, replay: Sequence[str], name: str
) -> Iterator[str]:
    """What the search came to, in sentences."""
    if found.blamed is None:
        yield "nothing to bisect: EQUAL" if found.problem is None else f"not found: {found.problem}"
        if found.suspects:
            yield f"it is one of: {', '.join(found.suspects)}"
        return
    if found.blamed != TRACE:
        yield (
            f"{found.blamed} is to blame: the prefix that ends with {found.equal or TRACE} is EQUAL, the one that "
            f"ends with {found.blamed} is DIFFERENT"
        )
    elif options.inject is not None:
        yield f"no pass: the difference is there without any, tracing alone included, as {options.inject} is injected"
    else:
        yield "trace is to blame: the traced graph is DIFFERENT before any pass"
    if found.region:
        yield f"region: {found.region} is DIFFERENT when it alone is chunked"
    elif found.region_problem:
        yield f"region: {found.region_problem}"
    if found.divergence:
        yield f"first divergence: {locate(found.divergence)}"
        if blamed := blame(found.divergence):
            yield f"to blame in it: {blamed}"
    if diff := _dumped(found, run_dir, name):
        yield f"what the pass did: {diff}"
        selection = [] if CASE_FILE in replay else ["-k", name]
        yield f"  again: {shlex.join(['bitproof', 'run', *selection, *replay, '--dump-graphs'])}"


def _dumped(found: Bisection, run_dir: Path, name: str) -> Path | None:
    """The diff of the blamed pass, as the case's own run wrote it; a backend has none."""
    files = sorted((run_dir / "graphs" / name).glob(f"??-{found.blamed}.diff"))
    return files[0] if files else None


def _bisected(found: Bisection, case: Case, status: int, options: RunOptions, answer: list[str]) -> dict[str, Any]:
    is_injected = found.blamed == TRACE and options.inject is not None
    return {
        "schema": SCHEMA,
        "case": case.name,
        "exit_status": status,
        "verdict": found.result.verdict if found.result else None,
        "pass": None if is_injected else found.blamed,
        "equal": found.equal,
        "suspects": list(found.suspects),
        "region": found.region,
        "probes": [dataclasses.asdict(probe) for probe in found.probes],
        "region_probes": [dataclasses.asdict(probe) for probe in found.region_probes],
        "first_divergence": found.divergence.to_dict() if found.divergence else None,
        "problem": found.problem,
        "region_problem": found.region_problem,
        "answer": answer,
    }


def _localized(result: CaseResult) -> dict[str, Any]:
    divergence = result.first_divergence
    return {
        "schema": SCHEMA,
        "case": result.case.name,
        "verdict": result.verdict,
        "reference": result.case.reference,
        "candidate": result.case.candidate,
        "first_divergence": divergence.to_dict() if divergence else None,
        "error": result.error,
    }


def tell_story(result: CaseResult) -> Iterator[str]:
    """All that is known of a case's first difference."""
    divergence = result.first_divergence
    if divergence is None:
        nothing = (
            "nothing to localize: EQUAL" if result.verdict == Verdict.EQUAL else f"no difference: {result.verdict}"
        )
        yield f"{result.case.name}: {nothing}"
        return
    yield f"{result.case.name}: {outcome(result)}"
    yield f"  first divergence: {locate(divergence)}{_extent(divergence)}"
    if blamed := blame(divergence):
        yield f"  to blame: {blamed}"
        yield f"  on ranks: {divergence.operator_ranks}"
        if divergence.output_elements is not None:
            yield f"  its output{_extent(divergence, 'output_')}"
    else:
        yield "  to blame: no operator call explains it"
    if divergence.neighbours:
        yield ""
        yield f"  calls of rank {divergence.operator_rank} around it, in execution order:"
        yield from (f"  {line}" for line in _tell_neighbours(divergence.neighbours))


def _extent(divergence: Divergence, prefix: str = "") -> str:
    """How much of a tensor differs, by how much, and the bits of its first such element."""
    names = ("elements_differing", "elements", "max_ulp", "reference_bits", "candidate_bits")
    differing, elements, max_ulp, reference, candidate = (getattr(divergence, f"{prefix}{name}") for name in names)
    if elements is None:
        return ""
    ulp = "" if max_ulp is None else f", at most {max_ulp} ULP"
    return f": {differing} of {elements} elements{ulp}, {reference} against {candidate} first"


def _tell_neighbours(neighbours: Sequence[dict[str, Any]]) -> Iterator[str]:
    from tabulate import tabulate

    rows = [
        (
            ">" if call["is_culprit"] else "",
            call["operator"],
            call["module"] or "the step itself",
            call["direction"] + ("" if call["chunk"] is None else f", chunk {call['chunk']}"),
            "agrees" if call["agrees"] else "DIFFERS",
            call["source"] or "",
        )
        for call in neighbours
    ]
    yield from tabulate(rows, tablefmt="plain", disable_numparse=True).splitlines()


def _to_text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, allow_nan=False) + "\n"

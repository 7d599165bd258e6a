"""Runs `bitproof faults`, from preparing the report folder to the exit status.

A fault is killed if its case becomes DIFFERENT or fails; otherwise it survives. A harmless rewrite is flagged if its
case becomes DIFFERENT.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bitproof.harness.case import Case
from bitproof.harness.compare.outcome import complete
from bitproof.harness.disturb.faults import Entry
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.launch import environment
from bitproof.harness.execute.transport import open_client
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.machine.devices import lease_gpus
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.mutants.fault_runs import FaultRuns, shows_faults
from bitproof.harness.powers.mutants.report import (
    BEGIN,
    END,
    line_of,
    read_found,
    render_json,
    render_markdown,
    summary_lines,
    table_into,
)
from bitproof.harness.records import CaseResult, FaultOutcome, FaultsFound, Report
from bitproof.harness.report.progress import make_progress
from bitproof.harness.report.status import UNJUDGED, exit_status, faults_status
from bitproof.harness.report.write import finish_run, prepare_run_dir
from bitproof.harness.runtime import interrupts
from bitproof.harness.runtime.sources import own_digest

FAULTS_FILE = "faults.json"
FAULTS_TABLE = "faults.md"


class Page(NamedTuple):
    """A Markdown file into which the table of faults is written. The page shows the command `call` above the table."""

    file: Path
    call: str


Plan = Mapping[str, Sequence[Entry]]


def choose(wanted: Sequence[str], families: Sequence[str] = ()) -> list[Entry]:
    """Return the faults of the catalogue with these names or families; all faults if none are given.

    Raises UsageError for an unknown name.
    """
    known = {*CATALOGUE, *(entry.family for entry in CATALOGUE.values())}
    if unknown := [name for name in (*wanted, *families) if name not in known]:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise UsageError(
            f"no fault and no family is named {', '.join(unknown)}",
            expected="a name that `bitproof faults --list` shows",
            found=", ".join(unknown),
            fix=f"did you mean {close[0]}?" if close else None,
        )
    chosen = [*wanted, *families]
    return [entry for entry in CATALOGUE.values() if not chosen or {entry.name, entry.family} & set(chosen)]


def list_faults(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        needs = "; ".join(need.says for need in (*entry.all_needs, *entry.sees))
        yield f"{entry.name} ({entry.family}): {entry.says}" + (f" [{needs}]" if needs else "")


def homes(entry: Entry, cases: Sequence[Case]) -> list[Case]:
    """Return the cases to which a fault applies: first those that should detect the fault, then those that cannot."""
    able = [case for case in cases if not entry.unmet(case)]
    return sorted(able, key=lambda case: bool(entry.hidden(case)))


def faults(
    cases: Sequence[Case],
    entries: Sequence[Entry],
    options: RunOptions,
    report_dir: Path,
    *,
    everywhere: bool,
    replay: Sequence[str] = (),
    page: Page | None = None,
    resume: Path | None = None,
) -> int:
    """Inject faults into cases, print and write each outcome, and return the exit status.

    - `everywhere`: inject each fault into each case to which it applies. Otherwise inject it only into the first case
      that should detect it.
    - `resume`: the folder of an earlier call, whose outcomes are reused.
    - `page`: a Markdown file into which the table of results is written, too.

    `status_of` explains the exit status.
    """
    # Before anything runs: the faults take hours, and the page is written at their end.
    _check_page(page)
    found = FaultsFound(own_digest=own_digest())
    if resume is not None:
        found = read_found(resume / FAULTS_FILE).of_today(own_digest())
        # With `everywhere` a fault may be judged in some cases only, so each case is asked below.
        entries = [entry for entry in entries if everywhere or not found.has(entry.name)]
    # The CPU seconds of this call, after those of the call that it continues.
    spent = [found.cpu_seconds or 0.0]
    with interrupts.raising(), interrupts.held():
        run_dir = prepare_run_dir(report_dir)
        print(f"bitproof: {len(entries)} faults in {len(cases)} cases, report in {run_dir}", flush=True)
        results: list[CaseResult] = []
        try:
            with interrupts.let_in(), open_client(cases, run_dir, options) as client, make_progress(1) as progress:
                plan = {entry.name: homes(entry, cases) for entry in entries}
                lost = [entry for entry in entries if not plan[entry.name] and not found.has(entry.name)]
                found.outcomes += map(_without_home, lost)
                for case in cases:
                    # Without `everywhere`, a fault has a single home: the first case of its plan.
                    mine = [x for x in entries if case in (plan[x.name] if everywhere else plan[x.name][:1])]
                    mine = [x for x in mine if not found.has(x.name, case.name)]
                    if not mine:
                        continue
                    placement = client.place(case)
                    # All faults of a case run in turn on the same GPUs.
                    with lease_gpus(placement, case.parallelism.world_size):
                        runs = FaultRuns(case, placement, client, options, progress.on_event)
                        results.append(runs.begin())
                        spent.append(runs.cpu_seconds)
                        # A case that differs without a fault cannot show one.
                        if not shows_faults(results[-1]):
                            continue
                        for entry in mine:
                            outcome = runs.outcome(entry)
                            spent.append(outcome.cpu_seconds)
                            print(line_of(outcome), flush=True)
                            later = [x for x in plan[entry.name] if cases.index(x) > cases.index(case)]
                            # The case cannot take this fault after all, e.g. its graph has no such call: try the next
                            # case.
                            if outcome.status == "not struck" and later and not everywhere:
                                plan[entry.name] = later
                            else:
                                found.outcomes.append(outcome)
        except interrupts.STOPS:
            found.problem = "interrupted"
        interrupts.too_late()
        found.cpu_seconds = sum(spent)
        return _finish(found, cases, results, options, run_dir, replay, page)


def _check_page(page: Page | None) -> None:
    if page is None:
        return
    try:
        text = read_plain(page.file).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the page {page.file}", expected="a file of text", found=str(error)) from error
    if table_into(text, FaultsFound(), {}, "") is None:
        raise UsageError(
            f"the page {page.file} has no place for a table of faults",
            expected=f"a line {BEGIN}, and a later one {END}",
        )


def _without_home(entry: Entry) -> FaultOutcome:
    needs = "; ".join(need.says for need in entry.all_needs)
    return FaultOutcome(
        fault=entry.name,
        family=entry.family,
        is_fault=entry.is_fault,
        says=entry.says,
        source=entry.source,
        case="none",
        ranks=0,
        steps=0,
        status="not struck",
        reason=f"none of the cases can take it: it needs {needs}",
    )


def _finish(
    found: FaultsFound,
    cases: Sequence[Case],
    results: Sequence[CaseResult],
    options: RunOptions,
    run_dir: Path,
    replay: Sequence[str],
    page: Page | None,
) -> int:
    # A case for which no fault was planned did not run, and must not become UNVERIFIED.
    ran = {result.case.name for result in results}
    judged = [case for case in cases if case.name in ran]
    complete_results = complete(judged, list(results), found.problem or "")
    report = Report(
        run_id=run_dir.name,
        exit_status=exit_status(complete_results, faults=found.score),
        environment=environment(options.device),
        cases=complete_results,
        options=tuple(replay),
        remarks=options.remarks(),
        faults=found.score,
    )
    print("\n".join(["", *summary_lines(found)]))
    _drop_empty_logs(run_dir)
    if page is not None:
        text = read_plain(page.file).decode()
        page.file.write_text(table_into(text, found, report.environment, page.call) or text)
    more = {FAULTS_FILE: render_json(found), FAULTS_TABLE: render_markdown(found)}
    return finish_run(report, run_dir, status_of(found, results), more, shown=FAULTS_TABLE)


def status_of(found: FaultsFound, results: Sequence[CaseResult]) -> int:
    """Return the exit status of `bitproof faults`.

    - 3: a planned fault was not judged, nothing was measured, or a case differs without any fault.
    - 1: a fault was not detected, or a harmless rewrite was reported as a difference.
    - 0: otherwise.
    """
    if not found.outcomes or not all(map(shows_faults, results)):
        return UNJUDGED
    return faults_status(found.score)


def _drop_empty_logs(run_dir: Path) -> None:
    # Each run with a fault has its own logs, and most are empty.
    for path in (run_dir / "logs").rglob("*.log"):
        if not path.stat().st_size:
            path.unlink()

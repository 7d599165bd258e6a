"""`bitproof merge`: merges the run folders of a run that was split into shards, a shard per machine.

1. Read the report of every shard. An unreadable report counts as missing.
2. Raise an error unless the folders are different shards of the same run.
3. Put the cases into the order of the run. A case without a result is UNVERIFIED.
4. Copy the logs, recordings and graphs of each case into a new run folder, and write its report.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitproof.harness.compare.outcome import complete
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.execute.run_folder import read_run
from bitproof.harness.powers.merge.copying import CopyCapacity, copy_file, copy_folder, opened_folder
from bitproof.harness.records import Report, Score, Shard
from bitproof.harness.report import terminal
from bitproof.harness.report.status import exit_status, worst
from bitproof.harness.report.write import prepare_run_dir, write_run
from bitproof.harness.runtime import interrupts

Reports = list[tuple[Path, Report]]
_FOLDERS_OF_CASES = ("logs", "recordings", "graphs")


def merge(folders: Sequence[Path], report_dir: Path) -> int:
    """Merge run folders into a new folder under `report_dir`, and return the worst exit status.

    A folder may be that of a run of `bitproof faults`: its score goes into the report, and counts for the status.

    After an error, nothing is written. Raises:

    - UsageError if folders are no shards, are not of the same run, or contain a shard twice.
    - RecordingError if no folder can be read, or if two contain the same case.
    """
    reports: Reports = []
    for folder in folders:
        try:
            reports.append((folder, read_run(folder)))
        except RecordingError as error:
            print(f"bitproof: {folder} counts as missing\n{error}", file=sys.stderr)
    score, reports = _score_of(reports)
    if not reports:
        raise RecordingError("no shard's report can be read", found=", ".join(map(str, folders)))
    _refuse_unlike_shards(reports)
    _refuse_double_claims(reports)
    with interrupts.held():
        # An interrupt is let in only while files are copied, where the new folder can be removed again.
        return _merge(reports, score, prepare_run_dir(report_dir))


def _score_of(reports: Reports) -> tuple[Score | None, Reports]:
    """Return a pair: the score of the run of `bitproof faults` (or None), and all other reports.

    The cases of that run are left out, because they ran with faults. Raises UsageError for two such runs.
    """
    measured = [(folder, report.faults) for folder, report in reports if report.faults is not None]
    if len(measured) > 1:
        raise UsageError(
            "more than one run of faults",
            expected="at most one folder that `bitproof faults` made",
            found=" and ".join(str(folder) for folder, _ in measured),
            fix="leave out all but one of them",
        )
    return next((score for _, score in measured), None), [each for each in reports if each[1].faults is None]


def _merge(reports: Reports, score: Score | None, run_dir: Path) -> int:
    try:
        merged = _join(run_dir.name, [report for _, report in reports], score)
        # Printed first, so that a failure to copy or write does not hide the verdicts.
        terminal.print_report(merged)
        with interrupts.let_in():
            for folder, report in reports:
                _copy_files(folder, report, run_dir)
        write_run(merged, run_dir)
    except OSError as error:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise RecordingError(
            "the shards' files cannot be put together", found=error.strerror or str(error), where=str(run_dir)
        ) from error
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    # The report exists, so the command must end with its exit status.
    interrupts.too_late()
    print(f"report: {run_dir / 'report.md'}", flush=True)
    return merged.exit_status


def _refuse_unlike_shards(reports: Reports) -> None:
    # The folder of each shard so far, by the shard's index.
    seen: dict[int, Path] = {}
    first_folder, first = reports[0]
    for folder, report in reports:
        if report.shard is None:
            raise UsageError(
                f"{folder} holds a whole run, not a shard",
                expected="folders that `bitproof run --shard i/n` made",
                found="a report without a shard",
            )
        assert first.shard is not None
        # Equal selections include every setting of every case, so shards with other options for cases are refused,
        # too.
        if report.shard.count != first.shard.count or report.shard.selection != first.shard.selection:
            raise UsageError(
                "these are not shards of one run",
                expected=f"{_describe(first.shard)} as in {first_folder}",
                found=f"{_describe(report.shard)} in {folder}",
                fix="give every shard the same -k, --steps, --world-size and other changes to its cases",
            )
        if other := seen.get(report.shard.index):
            raise UsageError(
                f"shard {report.shard} is there twice",
                expected="each shard once",
                found=f"{other} and {folder}",
                fix="leave out one of them",
            )
        seen[report.shard.index] = folder


def _describe(shard: Shard) -> str:
    names = ", ".join(case.name for case in shard.selection[:3])
    more = len(shard.selection) - 3
    return f"{shard.count} shards of {names}{f' and {more} more cases' if more > 0 else ''}"


def _refuse_double_claims(reports: Reports) -> None:
    seen: dict[str, Path] = {}
    for folder, report in reports:
        assert report.shard is not None
        selection = {case.name: case for case in report.shard.selection}
        # A case that a shard left out counts as claimed: no other shard may have run it.
        for name in [result.case.name for result in report.cases] + list(report.not_run):
            if other := seen.get(name):
                raise RecordingError(
                    f"more than one result for case {name}", expected="one", found=f"{other} and {folder} have one"
                )
            seen[name] = folder
            if name not in selection:
                raise RecordingError(f"case {name} was not selected", found=f"{folder} has a result for it")
        for result in report.cases:
            if result.case != selection[result.case.name]:
                raise RecordingError(
                    f"case {result.case.name} is not the one that was selected",
                    found=f"{folder} has a result for another case of this name",
                )


def _join(run_id: str, reports: list[Report], score: Score | None) -> Report:
    shards = [report.shard for report in reports if report.shard is not None]
    selection, count = shards[0].selection, shards[0].count
    missing = sorted(set(range(1, count + 1)) - {shard.index for shard in shards})
    names = ", ".join(f"{index}/{count}" for index in missing)
    if names:
        print(f"bitproof: missing shards: {names}", file=sys.stderr)
    reason = "no shard has a result for this case" + (f"; missing shards: {names}" if names else "")
    # If shards ran with different options, each case keeps those of its shard, since its replay needs them.
    options = _agreed("options", {str(report.shard): list(report.options) for report in reports})
    results = [
        result if isinstance(options, list) else replace(result, options=report.options)
        for report in reports
        for result in report.cases
    ]
    not_run = {name: why for report in reports for name, why in report.not_run.items()}
    # Cases that no shard has, nor left out on purpose, become UNVERIFIED.
    expected = [case for case in selection if case.name not in not_run]
    cases = complete(expected, results, reason)
    return Report(
        run_id=run_id,
        # A shard may have failed for a reason that its cases do not show.
        exit_status=worst([exit_status(cases, faults=score), *(report.exit_status for report in reports)]),
        environment=_join_environments(reports),
        cases=cases,
        options=tuple(options) if isinstance(options, list) else (),
        not_run={case.name: not_run[case.name] for case in selection if case.name in not_run},
        left_out=tuple(case for case in selection if case.name in not_run),
        remarks=tuple(dict.fromkeys(remark for report in reports for remark in report.remarks)),
        faults=score,
    )


def _join_environments(reports: list[Report]) -> dict[str, Any]:
    """Return a single environment for all shards: fact name -> value.

    If shards differ in a fact, such as torch's version, its value is a dict from shard to value.
    """
    # A shard without cases has no environment of ranks.
    ran = {str(report.shard): report.environment for report in reports if report.cases}
    names = dict.fromkeys(name for environment in ran.values() for name in environment)
    return {name: _agreed(name, {shard: environment.get(name) for shard, environment in ran.items()}) for name in names}


def _agreed(what: str, values: Mapping[str, Any]) -> Any:
    """Return the value that all shards share. If the shards differ, print the values, and return them by shard.

    `what` names the value in the printed line.
    """
    first = next(iter(values.values()))
    if all(value == first for value in values.values()):
        return first
    text = ", ".join(f"{value} in {shard}" for shard, value in values.items())
    print(f"bitproof: shards differ in {what}: {text}", file=sys.stderr)
    return values


def _copy_files(folder: Path, report: Report, run_dir: Path) -> None:
    """Copy the files of a shard into the folder of the merged run.

    The folders of its cases keep their paths, such as `logs/moe_seq`. Other files, such as the host's log, go into a
    folder of the shard, such as `logs/shard-2`.
    """
    assert report.shard is not None
    # The folder of a shard may come from anywhere, such as an artifact of a pull request, so it is not trusted.
    names, room = {result.case.name for result in report.cases}, CopyCapacity()
    for kind in _FOLDERS_OF_CASES:
        with opened_folder(folder / kind) as source:
            if source is None:
                continue
            for name in sorted(os.listdir(source)):
                # A folder may have a suffix after the case's name, such as `moe_seq.reference` for graphs.
                if name.partition(".")[0] in names:
                    copy_folder(source, name, run_dir / kind / name, room)
                copy_file(source, name, run_dir / kind / f"shard-{report.shard.index}" / name, room)

"""`bitproof accept`: runs cases, measures how far they differ from baselines (drift), and replaces the baselines.

1. Run the cases like `run --baseline`. Print the drift in ULPs, and the first operator call whose result changed.
2. Store each drifted recording as the new baseline, with the reason, commit and date in its manifest. With `new`, also
   store recordings without a baseline for this environment.

A case that is not as expected keeps its baselines: an error must not become the expected result. If certificates are
given, one of them must explain each system's drift, unless a reason is given, too. With certificates, drift from a
baseline of another environment can be accepted as well.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bitproof.harness.capture.recording_files import read_recording
from bitproof.harness.capture.selection import first_and_last_step
from bitproof.harness.case import Case
from bitproof.harness.checks.explanation import Explainer, Explanation, explainer_of
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.compare.verdict import compare
from bitproof.harness.errors import UsageError
from bitproof.harness.execute.folders import CaseFolders
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.baselines.baseline_folders import name_baseline_sides, store_baseline
from bitproof.harness.powers.baselines.check import BaselineCheck, BaselineOptions
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.powers.baselines.report import baselines_of
from bitproof.harness.records import Accepted, CaseResult, Report, Role, Verdict
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED, worst
from bitproof.harness.runtime import interrupts, launched

_NEW = (BaselineStatus.NO_BASELINE, BaselineStatus.NOT_COMPARABLE)


def accept(
    cases: Sequence[Case],
    options: RunOptions,
    report_dir: Path,
    baseline_dir: Path,
    why: str,
    *,
    new: bool = False,
    replay: Sequence[str] = (),
    certificates: Sequence[Path] = (),
) -> int:
    """Run cases, and replace drifted baselines if a reason (`why`) is given or a certificate explains the drift.

    Returns the exit status:

    - 0 if every baseline equals the new recording afterwards,
    - 1 if a baseline was kept because its case is not as expected, or because its drift is unexplained,
    - 3 if something was not judged.

    With `new`, recordings that have no baseline yet are stored, too. `replay` has the options of the command that
    repeats the run. Raises UsageError without a reason or certificate, and RecordingError for a damaged certificate,
    before anything runs.
    """
    explainers = [explainer_of(path) for path in certificates]
    if not why.strip() and not explainers:
        raise UsageError(
            "a baseline is accepted for a reason",
            expected="--why TEXT, which its manifest keeps, or --certificate FILE",
            found="none",
        )
    # A recording that may become the first baseline of its environment keeps the values of its first and last step, as
    # with `record --baseline`: a later drift can then be measured in ULPs.
    values = dict.fromkeys(pattern for case in cases for pattern in first_and_last_step(case.steps))
    check = BaselineCheck(BaselineOptions(baseline_dir), logs_new=True)
    options = replace(options, values=tuple(values) if new or explainers else (), active=(check,))
    reports: list[Report] = []

    # This hook gets the report; `run_and_report` itself returns only a status.
    def keep(report: Report) -> dict[str, str]:
        reports.append(report)
        return {}

    status = run_and_report(cases, options, report_dir, replay, on_report=keep)
    # Only rank 0 has the recordings, and a run that was refused has no report.
    if not reports or not launched.is_first():
        return status
    [report] = reports
    accepted = Accepted(
        why=why.strip(), date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", commit=report.environment.get("commit")
    )
    # An interrupt waits until all baselines are stored, so that none is left half-way.
    with interrupts.held():
        return worst(
            [
                _accept(result, baseline_dir, report_dir / report.run_id, accepted, new, explainers)
                for result in report.cases
            ]
        )


def _accept(
    result: CaseResult,
    baseline_dir: Path,
    run_dir: Path,
    accepted: Accepted,
    new: bool,
    explainers: Sequence[Explainer],
) -> int:
    baselines = baselines_of(result)
    sides = list(_roles_to_store(result.case, baselines, new, bool(explainers)))
    folders = CaseFolders(result.case, run_dir, run_dir)
    if not baselines or any(about.status == BaselineStatus.UNVERIFIED for about in baselines.values()):
        print(f"{result.case.name}: not judged, so no baseline is touched")
        return UNJUDGED
    # Both sides must still agree: a baseline is not a way to accept a difference between systems.
    if sides and not result.agrees_as_expected:
        text = f"{result.verdict}, expected {result.case.expected}"
        print(f"{result.case.name}: {text}: its baselines are left as they are")
        return UNEXPECTED
    reasons = dict.fromkeys(sides, accepted)
    if explainers:
        found = {
            role: _explained(result.case, baselines[role].path, folders.recording(role, "first"), explainers)
            for role in sides
        }
        for role, explanation in found.items():
            print(f"{result.case.name}: {role} {getattr(result.case, role)}: {explanation.text}")
            if explanation.is_whole:
                why = f"{accepted.why} ({explanation.text})" if accepted.why else explanation.text
                reasons[role] = replace(accepted, why=why)
        if not accepted.why and not all(each.is_whole for each in found.values()):
            print(f"{result.case.name}: its baselines are left as they are; to accept the drift, add --why TEXT")
            return UNEXPECTED
    for role in sides:
        system = getattr(result.case, role)
        recording = folders.recording(role, "first")
        # A hidden folder, which searches for baselines leave out.
        copy = baseline_dir / f".{result.case.name}.{role}.{secrets.token_hex(8)}.new"
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            # A copy next to the baselines, so that replacing is a rename on the same file system.
            shutil.copytree(recording, copy)
            folder = store_baseline(copy, baseline_dir, result.case, system, force=True, accepted=reasons[role])
        # After a success the copy has moved, and nothing is left to remove.
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        print(f"{result.case.name}: accepted {role} {system}: {folder}")
    if not sides:
        print(f"{result.case.name}: nothing drifted")
    return SUCCESS if result.agrees_as_expected else UNEXPECTED


def _explained(case: Case, path: str | None, recording: Path, explainers: Sequence[Explainer]) -> Explanation:
    """Explain a system's drift from its baseline in the folder `path`, by the first certificate that covers all of the
    drift.

    If no certificate does, return the explanation by the last certificate, which lists the differences that it does not
    cover. Equal bits need no certificate.
    """
    if path is None:
        return Explanation.lacking("there is no baseline to drift from")
    baseline, here = read_recording(Path(path)), read_recording(recording)
    comparison = compare(baseline, here, case)
    if comparison.verdict == Verdict.EQUAL:
        return Explanation(True, f"no bit drifted from {path}")
    # The comparison is UNVERIFIED: without all evidence, no certificate can cover the whole difference.
    if comparison.verdict != Verdict.DIFFERENT:
        return Explanation.lacking(name_baseline_sides(comparison.reason or str(comparison.verdict)))
    found = [explain(baseline, here) for explain in explainers]
    return next((each for each in found if each.is_whole), found[-1])


def _roles_to_store(
    case: Case, baselines: Mapping[Role, BaselineResult], new: bool, has_certificate: bool
) -> Iterator[Role]:
    """Yield the roles ("reference", "candidate") whose recordings must be stored as baselines:

    - recordings that drifted;
    - with `new`, also recordings for which this environment has no baseline;
    - with `has_certificate`, also recordings whose baselines are all of other environments.

    Two roles with the same system share a baseline, so only the first role is yielded.
    """
    statuses = {BaselineStatus.DRIFTED, *(_NEW if new else ())}
    statuses |= {BaselineStatus.NOT_COMPARABLE} if has_certificate else set()
    seen = set()
    for role, about in baselines.items():
        system = getattr(case, role)
        if system not in seen and about.status in statuses:
            seen.add(system)
            yield role

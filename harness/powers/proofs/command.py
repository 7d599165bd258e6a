"""`bitproof prove`: proves cases in sequence, prints each result immediately, and returns the exit status."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bitproof.harness.case import Case
from bitproof.harness.errors import BitproofError, UsageError
from bitproof.harness.graph.collector import gc_paused
from bitproof.harness.graph.graph_options import GraphOptions, check_extra_passes
from bitproof.harness.powers.proofs.prover.answers import (
    LAID_OUT_OTHERWISE,
    NOT_PROVED,
    PROVED,
    REFUSED,
    Proof,
    answer_lines,
    meaning_of,
)
from bitproof.harness.powers.proofs.prover.certify import assumed, certificate_of, subject_of, write_certificate
from bitproof.harness.powers.proofs.prover.prove import NOT_TRIED, CaseProof, prove_case, why_not
from bitproof.harness.powers.proofs.prover.whole_step import UpdateProof
from bitproof.harness.report.status import SUCCESS, UNEXPECTED, UNJUDGED, worst
from bitproof.harness.torch_versions import torch_version

STATE = "from equal parameters, buffers and optimizer state, where both read the same inputs"


def prove(
    cases: Sequence[Case],
    extra_passes: tuple[str, ...] = (),
    *,
    asked: bool = True,
    as_json: bool = False,
    as_table: bool = False,
    folder: Path | None = None,
    precompiled: Path | None = None,
) -> int:
    """Prove cases, print the results, and return the exit status.

    - 0: each case has its expected answer: PROVED if EQUAL is expected, NOT PROVED if DIFFERENT is expected.
    - 1: a case has another answer than expected.
    - 3: a case is REFUSED or cannot be tried.

    Options:

    - `asked`: whether the user selected the cases. If not, cases that cannot be tried do not change the status.
    - `as_json`, `as_table`: print JSON, or rows of a table.
    - `folder`: the certificate of each tried case is written to a subfolder.
    - `precompiled`: the folder of a precompiled step that replaces each candidate. A folder that a run would refuse is
      refused.

    Raises UsageError for contradicting options, before anything is traced.
    """
    if precompiled is not None and extra_passes:
        raise UsageError(
            "--extra-pass is about passes, and none runs over a precompiled step",
            expected="one of --extra-pass and --precompiled",
            found=f"--extra-pass {extra_passes[0]}",
        )
    # All passes are checked before the first proof, which may take minutes.
    for case in cases:
        if why_not(case) is None:
            check_extra_passes(extra_passes, case)
    found = []
    if as_table:
        print("\n".join(_table_head()), flush=True)
    for case in cases:
        with gc_paused():  # the whole proof stays alive until its certificate is written
            result = _proved(case, GraphOptions(extra_passes=extra_passes), precompiled)
            found.append(result)
            if folder is not None and result.proof is not None:
                proof = _whole_proof(result)
                subject = subject_of(case, proof, extra_passes, precompiled=precompiled is not None)
                write_certificate(certificate_of(case.name, proof, subject), folder / case.name)
        # Printed at once, as the next proof may take minutes.
        if not as_json:
            print(_row(result) if as_table else "\n".join(_lines(result)), flush=True)
    status = worst([_status(result, asked) for result in found] or [UNJUDGED])
    tried = [result for result in found if result.proof is not None]
    if as_json:
        print(json.dumps({"schema": 1, "exit_status": status, "cases": [_data(result) for result in found]}, indent=1))
    elif as_table:
        print("\n".join(_reasons(found)), end="")
    elif tried:
        listed = dict.fromkeys(text for result in tried for text in assumptions_of(result))
        head = "Assumptions, besides those on tracing in docs/explanation/proving.md:"
        print("\n".join(["", head, *(f"- {x}" for x in listed)]))
    return status


def _whole_proof(result: CaseProof) -> Proof:
    assert result.proof is not None
    update = result.update
    # The proof of step and update together holds for any number of steps.
    return update.proof if update is not None and update.proof is not None and update.induction.holds else result.proof


def _proved(case: Case, options: GraphOptions, precompiled: Path | None) -> CaseProof:
    try:
        return prove_case(case, options, precompiled=precompiled, follow=True, in_turn=False)
    # The options are wrong, which is no answer about this case.
    except UsageError:
        raise
    except BitproofError as error:
        return CaseProof(REFUSED, reason=str(error), case=case)


def _status(result: CaseProof, asked: bool) -> int:
    if result.verdict == NOT_TRIED:
        return UNJUDGED if asked else SUCCESS
    if result.verdict == REFUSED:
        return UNJUDGED
    return SUCCESS if result.verdict == _expected(result.case) else UNEXPECTED


def _expected(case: Case) -> str:
    return PROVED if case.expected == "EQUAL" else NOT_PROVED


def assumptions_of(result: CaseProof) -> list[str]:
    """Return the assumptions of a case's proof, as sentences.

    Assumptions about tracing are left out, because every proof has them.
    """
    proof = _whole_proof(result)
    return [*assumed([side.graph for side in proof.sides], proof.table.used())]


def _lines(result: CaseProof) -> list[str]:
    name, proof = result.case.name, result.proof
    if proof is None:
        return [f"{name}: {result.verdict}: {result.reason}"]
    counts = {verdict: proof.count(verdict) for verdict in (PROVED, NOT_PROVED, REFUSED)}
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    remark = (
        "" if result.verdict in (REFUSED, _expected(result.case)) else f", although {result.case.expected} is expected"
    )
    computed = f"; {result.evaluated} of {counts[PROVED]} computed and found so"
    if result.not_evaluated:
        computed += f" ({result.not_evaluated})"
    seconds = sum(value for _, value in result.seconds)
    computed += meaning_of(proof)
    lines = [f"{name}: {result.verdict}{remark}: {text} of {len(proof.answers)} outputs{computed}; {seconds:.1f} s"]
    if proof.row_splits and result.verdict == NOT_PROVED:
        lines.append(
            f"  operators that one side runs on all rows and the other on halves: {', '.join(proof.row_splits)}"
        )
    return [*lines, *answer_lines(proof, all_in="--json"), *_update_lines(result.update)]


def _update_lines(update: UpdateProof | None) -> list[str]:
    if update is None:
        return []
    num_proved, reason = update.count(PROVED), f": {update.reason}" if update.reason else ""
    lines = [f"  what follows the step: {update.verdict}{reason}: {num_proved} of {len(update.answers)} outputs"]
    if update.induction.holds:
        return [*lines, f"  any number of steps: PROVED, {STATE}"]
    first = next((answer for answer in update.answers if answer.verdict != PROVED), None)
    if first is not None:
        text = f"    {first.output}: {first.verdict}" + (f": {first.reason}" if first.reason else "")
        lines += [text, *(f"      {line}" for line in (first.finding.lines() if first.finding else [])[:4])]
    return [*lines, f"  any number of steps: not shown, {update.induction.reason}"]


def _table_head() -> list[str]:
    machine = f"torch {torch_version() or 'unknown'} on the CPU of a machine of kind {platform.machine()}"
    columns = "case", "model", "ranks", "PROVED", "NOT PROVED", "REFUSED", "computed", "answer", "a run's verdict"
    return [f"{machine}:", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _row(result: CaseProof) -> str:
    case, proof = result.case, result.proof
    numbers = [proof.count(verdict) if proof else "" for verdict in (PROVED, NOT_PROVED, REFUSED)]
    # the PROVED outputs that were also computed on values
    computed = result.evaluated if proof else ""
    model = f"{case.model.family} {case.model.flavor}"
    cells = case.name, model, case.parallelism.world_size, *numbers, computed, result.verdict, case.expected
    return f"| {' | '.join(map(str, cells))} |"


def _reasons(results: Sequence[CaseProof]) -> list[str]:
    cases: dict[str, dict[str, None]] = {}
    for result in results:
        answers = result.proof.answers if result.proof else ()
        reasons = [result.reason, *(answer.reason for answer in answers)]
        for reason in filter(None, reasons):
            cases.setdefault(f"{result.verdict}: {reason.splitlines()[0]}", {})[result.case.name] = None
        if result.proof and (otherwise := result.proof.laid_out_otherwise):
            cases.setdefault(f"{LAID_OUT_OTHERWISE} ({len(otherwise)})", {})[result.case.name] = None
    # Below a Markdown table, between empty lines.
    return ["", *(f"- {reason}: {', '.join(names)}" for reason, names in cases.items()), ""] if cases else []


def _data(result: CaseProof) -> dict[str, object]:
    proof = result.proof
    answers = proof.answers if proof else ()
    return {
        "name": result.case.name,
        "expected": result.case.expected,
        "verdict": result.verdict,
        "reason": result.reason,
        "outputs": {verdict: sum(a.verdict == verdict for a in answers) for verdict in (PROVED, NOT_PROVED, REFUSED)},
        "evaluated": result.evaluated,
        "not_evaluated": result.not_evaluated,
        "laid_out_otherwise": proof.laid_out_otherwise if proof else [],
        "row_splits": list(proof.row_splits) if proof else [],
        "rules": sorted(proof.table.used()) if proof else [],
        "assumptions": assumptions_of(result) if proof else [],
        "seconds": dict(result.seconds),
        "update": _update_data(result.update),
        "seen_to_differ": sum(answer.witness is not None for answer in answers),
        "answers": [
            asdict(replace(answer, terms=(-1, -1))) | {"terms": list(answer.terms), "meaning": answer.meaning}
            for answer in answers
        ],
    }


def _update_data(update: UpdateProof | None) -> dict[str, object] | None:
    if update is None:
        return None
    return {
        "verdict": update.verdict,
        "reason": update.reason,
        "outputs": {verdict: update.count(verdict) for verdict in (PROVED, NOT_PROVED, REFUSED)},
        "unproved": [answer.output for answer in update.answers if answer.verdict != PROVED],
        "any_number_of_steps": update.induction.holds,
        "only_one_since": update.induction.reason,
        "state": list(update.induction.state),
    }

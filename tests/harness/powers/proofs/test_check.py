"""`--prove-first`: proofs are made before any case runs, and each is reported beside its case's verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bitproof.harness.case import Case, Chunking
from bitproof.harness.checks.check import Check, Evidence
from bitproof.harness.commands.run import run_and_report
from bitproof.harness.errors import UsageError
from bitproof.harness.execute import launch
from bitproof.harness.execute.checks.findings import judged, prepare_all
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.proofs import preflight
from bitproof.harness.powers.proofs.check import ProofCheck, ProofOptions
from bitproof.harness.powers.proofs.records import ProofOutcome, ProofVerdict
from bitproof.harness.powers.proofs.report import proof_of
from bitproof.harness.records import CaseResult, Verdict
from bitproof.harness.report import json as report_json

FIRST, SECOND = (
    Case(name=name, family="x", chunking=Chunking(dim="seq", modules="layers.*")) for name in ("first", "second")
)


def proving() -> RunOptions:
    return RunOptions(active=(ProofCheck(ProofOptions(prove_first=True)),))


@pytest.fixture
def run(monkeypatch, tmp_path, make_result):
    """Run cases without ranks, with given proofs; returns the order of events and the report's cases."""

    def run_them(cases, outcomes, **fields) -> tuple[list[str], list[CaseResult]]:
        order: list[str] = []

        def preflight_proofs(task, log, timeout) -> Iterator[ProofOutcome]:
            for case, outcome in zip(task.cases, outcomes, strict=True):
                order.append(f"prove {case.name}")
                yield outcome

        def run_cases(cases, options, run_dir, on_event) -> Iterator[CaseResult]:
            for case in cases:
                order.append(f"run {case.name}")
                result = replace(make_result(case.name, "EQUAL"), case=case, **fields)
                [check] = options.active
                result = replace(result, checks={check.name: judged(check, evidence(result, options))})
                yield result

        monkeypatch.setattr(preflight, "preflight_proofs", preflight_proofs)
        monkeypatch.setattr(launch, "run_cases", run_cases)
        run_and_report(cases, proving(), tmp_path, ["--prove-first"])
        return order, report_json.read(tmp_path / "latest" / "report.json").cases

    return run_them


def evidence(result: CaseResult, options: RunOptions) -> Evidence:
    def none(role):
        raise AssertionError("a proof reads no recording")

    sources = dict.fromkeys(("path", "recording", "run", "log_calls", "calls", "call"), none)
    return Evidence(result=result, options=options, log=Path("log"), **sources)


def test_every_case_is_proved_before_any_runs_and_its_proof_is_reported(run, capsys):
    outcomes = [
        ProofOutcome(verdict=ProofVerdict.PROVED, proved=1),
        ProofOutcome(verdict=ProofVerdict.NOT_PROVED, proved=1, not_proved=1, unproved=["loss"]),
    ]
    order, results = run([FIRST, SECOND], outcomes)
    assert order == ["prove first", "prove second", "run first", "run second"]
    assert "first: PROVED: 1 of 1 outputs\nsecond: NOT PROVED: 1 of 2 outputs\n  may differ in: loss\n" in (
        capsys.readouterr().out
    )
    assert [proof_of(result) for result in results] == outcomes


def test_a_proof_of_the_cpus_step_says_nothing_about_another_device(run):
    _, [result] = run([FIRST], [ProofOutcome(verdict=ProofVerdict.PROVED, proved=1)], device="cuda")
    found = proof_of(result)
    assert found is not None
    assert (found.verdict, found.reason) == (
        "NOT TRIED",
        "proofs before a run are about the CPU's step, and this case ran on cuda",
    )


def test_a_case_that_failed_keeps_its_proof(run):
    refused = ProofOutcome(verdict=ProofVerdict.REFUSED, reason="an unknown operator")
    _, [result] = run([FIRST], [refused], verdict=Verdict.ERROR, error="it failed")
    assert proof_of(result) == refused


def test_a_check_that_fails_before_any_case_is_named_with_its_line(tmp_path):
    class Failing(Check):
        name = "failing"

        def prepare(self, cases, options, folder):
            raise KeyError("memory")

        def judge(self, evidence):
            return None

    with pytest.raises(UsageError, match="check failing failed before any case ran") as found:
        list(prepare_all([FIRST], RunOptions(active=(Failing(None),)), tmp_path))
    assert "KeyError: 'memory'" in str(found.value) and "test_check.py:" in str(found.value)

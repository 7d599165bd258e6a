"""The table of a case's checks: what applies takes part, in order, and nothing else is loaded."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bitproof.harness.case import Case
from bitproof.harness.compare.verdict import judgement_of
from bitproof.harness.execute.case_run import CaseRun
from bitproof.harness.execute.checks.case_checks import DECIDING, REPORTING, CaseCheck, applied
from bitproof.harness.options import RunOptions
from bitproof.harness.records import Comparison, Divergence, Verdict
from tests.harness.judged import judge

CASE = Case(name="toy", family="toy", reference="mine:eager", candidate="mine:graph", steps=3)
EQUAL = Comparison(verdict=Verdict.EQUAL)
RUN: Any = SimpleNamespace(losses=["nan"])


def test_every_row_names_a_function_that_exists():
    for check in (DECIDING | REPORTING).values():
        module, _, function = check.source.partition(":")
        module = module if "." in module else f"bitproof.harness.execute.checks.{module}"
        assert callable(getattr(importlib.import_module(module), function))


def test_a_check_is_one_row_and_one_function(monkeypatch: pytest.MonkeyPatch):
    """As a check of losses would be: it takes agreement away, and knows nothing of the other checks."""
    module = ModuleType("finite")
    module.finite = lambda judgement, run: judgement.unverified(f"the loss is {run.losses[0]}")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitproof.harness.execute.checks.finite", module)
    row = CaseCheck("finite:finite", lambda known, run: known.verdict == Verdict.EQUAL and "nan" in run.losses)
    found = applied({"finite": row}, judgement_of(EQUAL), RUN)
    assert (found.verdict, found.error) == (Verdict.UNVERIFIED, "the loss is nan")
    assert applied({"finite": row}, found, RUN) == found, "it applies to agreement alone"


def test_a_check_that_does_not_apply_is_not_imported():
    judgement = judgement_of(EQUAL)
    assert applied({"a": CaseCheck("nowhere:none", lambda known, run: False)}, judgement, RUN) == judgement
    with pytest.raises(ModuleNotFoundError):
        applied({"a": CaseCheck("nowhere:none", lambda known, run: True)}, judgement, RUN)


@pytest.mark.ranks
def test_a_module_of_the_table_loads_no_check():
    code = (
        "import sys, bitproof.harness.execute.launch, bitproof.harness.execute.case_run; print(*sys.modules, sep='\\n')"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.rpartition(".")[2] for name in answer.stdout.split() if ".harness.execute.checks." in name}
    assert loaded == {"case_checks"}
    unused = (
        "powers.two_layouts.across",
        "powers.baselines.check",
        "powers.two_layouts.layout_verdict",
        "disturb.faults",
    )
    assert not {f"bitproof.harness.{name}" for name in unused} & {*answer.stdout.split()}


def test_nondeterminism_precedes_agreement_that_shows_nothing_and_both_precede_races():
    vacuous, noisy = Comparison(verdict=Verdict.EQUAL, vacuous=("zeros",)), Comparison(verdict=Verdict.DIFFERENT)
    assert judge(CASE, vacuous, candidate_control=noisy, races=["r"]).verdict == Verdict.NONDETERMINISTIC
    reported = judge(CASE, vacuous, candidate_control=EQUAL, races=["r"])
    assert (
        reported.verdict == Verdict.UNVERIFIED
        and "zeros" in (reported.error or "")
        and "races" not in (reported.error or "")
    )


def test_a_stressed_run_without_evidence_takes_the_place_of_noise_and_of_its_divergence():
    noisy, lacking = Comparison(verdict=Verdict.DIFFERENT), Comparison(verdict=Verdict.UNVERIFIED, reason="gaps")
    reported = judge(CASE, EQUAL, reference_control=noisy, reference_stress=lacking)
    assert (reported.verdict, reported.first_divergence) == (Verdict.UNVERIFIED, None)


@pytest.mark.parametrize("control", ["when_different", "up_to_difference", "never"])
def test_records_that_are_missing_need_no_second_run_and_no_remark_on_its_steps(control: Any):
    first = Divergence(step=0, kind="grad", name="w", rank=0)
    lacking = Comparison(verdict=Verdict.UNVERIFIED, first_divergence=first, reason="gaps")
    run: Any = SimpleNamespace(
        case=CASE, options=RunOptions(control=control), comparison=lacking, repeats=[], remarks=[]
    )
    run.runs_twice = CaseRun.runs_twice.fget(run)  # type: ignore[attr-defined]
    found = applied({"control": DECIDING["control"]}, judgement_of(lacking), run)
    assert (found, run.remarks, run.repeats) == (judgement_of(lacking), [], [])

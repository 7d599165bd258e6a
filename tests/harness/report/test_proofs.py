"""A proof stands beside the verdict in every form of the report, and one that a run belies is the loudest line."""

from __future__ import annotations

import dataclasses
import io
import json

import jsonschema
import pytest

from bitproof.harness.records import BlamedCall, Divergence, ProofOutcome, ProofVerdict
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, proofs, schema, terminal
from bitproof.harness.report.ci import junit
from bitproof.harness.report.html import document

PROVED = ProofOutcome(verdict=ProofVerdict.PROVED, proved=44, seconds=5.25)
NOT_PROVED = ProofOutcome(
    verdict=ProofVerdict.NOT_PROVED,
    proved=40,
    not_proved=4,
    unproved=["loss", "gradient of a", "gradient of b", "gradient of c"],
    first=["the reference adds here: add `a` [8, 64]"],
)
MM = BlamedCall(
    operator="mm", how="gives another output from the same inputs", module="m", direction="forward", chunk=1, rank=2
)
KERNEL = "a kernel's bits depend on its arguments and their values, dtypes, shapes, strides and alignment alone"


@pytest.fixture
def belied(make_result):
    """A case that was proved and differs, by a call and in a kind of record."""

    def make(call=MM, kind="grad", verdict="DIFFERENT", proof=PROVED):
        first = Divergence(step=0, rank=2, kind=kind, name="w", call=call)
        return make_result("bad", verdict, proof=proof, first_divergence=first)

    return make


def printed(report) -> str:
    stream = io.StringIO()
    terminal.print_report(report, stream)
    return stream.getvalue()


def test_the_column_says_what_a_proof_came_to(make_result):
    refused = ProofOutcome(verdict=ProofVerdict.REFUSED, proved=43, refused=1)
    untried = ProofOutcome(verdict=ProofVerdict.NOT_TRIED, reason="inductor compiles it")
    told = [proofs.column(make_result(proof=proof)) for proof in (PROVED, NOT_PROVED, refused, untried, None)]
    assert told == ["PROVED", "NOT PROVED (4 of 44)", "REFUSED (1 of 44)", "not tried", "not tried"]


def test_what_may_differ_is_told_before_a_case_runs():
    assert proofs.tell("good", PROVED) == ["good: PROVED: 44 of 44 outputs, 5.2 s"]
    assert proofs.tell("bad", NOT_PROVED) == [
        "bad: NOT PROVED: 40 of 44 outputs",
        "  may differ in: loss, gradient of a, gradient of b and 1 more",
        "    the reference adds here: add `a` [8, 64]",
    ]
    refused = ProofOutcome(verdict=ProofVerdict.REFUSED, reason="another number of inputs")
    assert proofs.tell("odd", refused) == ["odd: REFUSED: another number of inputs"]


def test_every_form_of_the_report_has_the_column_where_a_proof_was_asked_for(make_report, make_result):
    asked = make_report(make_result("good", proof=PROVED), make_result("other"))
    for text in (printed(asked), markdown.render(asked), document.render(asked)):
        assert "PROVED" in text
        assert "not tried" in text
    unasked = make_report(make_result("good"))
    for text in (printed(unasked), markdown.render(unasked), document.render(unasked)):
        assert "not tried" not in text


def test_a_proved_case_that_differs_is_the_first_line_and_names_call_and_assumption(make_report, make_result, belied):
    report = make_report(make_result("good", proof=PROVED), belied())
    [line] = proofs.loudest(report)
    assert line == (
        f"bad: PROVED EQUAL, YET DIFFERENT: an assumption of the proof is false here: {KERNEL}; "
        "mm of m (forward, chunk 1) on rank 2 gives another output from the same inputs"
    )
    assert printed(report).startswith(line)
    assert markdown.render(report).split("\n\n")[1] == f"## {line}"
    assert '<p class="loudest" role="alert">bad: PROVED EQUAL' in document.render(report)
    assert f'message="{line}; DIFFERENT (grad, param), expected EQUAL; first at step 0' in junit.render(report)


@pytest.mark.parametrize(
    ("call", "assumption"),
    [
        (dataclasses.replace(MM, operator="all_to_all_single"), "a collective's bits depend on its group's ranks"),
        (dataclasses.replace(MM, how="is a call that the reference does not make"), "both sides run what was traced;"),
        (None, "both sides run what was traced (no call explains the difference); first at step 0, rank 2, grad w"),
    ],
)
def test_the_assumption_follows_from_the_call(belied, call, assumption):
    assert f"an assumption of the proof is false here: {assumption}" in str(proofs.belied(belied(call)))


def test_a_system_that_differs_from_itself_has_kernels_that_are_not_deterministic(belied):
    assert "YET NONDETERMINISTIC: an assumption of the proof is false here: kernels are not deterministic here" in str(
        proofs.belied(belied(verdict="NONDETERMINISTIC"))
    )


def test_an_injected_fault_is_what_no_proof_sees(belied):
    assert "--inject put in a fault that no proof sees" in str(proofs.belied(belied(), ("--inject", "flip-bit:x")))


def test_what_no_proof_is_about_belies_none(belied, make_result):
    assert proofs.belied(belied(kind="param")) is None, "the optimizer's step is not in a proof"
    assert proofs.belied(belied(proof=NOT_PROVED)) is None
    assert proofs.belied(belied(proof=None)) is None
    assert proofs.belied(make_result(proof=PROVED)) is None


def test_a_report_with_proofs_is_read_back_and_fits_the_schema(make_report, make_result, belied):
    report = make_report(make_result("good", proof=PROVED), belied(), make_result("other", proof=NOT_PROVED))
    text = report_json.render(report)
    jsonschema.Draft202012Validator(json.loads(schema.schema_text())).validate(json.loads(text))
    found = report_json.parse(text)
    assert [result.proof for result in found.cases] == [PROVED, PROVED, NOT_PROVED]

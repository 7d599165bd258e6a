"""Every form of the report has a proof beside the verdict, and a proof that the run contradicts as its headline."""

from __future__ import annotations

import dataclasses
import io
import json

import jsonschema
import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.proofs import report as proofs
from bitproof.harness.powers.proofs.records import ProofOutcome, ProofVerdict
from bitproof.harness.records import BlamedCall, Divergence
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, schema, terminal, text
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
    operator="mm", how="has the same inputs and a different output", module="m", direction="forward", chunk=1, rank=2
)
KERNEL = "a kernel's bits depend on its arguments and their values, dtypes, shapes, strides and alignment alone"


@pytest.fixture
def proved(make_result):
    """A case's result with the finding of its proof, as a run makes it."""

    def make(name="good", verdict="EQUAL", proof=PROVED, injects=False, **fields):
        result = make_result(name, verdict, **fields)
        found = proofs.finding_of(name, proof, proofs.contradicted(result, proof, injects=injects))
        return dataclasses.replace(result, checks={"proof": found})

    return make


@pytest.fixture
def contradicted(proved):
    """A case that was proved and differs, by a call and in a kind of record."""

    def make(call=MM, kind="grad", verdict="DIFFERENT", **fields):
        first = Divergence(step=0, rank=2, kind=kind, name="w", call=call)
        return proved("bad", verdict, first_divergence=first, **fields)

    return make


def headline(result) -> str:
    return result.checks["proof"].headline


def printed(report) -> str:
    stream = io.StringIO()
    terminal.print_report(report, stream)
    return stream.getvalue()


def test_the_clause_beside_the_verdict_is_the_proofs_result():
    refused = ProofOutcome(verdict=ProofVerdict.REFUSED, proved=43, refused=1)
    untried = ProofOutcome(verdict=ProofVerdict.NOT_TRIED, reason="inductor compiles it")
    found = [proofs.clause(proof) for proof in (PROVED, NOT_PROVED, refused, untried)]
    assert found == ["PROVED", "NOT PROVED (4 of 44)", "REFUSED (1 of 44)", "NOT TRIED"]


def test_what_may_differ_is_described_before_a_case_runs():
    assert proofs.describe("good", PROVED) == ["good: PROVED: 44 of 44 outputs, 5.2 s"]
    assert proofs.describe("bad", NOT_PROVED) == [
        "bad: NOT PROVED: 40 of 44 outputs",
        "  may differ in: loss, gradient of a, gradient of b and 1 more",
        "    the reference adds here: add `a` [8, 64]",
    ]
    refused = ProofOutcome(verdict=ProofVerdict.REFUSED, reason="another number of inputs")
    assert proofs.describe("odd", refused) == ["odd: REFUSED: another number of inputs"]


def test_every_form_of_the_report_has_a_proof_that_was_asked_for(make_report, make_result, proved):
    asked = make_report(proved(), make_result("other"))
    for form in (printed(asked), markdown.render(asked), document.render(asked)):
        assert "EQUAL, PROVED" in form.replace("</span>", "")
    for form in (markdown.render(asked), document.render(asked)):
        assert "good: PROVED: 44 of 44 outputs, 5.2 s" in form
    unasked = make_report(make_result("good"))
    for form in (printed(unasked), markdown.render(unasked), document.render(unasked)):
        assert "PROVED" not in form


def test_a_proved_case_that_differs_is_the_first_line_and_names_call_and_assumption(make_report, proved, contradicted):
    report = make_report(proved(), contradicted())
    [line] = text.headlines(report)
    assert line == (
        f"bad: PROVED EQUAL, YET DIFFERENT: an assumption of the proof is false here: {KERNEL}; "
        "mm of m (forward, chunk 1) on rank 2 has the same inputs and a different output"
    )
    assert printed(report).startswith(line)
    assert markdown.render(report).split("\n\n")[1] == f"## {line}"
    assert '<p class="loudest" role="alert">bad: PROVED EQUAL' in document.render(report)
    assert f'message="{line}; DIFFERENT (grad, param), PROVED, expected EQUAL; first at step 0' in junit.render(report)


@pytest.mark.parametrize(
    ("call", "assumption"),
    [
        (dataclasses.replace(MM, operator="all_to_all_single"), "a collective's bits depend on its group's ranks"),
        (
            dataclasses.replace(MM, how="is an extra call that the reference does not have"),
            "both sides run what was traced;",
        ),
        (None, "both sides run what was traced (no call explains the difference); first at step 0, rank 2, grad w"),
    ],
)
def test_the_assumption_follows_from_the_call(contradicted, call, assumption):
    assert f"an assumption of the proof is false here: {assumption}" in headline(contradicted(call))


def test_a_system_that_differs_from_itself_has_kernels_that_are_not_deterministic(contradicted):
    assert "YET NONDETERMINISTIC: an assumption of the proof is false here: kernels are not deterministic here" in (
        headline(contradicted(verdict="NONDETERMINISTIC"))
    )


def test_an_injected_fault_is_what_no_proof_sees(contradicted):
    assert "--inject put in a fault that no proof sees" in headline(contradicted(injects=True))


def test_a_difference_outside_the_proof_contradicts_nothing(contradicted, proved):
    assert not headline(contradicted(kind="param")), "the optimizer's step is not in a proof"
    assert not headline(contradicted(proof=NOT_PROVED))
    assert not headline(proved())


def test_a_report_with_proofs_is_read_back_and_fits_the_schema(make_report, make_result, proved, contradicted):
    report = make_report(proved(), contradicted(), proved("other", proof=NOT_PROVED), make_result("plain"))
    written = report_json.render(report)
    jsonschema.Draft202012Validator(json.loads(schema.schema_text())).validate(json.loads(written))
    found = report_json.parse(written)
    assert [proofs.proof_of(result) for result in found.cases] == [PROVED, PROVED, NOT_PROVED, None]
    assert text.headlines(found) == text.headlines(report)


def test_a_report_that_has_the_proof_beside_the_verdict_is_read_as_todays(make_report, make_result):
    earlier = json.loads(report_json.render(make_report(make_result("good"))))
    earlier["schema"] = 1
    earlier["cases"][0]["proof"] = dataclasses.asdict(PROVED)
    [result] = report_json.parse(json.dumps(earlier)).cases
    assert proofs.proof_of(result) == PROVED
    assert text.outcome(result) == "EQUAL, PROVED"


def test_a_file_that_claims_PROVED_beside_unproved_outputs_is_refused(make_report, proved):
    forged = json.loads(report_json.render(make_report(proved())))
    forged["cases"][0]["checks"]["proof"]["data"]["refused"] = 1
    with pytest.raises(RecordingError, match=r"checks\.proof\.data\.verdict is damaged"):
        report_json.parse(json.dumps(forged))

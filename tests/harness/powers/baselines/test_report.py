"""The finding about baselines, in every form of the report."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.baselines.report import baselines_of, finding_of
from bitproof.harness.records import Code, Sentence
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, text
from bitproof.harness.report.ci import junit
from bitproof.harness.report.status import case_status, exit_status
from bitproof.harness.report.terminal import print_report

SYSTEMS = {"reference": "eager_chunked", "candidate": "graph"}
FOLDER = "baselines/moe_seq/graph/cpu-torch2.13.0-1a2b3c4d"
DRIFTED = [
    "4 of 1520 records drifted, of 1 tensor",
    "grad layers.1.moe.gate|w: 4 records, first at step 1, rank 3; in the 2 whose values are kept, 5 of 128 "
    "elements, by at most 3 ULP (elements by ULPs: 1: 4, 3-4: 1); 0x3f80 in the baseline, 0x3f83 here",
]


@pytest.fixture
def drifted(make_result, make_baseline):
    return make_result(baseline={"reference": make_baseline(), "candidate": make_baseline("DRIFTED")})


def test_a_drifted_case_is_not_as_expected_and_its_line_says_so(drifted):
    assert (drifted.as_expected, case_status(drifted), exit_status([drifted])) == (False, 1, 1)
    assert text.outcome(drifted) == "EQUAL, baseline objects, candidate DRIFTED"
    found = drifted.checks["baseline"]
    assert found.objection == "candidate graph: DRIFTED, first grad layers.1.moe.gate|w"
    message = "reference eager_chunked EQUAL, candidate graph DRIFTED"
    assert found.blocks == (Sentence(message), Code(f"candidate graph against {FOLDER}", "\n".join(DRIFTED)))


def test_equal_not_comparable_and_no_baseline_leave_a_case_as_it_is(make_result, make_baseline):
    for status in ("EQUAL", "NOT COMPARABLE", "NO BASELINE"):
        result = make_result(baseline={"reference": make_baseline(), "candidate": make_baseline(status)})
        assert (result.as_expected, case_status(result), text.outcome(result)) == (True, 0, "EQUAL")


def test_an_unverified_baseline_leaves_a_case_unjudged(make_result, make_baseline):
    damaged = make_baseline("UNVERIFIED", reasons=["RecordingError: x is damaged\n  fix: y"], drift=[])
    result = make_result(baseline={"reference": damaged})
    assert (result.as_expected, case_status(result)) == (False, 3)
    assert text.outcome(result) == "EQUAL, baseline could not judge, baseline of reference UNVERIFIED"
    assert result.checks["baseline"].blocks[1].text.splitlines()[:2] == ["RecordingError: x is damaged", "  fix: y"]


def test_a_baseline_that_is_not_comparable_is_reported_with_the_fields_and_the_drift(make_result, make_baseline):
    reason = 'machine.torch: "2.12.0" in the baseline, "2.13.0" here'
    result = make_result(baseline={"candidate": make_baseline("NOT COMPARABLE", reasons=[reason], compared=1520)})
    against = f"candidate graph against {FOLDER}"
    assert result.checks["baseline"].blocks == (
        Sentence("candidate graph NOT COMPARABLE"),
        Sentence(f"{against}: {reason}"),
        Code(against, "\n".join(DRIFTED)),
    )


def test_many_tensors_are_cut_with_their_number(make_baseline):
    baseline = make_baseline("DRIFTED", tensors_drifted=150)
    baseline.drift.extend(baseline.drift * 119)
    lines = finding_of({"candidate": baseline}, SYSTEMS).blocks[1].text.splitlines()
    assert (len(lines), lines[-1]) == (102, "and 50 more tensors")


def test_tensors_without_values_of_another_type_or_of_integers_are_reported(make_baseline):
    [entry] = make_baseline("DRIFTED").drift
    sides = ("in the first", "in the second")
    start = "grad layers.1.moe.gate|w: 4 records, first at step 1, rank 3; "
    unknown = dict.fromkeys(("elements", "elements_differing", "max_ulp", "reference_bits", "candidate_bits"))
    assert list(text.drift([replace(entry, **unknown, measured=0)], sides, 1)) == [f"{start}no values kept"]
    assert list(text.drift([replace(entry, candidate_type="float32[64]")], sides, 1)) == [
        f"{start}bfloat16[64] in the first, float32[64] in the second"
    ]
    whole = replace(entry, max_ulp=None, measured=4)
    assert list(text.drift([whole], sides, 1)) == [
        f"{start}5 of 128 elements; 0x3f80 in the first, 0x3f83 in the second"
    ]


def test_every_form_of_the_report_has_it(drifted, make_report):
    report = make_report(drifted)
    terminal = io.StringIO()
    print_report(report, terminal)
    assert "\n".join(DRIFTED) in terminal.getvalue()
    assert "EQUAL, baseline objects, candidate DRIFTED" in terminal.getvalue()
    assert f"candidate graph against {FOLDER}" in markdown.render(report)
    assert "```text\n" + "\n".join(DRIFTED) + "\n```" in markdown.render(report)
    message = "EQUAL, baseline objects, candidate DRIFTED, expected EQUAL; check baseline: "
    assert f'<failure type="EQUAL" message="{message}' in junit.render(report)


def test_json_comes_back_and_reports_with_the_field_baseline_are_read(drifted, make_report):
    report = make_report(drifted)
    assert report_json.parse(report_json.render(report)).cases == report.cases
    values = json.loads(report_json.render(report))
    values["cases"][0] |= {"baseline": values["cases"][0].pop("checks")["baseline"]["data"]}
    [earlier] = report_json.parse(json.dumps(values)).cases
    assert baselines_of(earlier) == baselines_of(drifted)
    assert (text.outcome(earlier), earlier.as_expected) == (text.outcome(drifted), False)
    values["cases"][0] |= {"baseline": {}, "as_expected": True}
    assert report_json.parse(json.dumps(values | {"exit_status": 0})).cases[0].checks == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "FINE"}, "checks.baseline.data.candidate.status is damaged"),
        ({"status": "EQUAL"}, "expected: no EQUAL, as records differ or none was compared"),
        ({"status": "EQUAL", "compared": 0, "mismatched": 0, "drift": []}, "expected: no EQUAL, as records differ or"),
        ({"mismatched": 0}, "expected: no DRIFTED, as no record differs"),
        ({"reasons": [1]}, "checks.baseline.data.candidate.reasons[0] is damaged"),
        ({"drift": [{"kind": "grad"}]}, "checks.baseline.data.candidate.drift[0].name is damaged"),
        ({"drift": {}}, "checks.baseline.data.candidate.drift is damaged"),
        ({"tensors_drifted": -1}, "checks.baseline.data.candidate.tensors_drifted is damaged"),
    ],
)
def test_a_damaged_or_contradictory_baseline_is_refused(drifted, make_report, change, message):
    values = json.loads(report_json.render(make_report(drifted)))
    values["cases"][0]["checks"]["baseline"]["data"]["candidate"] |= change
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_ulp": "3"}, "max_ulp"),
        ({"histogram": {"7": 1}}, "histogram"),
        ({"candidate_bits": 3}, "candidate_bits"),
        ({"kind": "weight"}, "kind"),
    ],
)
def test_a_damaged_drift_is_refused(drifted, make_report, change, field):
    values = json.loads(report_json.render(make_report(drifted)))
    values["cases"][0]["checks"]["baseline"]["data"]["candidate"]["drift"][0] |= change
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert f"drift[0].{field} is damaged" in str(error.value)


def test_a_side_that_does_not_exist_is_refused(drifted, make_report):
    values = json.loads(report_json.render(make_report(drifted)))
    values["cases"][0]["checks"]["baseline"]["data"]["third"] = {}
    with pytest.raises(
        RecordingError, match=r"checks.baseline.data is damaged\n  expected: 'reference' or 'candidate'"
    ):
        report_json.parse(json.dumps(values))


def test_one_system_on_both_sides_is_reported_once(make_baseline):
    same = dict.fromkeys(SYSTEMS, "a:b")

    def first(**found):
        return finding_of(found, same).blocks[0].text

    drifted, equal = make_baseline("DRIFTED"), make_baseline()
    assert first(reference=drifted, candidate=drifted) == "both sides a:b DRIFTED"
    assert first(reference=equal, candidate=drifted) == "reference a:b EQUAL, candidate a:b DRIFTED"

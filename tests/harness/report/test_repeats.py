"""What every form of the report says of systems that ran more than once, and of those that differ from themselves."""

from __future__ import annotations

import io
import json

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Divergence
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, terminal, text

BOTH = {"reference": "EQUAL", "candidate": "EQUAL"}
STRESSED = {"reference": "EQUAL", "candidate": "DIFFERENT"}


@pytest.fixture
def noisy(make_result):
    """A candidate that differs from itself under stress."""
    first = Divergence(step=2, rank=1, kind="grad", name="w", between="candidate against itself under stress")
    return make_result("noisy", "NONDETERMINISTIC", stress=STRESSED, first_divergence=first)


def test_stress_who_parted_and_remarks_survive_writing_and_reading(make_report, noisy):
    report = make_report(noisy, remarks=("--stress: each system ran once more",))
    values = json.loads(report_json.render(report))
    assert values["remarks"] == ["--stress: each system ran once more"]
    assert values["cases"][0]["stress"] == STRESSED
    assert values["cases"][0]["first_divergence"]["between"] == "candidate against itself under stress"
    assert report_json.parse(json.dumps(values)) == report


def test_a_report_from_before_stress_and_remarks_is_read(make_report, make_result):
    report = make_report(make_result())
    values = report_json.to_dict(report)
    del values["remarks"], values["cases"][0]["stress"]
    assert report_json.parse(json.dumps(values)) == report
    assert (report.remarks, report.cases[0].stress) == ((), None)


@pytest.mark.parametrize("field", ["control", "stress"])
@pytest.mark.parametrize("verdict", ["EQUAL", "DIFFERENT", "CLOSE"])
def test_a_verdict_on_systems_that_differ_from_themselves_is_refused(make_report, make_result, field, verdict):
    expected = "CLOSE" if verdict == "CLOSE" else "EQUAL"
    whole = make_report(make_result(verdict=verdict, expected=expected, **{field: BOTH}))
    assert report_json.parse(report_json.render(whole)) == whole
    damaged = make_report(make_result(verdict=verdict, expected=expected, **{field: STRESSED}))
    with pytest.raises(RecordingError) as error:
        report_json.parse(report_json.render(damaged))
    assert str(error.value) == (
        "RecordingError: report.cases[0].verdict is damaged\n"
        f"  expected: no {verdict}, as a control is DIFFERENT\n"
        f"  found: '{verdict}'\n"
        "  came from: report.json"
    )


@pytest.mark.parametrize("stress", [1, {"reference": "GOOD"}])
def test_damaged_stress_is_refused(make_report, make_result, stress):
    values = report_json.to_dict(make_report(make_result()))
    values["cases"][0]["stress"] = stress
    with pytest.raises(RecordingError, match=r"report\.cases\[0\]\.stress.* is damaged"):
        report_json.parse(json.dumps(values))


def test_the_system_that_parted_from_itself_is_named(make_report, noisy):
    assert text.locate(noisy.first_divergence) == "step 2, rank 1, grad w (candidate against itself under stress)"
    assert (
        text.locate(noisy.first_divergence, noisy.case) == "step 2, rank 1, grad w (graph against itself under stress)"
    )
    noisy.case = type(noisy.case).from_dict(noisy.case.to_dict() | {"reference": "graph"})
    place = "step 2, rank 1, grad w (candidate graph against itself under stress)"
    assert text.locate(noisy.first_divergence, noisy.case) == place, "both systems have this name"
    stream = io.StringIO()
    terminal.print_report(make_report(noisy, remarks=("a remark [red]",)), stream)
    assert f"  first divergence: {place}\n" in stream.getvalue()
    assert "\na remark [red]\n" in stream.getvalue()


def test_the_summary_shows_stress_where_there_was_any_and_remarks_before_the_details(make_report, make_result, noisy):
    message = markdown.render(make_report(noisy, remarks=("a remark <b>",)))
    assert "| candidate | DIFFERENT" in " ".join(message[message.index("### Stress") :].split())
    assert "step 2, rank 1, grad w (graph against itself under stress)" in message
    assert message.index("**a remark &lt;b&gt;**") < message.index("<details>")
    assert "### Stress" not in markdown.render(make_report(make_result()))

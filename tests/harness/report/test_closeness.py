"""CLOSE in every form of the report: told apart from EQUAL, with its bound, its largest error and its histogram."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.records import Key
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, terminal, text
from bitproof.harness.report.ci import junit
from bitproof.harness.report.status import exit_status

LINE = "largest relative error 0.00312 (bound 0.01) at step 1, rank 3, grad layers.1.moe.gate|w"


@pytest.fixture
def mixed(make_report, make_result):
    """Two EQUAL, one CLOSE as expected, one case that was not run."""
    return make_report(
        make_result("one"),
        make_result("two"),
        make_result("near", "CLOSE", expected="CLOSE"),
        not_run={"flex": "it needs CUDA <b>|"},
        left_out=(replace(make_result("flex").case, requires="cuda"),),
    )


def printed(report) -> str:
    stream = io.StringIO()
    terminal.print_report(report, stream)
    return stream.getvalue()


def test_close_is_counted_apart_from_equal(mixed):
    assert text.tally(mixed) == "2 EQUAL, 1 CLOSE, 1 not run"
    assert mixed.exit_status == 0


def test_a_case_that_expects_equal_is_not_content_with_close(make_result):
    near = make_result("near", "CLOSE")
    assert not near.as_expected
    assert exit_status([near]) == 1


def test_a_case_that_expects_close_is_content_with_equal_and_with_nothing_else(make_result):
    assert make_result(verdict="EQUAL", expected="CLOSE").as_expected
    for verdict in ("DIFFERENT", "NONDETERMINISTIC", "UNVERIFIED", "ERROR"):
        assert not make_result(verdict=verdict, expected="CLOSE").as_expected


def test_the_terminal_has_a_line_for_each(mixed):
    shown = printed(mixed)
    assert "\n2 EQUAL, 1 CLOSE, 1 not run\n" in shown
    assert f"\nnear: {LINE}\n" in shown
    assert "\nflex: NOT RUN: it needs CUDA <b>|\n" in shown
    assert "near: CLOSE" not in shown, "it is as expected"


def test_close_has_a_color_of_its_own_though_it_is_as_expected(mixed):
    from bitproof.harness.records import Verdict

    assert terminal.COLORS[Verdict.CLOSE] not in {
        color for verdict, color in terminal.COLORS.items() if verdict != Verdict.CLOSE
    }
    table = terminal._table(mixed, is_narrow=False)
    styles = [str(cell.style) for cell in table.columns[1].cells]
    assert styles == ["green", "green", terminal.COLORS[Verdict.CLOSE]]


def test_markdown_has_the_tally_the_histogram_and_what_was_not_run(mixed):
    shown = markdown.render(mixed)
    assert "Verdicts: 2 EQUAL, 1 CLOSE, 1 not run." in shown
    assert "### Closeness\n\nL" + LINE[1:].replace("|", "\\|") + ".\n" in shown
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()]
    assert ["ULPs", "loss", "grad", "param", "buffer", "optimizer"] in rows
    assert ["0", "1,000", "990", "1,000", "1,000", "1,000"] in rows
    assert ["3-4", "0", "3", "0", "0", "0"] in rows
    assert "Not run here, so neither passed nor failed:" in shown
    assert "it needs CUDA &lt;b&gt;\\|" in shown


def test_junit_says_close_and_skips_what_was_not_run(mixed):
    root = ElementTree.fromstring(junit.render(mixed))
    suite = root.find("testsuite")
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "0", "0", "1"]
    outcomes = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert outcomes == {"one": [], "two": [], "near": ["system-out"], "flex": ["skipped"]}
    assert root.find(".//system-out").text == f"CLOSE (grad, param): {LINE}"
    assert root.find(".//skipped").get("message") == "it needs CUDA <b>|"


def test_json_comes_back_whole(mixed, make_report, make_result):
    assert report_json.parse(report_json.render(mixed)) == mixed
    beyond = replace(
        mixed.cases[2].closeness,
        largest_error=None,
        tensors_beyond=1,
        first_beyond=Key(0, "loss", "loss", 0),
        histogram={"loss": {"unlike": 1}},
    )
    far = make_report(make_result("far", "DIFFERENT", expected="CLOSE", closeness=beyond))
    assert report_json.parse(report_json.render(far)) == far


def _set(*path_and_value):
    *path, last, value = path_and_value

    def change(case):
        for part in path:
            case = case[part]
        case[last] = value

    return change


KINDS = ("loss", "grad", "param", "buffer", "optimizer")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set("closeness", None), "no CLOSE, as no evidence shows every tensor within 0.01"),
        (_set("closeness", "bound", 0.02), "no CLOSE, as no evidence shows every tensor within 0.01"),
        (_set("closeness", "largest_error", 0.0101), "no CLOSE, as no evidence shows every tensor within 0.01"),
        (_set("closeness", "largest_error", None), "no CLOSE, as no evidence shows every tensor within 0.01"),
        (_set("closeness", "tensors_beyond", 1), "no CLOSE, as no evidence shows every tensor within 0.01"),
        (_set("closeness", "histogram", {}), "no CLOSE, as the histogram lacks a compared kind"),
        (_set("closeness", "histogram", "grad", {"unlike": 1}), "no CLOSE, as elements are unlike"),
        (_set("mismatched", dict.fromkeys(KINDS, 0)), "no CLOSE, as no record differs"),
        (_set("control", "candidate", "DIFFERENT"), "no CLOSE, as a control is DIFFERENT"),
        (_set("compared", "grad", 0), "no CLOSE, as a kind was not compared"),
        (_set("verdict", "EQUAL"), "no EQUAL, as records differ"),
    ],
)
def test_a_close_that_its_own_evidence_does_not_carry_is_refused(mixed, change, expected):
    values = json.loads(report_json.render(mixed))
    change(values["cases"][2])
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert (error.value.what, error.value.expected) == ("report.cases[2].verdict is damaged", expected)


def test_a_close_without_a_bound_in_its_case_is_refused(mixed):
    values = json.loads(report_json.render(mixed))
    values["cases"][2]["case"] |= {"expected": "EQUAL", "close_within": None}
    values["cases"][2]["expected"] = "EQUAL"
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert error.value.expected == "no CLOSE, as the case states no bound"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_set("closeness", "bound", None), "closeness.bound"),
        (_set("closeness", "bound", -1), "closeness.bound"),
        (_set("closeness", "bound", True), "closeness.bound"),
        (_set("closeness", "largest_error", "0.1"), "closeness.largest_error"),
        (_set("closeness", "largest_error", 1e999), None),
        (_set("closeness", "largest", None), "closeness.largest"),
        (_set("closeness", "largest", "kind", "taste"), "closeness.largest.kind"),
        (_set("closeness", "first_beyond", {"step": -1}), "closeness.first_beyond.step"),
        (_set("closeness", "histogram", "taste", {}), "closeness.histogram"),
        (_set("closeness", "histogram", "grad", {"3-5": 1}), "closeness.histogram.grad"),
        (_set("closeness", "histogram", "grad", {"0": 1.5}), "closeness.histogram.grad.0"),
    ],
)
def test_damaged_evidence_is_refused_by_name(mixed, change, what):
    values = json.loads(report_json.render(mixed))
    change(values["cases"][2])
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert error.value.what == (f"report.cases[2].{what} is damaged" if what else "a report is not JSON")


@pytest.mark.parametrize("not_run", [[], {"flex": 1}, {"near": "it ran"}])
def test_damaged_reasons_for_not_running_are_refused(mixed, not_run):
    values = json.loads(report_json.render(mixed)) | {"not_run": not_run}
    with pytest.raises(RecordingError, match=r"report\.not_run"):
        report_json.parse(json.dumps(values))

from __future__ import annotations

import json

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.records import CaseSeconds, PassReport, Score, Shard
from bitproof.harness.report import json as report_json


def test_a_report_survives_writing_and_reading(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report_json.render(report))
    assert report_json.read(path) == report


def test_infinity_and_nan_among_what_was_measured_are_null(make_report, make_result):
    seconds = CaseSeconds(total=1.0, passes={"chunk": float("inf")})
    passes = [PassReport("chunk", 0.5, 1, 2, facts={"peak": [float("nan"), 2.5]})]
    text = report_json.render(make_report(make_result(seconds=seconds, passes=passes, memory={"graph": float("-inf")})))
    [case] = json.loads(text, parse_constant=lambda name: pytest.fail(name))["cases"]
    assert case["seconds"] == {"passes": {"chunk": None}, "total": 1.0}
    assert (case["passes"][0]["facts"], case["memory"]) == ({"peak": [None, 2.5]}, {"graph": None})


def test_the_schema_holds_every_promised_field(make_report, make_result):
    values = report_json.to_dict(make_report(make_result(verdict="DIFFERENT")))
    assert {"schema", "run_id", "exit_status", "environment", "cases"} <= set(values)
    assert values["schema"] == 2
    promised = (
        "name verdict expected reference candidate world_size steps device backend compared mismatched control "
        "losses first_divergence error seconds memory"
    )
    assert set(promised.split()) <= set(values["cases"][0])
    divergence = (
        "step rank kind name module direction chunk operator node pass elements_differing elements max_ulp "
        "reference_bits candidate_bits"
    )
    assert set(divergence.split()) <= set(values["cases"][0]["first_divergence"])


def test_all_evidence_of_a_cause_survives_writing_and_reading(make_report, localized):
    report = make_report(localized)
    assert report_json.parse(report_json.render(report)) == report


def test_a_report_from_before_there_was_such_evidence_is_read(make_report, localized):
    values = report_json.to_dict(make_report(localized))
    for name in ("differing", "differing_left_out", "logs"):
        del values["cases"][0][name]
    for name in ("histogram", "samples", "output_histogram", "output_samples"):
        del values["cases"][0]["first_divergence"][name]
    [result] = report_json.parse(json.dumps(values)).cases
    assert (result.differing, result.differing_left_out, result.logs) == ({}, 0, [])
    assert (result.first_divergence.tensor.histogram, result.first_divergence.tensor.samples) == (None, None)


def test_fields_of_a_later_version_are_passed_over(make_report, make_result):
    report = make_report(make_result())
    values = report_json.to_dict(report) | {"history": []}
    values["cases"][0]["of_tomorrow"] = 1
    assert report_json.parse(json.dumps(values)) == report


def _set(path, value):
    def change(values):
        *parents, last = path
        for part in parents:
            values = values[part]
        values[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_set(["schema"], 3), "report.schema is damaged"),
        (_set(["cases"], {}), "report.cases is damaged"),
        (_set(["environment"], None), "report.environment is damaged"),
        (_set(["exit_status"], True), "report.exit_status is damaged"),
        (_set(["exit_status"], 0), "report.exit_status is damaged"),
        (_set(["options"], [1]), "report.options[0] is damaged"),
        (_set(["cases", 0], "x"), "report.cases[0] is damaged"),
        (_set(["cases", 0, "case"], None), "report.cases[0].case is damaged"),
        (_set(["cases", 0, "case", "name"], "../../etc"), "report.cases[0].case is not a case"),
        (_set(["cases", 0, "case", "steps"], "20"), "report.cases[0].case is not a case"),
        (_set(["cases", 0, "name"], "other"), "report.cases[0].name is damaged"),
        (_set(["cases", 0, "verdict"], "PASS"), "report.cases[0].verdict is damaged"),
        (_set(["cases", 0, "compared", "grad"], -1), "report.cases[0].compared.grad is damaged"),
        (_set(["cases", 0, "compared", "grad"], 0), "report.cases[0].verdict is damaged"),
        (_set(["cases", 0, "mismatched", "grad"], 1), "report.cases[0].verdict is damaged"),
        (
            _set(["cases", 1, "mismatched"], dict.fromkeys(["loss", "grad", "param", "buffer", "optimizer"], 0)),
            "report.cases[1].verdict is damaged",
        ),
        (_set(["cases", 0, "losses", "candidate"], ["ten"]), "report.cases[0].losses.candidate[0] is damaged"),
        (_set(["cases", 0, "control", "candidate"], "FINE"), "report.cases[0].control.candidate is damaged"),
        (_set(["cases", 0, "error"], 5), "report.cases[0].error is damaged"),
        (_set(["cases", 0, "options"], [1]), "report.cases[0].options[0] is damaged"),
        (_set(["cases", 0, "seconds"], []), "report.cases[0].seconds is damaged"),
        (_set(["cases", 0, "passes"], [1]), "report.cases[0].passes[0] is damaged"),
        (_set(["cases", 0, "passes", 0, "name"], 1), "report.cases[0].passes[0].name is damaged"),
        (_set(["cases", 0, "passes", 0, "seconds"], "1"), "report.cases[0].passes[0].seconds is damaged"),
        (_set(["cases", 0, "passes", 0, "nodes_after"], None), "report.cases[0].passes[0].nodes_after is damaged"),
        (_set(["cases", 0, "passes", 0, "facts"], []), "report.cases[0].passes[0].facts is damaged"),
        (_set(["cases", 0, "passes", 0, "changed"], {"mm": [1]}), "report.cases[0].passes[0].changed.mm is damaged"),
        (_set(["cases", 1, "differing_kinds"], ["taste"]), "report.cases[1].differing_kinds[0] is damaged"),
        (_set(["cases", 1, "first_divergence", "step"], None), "report.cases[1].first_divergence.step is damaged"),
        (_set(["cases", 1, "first_divergence", "kind"], "x"), "report.cases[1].first_divergence.kind is damaged"),
    ],
)
def test_a_damaged_field_is_refused_by_name(report, change, what):
    values = report_json.to_dict(report)
    change(values)
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert error.value.what == what


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["differing", "taste"], {}, "kinds: loss, grad, param, buffer, optimizer, grad_norm, activation, rng"),
        (["differing", "grad"], {}, "12 keys, by the mismatched records"),
        (["differing", "grad", "w"], {"0": [0]}, "12 keys, by the mismatched records"),
        (["differing", "grad", "layers.1.moe.gate|w", "x"], [1], "steps as decimal numbers"),
        (["differing", "param", "layers.1.moe.gate|w", "1"], [0, 1, 8], "steps and ranks of the case"),
        (["differing", "param", "layers.1.moe.gate|w"], {"3": [0, 1, 2]}, "steps and ranks of the case"),
        (["differing", "param", "layers.1.moe.gate|w", "1"], [0, 1, -3], "an integer, zero or more"),
        (["differing", "param", "layers.1.moe.gate|w", "1"], 3, "an array"),
        (["differing_left_out"], 1, "12 keys, by the mismatched records"),
        (["differing_left_out"], -1, "an integer, zero or more"),
        (["logs"], ["logs/../../etc/passwd"], "paths within logs/"),
        (["logs"], ["javascript:alert(1)"], "paths within logs/"),
        (["logs"], [1], "a text"),
        (["first_divergence", "histogram"], {"3-5": 1}, "ranges of ULPs such as 3-4"),
        (["first_divergence", "histogram"], [], "an object"),
        (["first_divergence", "output_histogram"], {"0": "1"}, "an integer"),
        (["first_divergence", "samples"], [[[0], "0x0"]], "a value"),
        (["first_divergence", "samples"], [[[True], "0x0", "0x1"]], "an integer"),
        (["first_divergence", "output_samples"], [[[0], "0x0", 1]], "a text"),
    ],
)
def test_damaged_evidence_is_refused_with_what_it_should_be(make_report, localized, path, value, expected):
    values = json.loads(report_json.render(make_report(localized)))
    _set(["cases", 0, *path], value)(values)
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert (
        error.value.expected,
        error.value.what.startswith(f"report.cases[0].{path[0].removesuffix('_left_out')}"),
    ) == (expected, True)


def test_an_equal_case_in_which_something_differs_is_refused(make_report, make_result):
    values = report_json.to_dict(make_report(make_result()))
    values["cases"][0]["differing"] = {"grad": {"w": {"0": [0]}}}
    with pytest.raises(RecordingError, match=r"report\.cases\[0\]\.differing is damaged"):
        report_json.parse(json.dumps(values))


def test_a_shards_report_survives_writing_and_reading(make_report, make_result):
    one, other = make_result("one", options=("--inject", "x")), make_result("other")
    report = make_report(one, shard=Shard(index=2, count=3, selection=(one.case, other.case)))
    assert report_json.parse(report_json.render(report)) == report
    empty = make_report(shard=Shard(index=3, count=3, selection=(one.case, other.case)))
    empty.exit_status = 0
    assert report_json.parse(report_json.render(empty)) == empty


def test_a_report_from_before_there_were_shards_is_read(report):
    values = report_json.to_dict(report)
    del values["shard"], values["selection"]
    for entry in values["cases"]:
        del entry["options"]
    assert report_json.parse(json.dumps(values)) == report


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_set(["shard"], "3/2"), "report.shard is damaged"),
        (_set(["shard"], 1), "report.shard is damaged"),
        (_set(["selection"], None), "report.selection is damaged"),
        (_set(["selection", 0, "name"], "../x"), "report.selection[0] is not a case"),
        (_set(["shard"], None), "report.exit_status is damaged"),
        (_set(["exit_status"], 1), "report.exit_status is damaged"),
    ],
)
def test_a_damaged_shard_is_refused_by_name(make_report, make_result, change, what):
    report = make_report(shard=Shard(index=2, count=2, selection=(make_result().case,)))
    report.exit_status = 0
    values = report_json.to_dict(report)
    change(values)
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values))
    assert error.value.what == what


def test_the_error_says_what_where_expected_and_found(report):
    values = report_json.to_dict(report) | {"exit_status": 0}
    with pytest.raises(RecordingError) as error:
        report_json.parse(json.dumps(values), where="run/report.json")
    assert str(error.value) == (
        "RecordingError: report.exit_status is damaged\n"
        "  expected: 3, by its cases\n"
        "  found: 0\n"
        "  came from: run/report.json"
    )


@pytest.mark.parametrize("text", ["", "{", '{"schema": NaN}', "[" * 100_000, '{"schema": 1}{}'])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(RecordingError) as error:
        report_json.parse(text)
    assert error.value.what == "a report is not JSON"


def test_a_missing_binary_or_huge_file_is_refused(tmp_path, monkeypatch):
    with pytest.raises(RecordingError, match="a report cannot be read"):
        report_json.read(tmp_path / "report.json")
    (tmp_path / "report.json").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(RecordingError, match="a report cannot be read"):
        report_json.read(tmp_path / "report.json")
    monkeypatch.setattr(report_json, "MAX_BYTES", 4)
    with pytest.raises(RecordingError, match="more than 4 bytes"):
        report_json.read(tmp_path / "report.json")


SCORE = Score(faults=3, killed=2, equivalents=1, flagged=1, places=(1, 2), ranks=(0, 1), unjudged=4, seconds=4.5)


def test_what_came_of_faults_survives_writing_and_reading(make_report, make_result):
    report = make_report(make_result(), faults=SCORE)
    assert report_json.parse(report_json.render(report)).faults == SCORE
    assert report_json.parse(report_json.render(make_report(make_result()))).faults is None


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("killed", 4, "at most 3"),
        ("flagged", 2, "at most 1"),
        ("places", [3, 2], "at most 2"),
        ("ranks", [0], "ranks"),
        ("unjudged", -1, "unjudged"),
        ("unjudged", 0, "1, by its cases"),
    ],
)
def test_a_score_that_no_faults_come_to_is_refused(make_report, make_result, field, value, expected):
    values = json.loads(report_json.render(make_report(make_result(), faults=SCORE)))
    values["faults"][field] = value
    with pytest.raises(RecordingError, match=expected):
        report_json.parse(json.dumps(values))

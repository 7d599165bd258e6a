from __future__ import annotations

import json

import pytest

from harness.errors import RecordingError
from harness.records import Shard
from harness.report import json as report_json


def test_a_report_survives_writing_and_reading(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report_json.render(report))
    assert report_json.read(path) == report


def test_the_schema_holds_every_promised_field(make_report, make_result):
    values = report_json.to_dict(make_report(make_result(verdict="DIFFERENT")))
    assert {"schema", "run_id", "exit_status", "environment", "cases"} <= set(values)
    assert values["schema"] == 1
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
        (_set(["schema"], 2), "report.schema is damaged"),
        (_set(["cases"], {}), "report.cases is damaged"),
        (_set(["environment"], None), "report.environment is damaged"),
        (_set(["exit_status"], True), "report.exit_status is damaged"),
        (_set(["exit_status"], 0), "report.exit_status is damaged"),
        (_set(["options"], [1]), "report.options is damaged"),
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
        (_set(["cases", 0, "losses", "candidate"], ["ten"]), "report.cases[0].losses.candidate is damaged"),
        (_set(["cases", 0, "control", "candidate"], "FINE"), "report.cases[0].control.candidate is damaged"),
        (_set(["cases", 0, "error"], 5), "report.cases[0].error is damaged"),
        (_set(["cases", 0, "options"], [1]), "report.cases[0].options is damaged"),
        (_set(["cases", 0, "seconds"], []), "report.cases[0].seconds is damaged"),
        (_set(["cases", 0, "passes"], [1]), "report.cases[0].passes[0] is damaged"),
        (_set(["cases", 0, "passes", 0, "name"], 1), "report.cases[0].passes[0].name is damaged"),
        (_set(["cases", 0, "passes", 0, "seconds"], "1"), "report.cases[0].passes[0].seconds is damaged"),
        (_set(["cases", 0, "passes", 0, "nodes_after"], None), "report.cases[0].passes[0].nodes_after is damaged"),
        (_set(["cases", 0, "passes", 0, "facts"], []), "report.cases[0].passes[0].facts is damaged"),
        (_set(["cases", 0, "passes", 0, "changed"], {"mm": [1]}), "report.cases[0].passes[0].changed.mm is damaged"),
        (_set(["cases", 1, "differing_kinds"], ["taste"]), "report.cases[1].differing_kinds is damaged"),
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
    with pytest.raises(RecordingError, match="a report is too large to read"):
        report_json.read(tmp_path / "report.json")

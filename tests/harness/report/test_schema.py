"""The form of report.json: types, and the schema that is kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bitproof.harness.records import Divergence
from bitproof.harness.report import json as report_json
from bitproof.harness.report import schema
from bitproof.harness.report.schema import FlatDivergence, plain
from tests.harness.reports import case, result, write_report, write_shard

SCHEMA = Path(schema.__file__).with_name("report.schema.json")
OLD = Path(__file__).with_name("old_report.json")
"""A report from before `differs_within` and `remarks`, of a real run."""


@pytest.fixture
def validator() -> Any:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


def test_the_schema_is_what_the_types_say() -> None:
    assert SCHEMA.read_text() == schema.schema_text(), (
        "python -m bitproof.harness.report.schema > harness/report/report.schema.json"
    )


def test_reports_fit_the_schema(validator, report, make_report, localized, make_result, make_baseline) -> None:
    sides = {"reference": make_baseline(), "candidate": make_baseline("DRIFTED")}
    stress = {"reference": None, "candidate": "DIFFERENT"}
    reported = make_report(localized, make_result("held", baseline=sides), make_result("noisy", stress=stress))
    for found in (report, reported, make_report(make_result("near", "CLOSE", expected="CLOSE"))):
        validator.validate(json.loads(report_json.render(found)))


def test_runs_and_shards_on_disk_fit_the_schema(validator, tmp_path) -> None:
    cases = [case("one"), case("two")]
    whole = write_report(tmp_path, [result(cases[0]), result(cases[1], "DIFFERENT")])
    for folder in (whole, write_shard(tmp_path, 1, 2, cases)):
        validator.validate(json.loads((folder / report_json.FILE_NAME).read_text()))


def test_a_report_of_an_older_version_fits_the_schema_and_is_read(validator) -> None:
    values = json.loads(OLD.read_text())
    assert "remarks" not in values["cases"][0]
    validator.validate(values)
    assert [found.verdict for found in report_json.read(OLD).cases] == [entry["verdict"] for entry in values["cases"]]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], 3),
        (["cases", 0, "verdict"], "PASS"),
        (["cases", 0, "compared", "grad"], -1),
        (["cases", 0, "compared"], {}),
        (["cases", 0, "differing"], {"taste": {}}),
        (["cases", 0, "differing"], {"grad": {"w": {"first": [0]}}}),
        (["cases", 0, "case", "depth"], 3),
        (["cases", 0, "first_divergence", "histogram"], {"3-5": 1}),
        (["cases", 0, "first_divergence", "samples"], [[[0], "0x0"]]),
        (["cases", 0, "logs"], ["javascript:alert(1)"]),
    ],
)
def test_what_no_report_has_does_not_fit_the_schema(validator, make_report, localized, path, value) -> None:
    values = json.loads(report_json.render(make_report(localized)))
    *parents, last = path
    inner = values
    for part in parents:
        inner = inner[part]
    inner[last] = value
    assert not validator.is_valid(values)


def test_a_divergence_survives_being_laid_flat(localized) -> None:
    first = localized.first_divergence
    assert FlatDivergence.of(first).divergence() == first
    flat = plain(FlatDivergence.of(first))
    assert (flat["operator_ranks"], flat["output_elements"], flat["pass"]) == ("3, 5", 8, None)
    bare = Divergence(step=0, rank=1, kind="grad", name="w", pass_="chunk")
    assert FlatDivergence.of(bare).divergence() == bare
    assert plain(FlatDivergence.of(bare))["pass"] == "chunk"

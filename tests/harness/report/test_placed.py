"""What reports tell of placements that were solved for."""

from __future__ import annotations

import json
from dataclasses import asdict

import jsonschema

from bitproof.harness.records import Placed, PlacedTensor
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, schema

FOUND = Placed(
    source="solver",
    cost=434.27,
    bytes=3 * 2**20,
    bound=4 * 2**20,
    least=2 * 2**20,
    gap=0.0,
    nodes=325,
    edges=460,
    variables=7175,
    constraints=4003,
    seconds=1.5,
    sha256="5ff614809692107f" * 4,
    split=["layers.0.attention"],
    parameters=[PlacedTensor(name="norm.weight", copies=1, data="R", tensor="R", cost=12.0, bytes=1152)],
    beside={"fsdp": [427.7, 5.0 * 2**20]},
)


def test_placements_go_through_report_json_and_fit_the_schema(make_report, make_result):
    text = report_json.render(make_report(make_result("placed", placed=FOUND), make_result("whole")))
    jsonschema.Draft202012Validator(json.loads(schema.schema_text())).validate(json.loads(text))
    assert json.loads(text)["cases"][0]["placed"] == asdict(FOUND)
    assert [result.placed for result in report_json.parse(text).cases] == [FOUND, None]


def test_the_report_for_people_shows_cost_bound_gap_and_each_parameter(make_report, make_result):
    text = markdown.render(make_report(make_result("placed", placed=FOUND), make_result("whole")))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["cost", "434.3 us a step"] in lines
    assert ["cost of fsdp", "427.7 us, 5.000 MiB a rank"] in lines
    assert ["bytes of a rank", "3.000 MiB of 4.000 MiB, at least 2.000"] in lines
    assert ["gap that the solver proved", "0"] in lines
    assert ["norm.weight", "R", "R", "12.0", "1152"] in lines
    assert text.count("### Placements") == 1

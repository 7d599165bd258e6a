"""What reports tell of a step that was divided into a forward and a backward graph."""

from __future__ import annotations

import json
from dataclasses import asdict

import jsonschema

from bitproof.harness.records import Partition
from bitproof.harness.report import json as report_json
from bitproof.harness.report import markdown, schema

FOUND = Partition(
    by="min_cut",
    nodes_joint=731,
    nodes_forward=332,
    nodes_backward=479,
    saved=55,
    saved_bytes=559236,
    uncut=78,
    uncut_bytes=871176,
    recomputed=31,
)


def test_a_partition_is_what_a_pass_reported_and_of_no_other():
    reported = asdict(FOUND)
    assert Partition.of([{}, {"save": 3}, reported]) == FOUND
    assert Partition.of([{}, reported | {"more": 1}, {"by": "min_cut"}]) is None
    assert Partition.of([]) is None


def test_a_partition_goes_through_report_json_and_fits_the_schema(make_report, make_result):
    text = report_json.render(make_report(make_result("divided", partition=FOUND), make_result("whole")))
    jsonschema.Draft202012Validator(json.loads(schema.schema_text())).validate(json.loads(text))
    assert json.loads(text)["cases"][0]["partition"] == asdict(FOUND)
    assert [result.partition for result in report_json.parse(text).cases] == [FOUND, None]


def test_the_report_for_people_shows_both_graphs_and_the_bytes_between_them(make_report, make_result):
    text = markdown.render(make_report(make_result("divided", partition=FOUND), make_result("whole")))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["nodes of forward", "332"] in lines and ["nodes of backward", "479"] in lines
    assert ["bytes saved between them", "559236 of 871176"] in lines
    assert ["calls computed again", "31"] in lines
    assert text.count("### Partition") == 1

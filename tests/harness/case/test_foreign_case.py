"""A case of which both systems are a user's: nothing is said of it that nobody stated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitproof.harness.capture.manifest import build_manifest
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.case.case_file import case_text, read_case
from bitproof.harness.compare.same_case import in_current_form
from bitproof.harness.machine.devices import Placement
from bitproof.harness.report import json as report_json
from bitproof.harness.report.html import document
from tests.harness.reports import result, write_report


def read(folder: Path, **values) -> Case:
    file = folder / "my_trainer.json"
    file.write_text(json.dumps({"name": "mine", "reference": "a.py:f", "candidate": "a.py:g"} | values))
    return read_case(file)


def test_its_family_is_its_files_name_and_experts_are_not_spread(tmp_path):
    case = read(tmp_path, parallelism={"world_size": 3})
    assert (case.family, case.parallelism) == ("my_trainer", Parallelism(world_size=3, ep=1))
    assert read(tmp_path, family="ours", parallelism={"world_size": 4, "ep": 4}).parallelism.ep == 4
    assert read(tmp_path, family="ours").family == "ours"


def test_a_case_with_a_system_of_ours_keeps_our_defaults(tmp_path):
    assert read(tmp_path, reference="eager").parallelism.ep == Parallelism().ep


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"batch": {"sequences": 6}, "steps": 3},
        {"expected": "CLOSE", "close_within": 0.1, "seed": 5, "parallelism": {"world_size": 8, "ep": 2}},
        {"expected": "DIFFERENT", "differs": ["grad"], "grad_norm": True, "optimizer": {"lr": 0.5}},
    ],
)
def test_what_it_states_is_the_whole_case_when_read_again(tmp_path, values):
    case = read(tmp_path, **values)
    assert Case.from_dict(json.loads(json.dumps(case.stated()))) == case
    assert in_current_form(json.loads(json.dumps(case.stated()))) == case.to_dict()
    (tmp_path / "again.json").write_text(case_text(case))
    assert read_case(tmp_path / "again.json") == case


def test_neither_manifest_nor_report_names_a_model_a_batch_or_data_that_nobody_stated(tmp_path):
    case = read(tmp_path, parallelism={"world_size": 2}, batch={"sequences": 6}, steps=2)
    about = {"determinism": {}, "graph": None, "fault": None, "systems": []}
    manifest = build_manifest(case, "a.py:f", "first", Placement(), **about)
    assert manifest.case["batch"] == {"sequences": 6}
    assert not {"model", "precision", "memory", "pipeline", "optimizer", "chunking"} & manifest.case.keys()
    path = write_report(tmp_path, [result(case)]) / "report.json"
    assert report_json.read(path).cases[0].case == case
    for text in (path.read_text(), page := document.render(report_json.read(path))):
        assert "deepseek" not in text and "pydoc" not in text and "ep 2" not in text
    assert "batch.sequences 6" in page


def test_a_case_of_ours_states_all_of_itself():
    case = Case(name="a", family="b", reference="eager")
    assert case.stated() == case.to_dict()

"""The cases of foreign trainers, without their packages: files that are cases, causes that are stated, and judged."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bitproof.harness.case.case_file import read_case
from bitproof.harness.systems.registry import check_system
from bitproof.harness.user_code.user_file import run_file

HERE = Path(__file__).parent / "abroad"
FILES = sorted(HERE.glob("*.json"))
CASES = {file.stem: read_case(file) for file in FILES}


def test_every_case_names_factories_that_are_there():
    assert len(CASES) > 10
    assert {case.name for case in CASES.values()} == set(CASES)
    for case in CASES.values():
        for system in (case.reference, case.candidate):
            check_system(system)
    families = {case.family for case in CASES.values()}
    assert families == {"torchtitan", "transformers", "accelerate", "lightning", "pipelining"}


def test_each_case_that_differs_has_its_cause():
    module, _ = run_file(HERE / "run.py")
    assert set(module.CAUSES) == {name for name, case in CASES.items() if case.expected == "DIFFERENT"}
    right = {"operator": "add.Tensor", "module": "model.layers.1.input_layernorm", "direction": "forward"}
    for changed, wrong in (({}, 0), ({"operator": "mul"}, 1), ({"module": None}, 1), ({"direction": "backward"}, 1)):
        report = {"cases": [{"name": "hf_llama_eps", "first_divergence": right | changed}]}
        assert len(module.wrong_causes(report)) == wrong
    assert module.wrong_causes({"cases": [{"name": "hf_llama", "first_divergence": right}]}), "one that should be EQUAL"
    assert not module.wrong_causes({"cases": [{"name": "hf_llama", "first_divergence": None}]})


# `defects.py` is a list of defects, and glue to nothing.
@pytest.mark.parametrize("file", sorted({*HERE.glob("*.py")} - {HERE / "defects.py"}), ids=lambda file: file.name)
def test_glue_is_small(file):
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    assert ast.parse(file.read_text()).body and len(lines) <= {"titan.py": 30}.get(file.name, 60)

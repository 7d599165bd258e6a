"""The bugs of the wild, without their packages: cases, what is stated of each, the page, and how a night is judged."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bitproof.harness.case.case_file import read_case
from bitproof.harness.systems.registry import check_system
from bitproof.harness.user_code.user_file import run_file

HERE = Path(__file__).parent / "wild"
PAGE = HERE.parents[1] / "docs" / "wild.md"
GLUE = {"experts", "loops", "ring", "run", "zero"}
MODULE, _ = run_file(HERE / "run.py")
BUGS = {bug.name: bug for bug in MODULE.BUGS}


def test_every_bug_has_its_case_and_its_file_and_nothing_else_lies_beside_them():
    assert len(BUGS) == len(MODULE.BUGS) >= 10
    assert {file.stem for file in HERE.glob("*.json")} == set(BUGS) == {file.stem for file in HERE.glob("*.py")} - GLUE
    for name in BUGS:
        case = read_case(HERE / f"{name}.json")
        assert (case.name, case.family) == (name, "wild")
        for system in (case.reference, case.candidate):
            check_system(system)


@pytest.mark.parametrize("name", BUGS)
def test_a_bugs_file_names_its_thread(name):
    described = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    assert (BUGS[name].thread or "in every release") in described


@pytest.mark.parametrize("name", BUGS)
def test_the_page_says_what_was_seen_of_every_bug(name):
    [row] = [line for line in PAGE.read_text().splitlines() if line.endswith(f"<!-- {name} -->")]
    bug = BUGS[name]
    _, package, what, wrong, mended, blamed, judged, minutes, _ = (cell.strip() for cell in row.split("|"))
    assert package.startswith(MODULE.package_of(bug.wrong)) and (bug.thread or "#new") in package
    assert (what, judged) == (bug.what, bug.judged)
    assert wrong == f"{MODULE.releases_of(bug.wrong)}: DIFFERENT"
    assert mended == f"{MODULE.releases_of(bug.mended) if bug.mended else 'patch'}: EQUAL"
    assert (
        blamed.startswith(f"`{bug.cause[0]}") and f"({bug.cause[2] or MODULE.UNKNOWN})" in blamed and float(minutes) > 0
    )


def test_a_night_is_wrong_by_a_verdict_or_a_cause():
    bug = MODULE.Bug("b", None, "what", "a==1 p==2", None, ("add_", "layers.0", "backward"))
    cause = {"operator": "add_.Tensor", "module": "layers.0", "direction": "backward", "how": "reads different inputs"}
    wrong, mended = {"verdict": "DIFFERENT", "first_divergence": cause}, {"verdict": "EQUAL", "first_divergence": None}
    assert not MODULE.problems(bug, wrong, mended)
    for key, other in (("operator", "mul"), ("module", None), ("direction", "forward")):
        assert len(MODULE.problems(bug, wrong | {"first_divergence": cause | {key: other}}, mended)) == 1
    assert len(MODULE.problems(bug, mended, mended)) == len(MODULE.problems(bug, wrong, wrong)) == 1
    row = bug.row(wrong | {"minutes": 1}, mended | {"minutes": 1})
    assert row == (
        "| p [new](#new) | what | 2: DIFFERENT | patch: EQUAL | `add_.Tensor` of layers.0 (backward) reads "
        "different inputs | right | 2.0 |"
    )
    assert MODULE.table([(bug, wrong | {"minutes": 1}, mended | {"minutes": 1})]).splitlines() == [
        "bug  wrong      mended  to blame                            cause  minutes",
        "b    DIFFERENT  EQUAL   add_.Tensor of layers.0 (backward)  right  2.0",
        "",
        "flagged 1 of 1, mended EQUAL 1 of 1, cause right 1 of 1, 2 minutes",
    ]
    unstated = MODULE.table([(bug, mended | {"minutes": 1}, wrong | {"minutes": 1})])
    assert "NOT AS STATED" in unstated and "flagged 0 of 1, mended EQUAL 0 of 1, cause right 0 of 1" in unstated


def test_a_bugs_line_of_the_page_is_replaced_and_no_other(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| old | <!-- a -->\n| old | <!-- b -->\n")
    MODULE.write_row(page, "b", "| new |")
    assert page.read_text() == "| old | <!-- a -->\n| new | <!-- b -->\n"

"""The command line over systems that agree, and show nothing or too little by it: none of them is called EQUAL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.cli import main
from bitproof.harness.compare.verdict import RACES

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
LONELY = "tests.harness.execute.lonely_systems:"
TOYS = "tests.harness.toy_systems:"
NOTHING_COMPILED = "called code that torch.compile was to compile, and nothing of it was compiled, on every rank"


def words(folder: Path, system: str, reference: str | None = None) -> list[str]:
    """A call of `bitproof run` of a case of two ranks, by default with one system on both sides."""
    case = Case(
        name="agrees",
        family="test",
        reference=reference or system,
        candidate=system,
        steps=2,
        parallelism=Parallelism(world_size=2, ep=1),
    )
    (folder / "case.json").write_text(json.dumps(case.to_dict()))
    where = ("--case", str(folder / "case.json"), "--report-dir", str(folder / "reports"))
    return ["run", "--no-control", "--device", "cpu", *where]


def result_in(folder: Path) -> dict[str, Any]:
    [result] = json.loads((folder / "reports" / "latest" / "report.json").read_text())["cases"]
    return dict(result)


@pytest.mark.parametrize(
    ("system", "reference", "reason"),
    [
        (LONELY + "alone", None, "ran no collective in its steps on every rank: each trained alone"),
        (LONELY + "infinite", None, "on every rank each loss is all infinite or NaN at every step"),
        (LONELY + "stance", None, NOTHING_COMPILED),
        (LONELY + "fallen_back", None, NOTHING_COMPILED),
        (
            TOYS + "shown_racing",
            TOYS + "shown",
            f"{RACES}\n  `sum_1` reads what `reload` brings, before anything waits",
        ),
    ],
    ids=lambda value: str(value).rpartition(":")[2] if ":" in str(value) and "\n" not in str(value) else "",
)
def test_what_agrees_without_evidence_is_unverified_and_the_reason_is_printed(
    system: str,
    reference: str | None,
    reason: str,
    tmp_path: Path,
    one_host: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(words(tmp_path, system, reference))
    result, reported = result_in(tmp_path), capsys.readouterr().out
    assert (status, result["verdict"], sum(result["mismatched"].values())) == (3, "UNVERIFIED", 0), result["error"]
    assert reason in result["error"]
    assert reason.partition("\n")[0] in reported and "1 UNVERIFIED" in reported


def test_a_candidate_of_which_part_was_compiled_is_equal_and_says_how_much(tmp_path: Path, one_host: None) -> None:
    assert main(words(tmp_path, LONELY + "broken")) == 0
    result = result_in(tmp_path)
    assert result["verdict"] == "EQUAL"
    [reported] = [remark for remark in result["remarks"] if remark.startswith("candidate ")]
    assert " was compiled: 2 graphs of " in reported and ", 1 graph break, the first: " in reported


def test_a_candidate_whose_compiler_the_environment_switched_off_is_unverified_and_the_variable_is_named(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "bitproof", *words(tmp_path, LONELY + "compiled", LONELY + "reduced")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TORCH_COMPILE_DISABLE": "1"}, capture_output=True, text=True
    )
    result = result_in(tmp_path)
    assert (done.returncode, result["verdict"]) == (3, "UNVERIFIED"), done.stdout + done.stderr
    assert f"{NOTHING_COMPILED}: TORCH_COMPILE_DISABLE=1 is set" in result["error"]

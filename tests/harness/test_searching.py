"""`localize` and `bisect` over real ranks: what they find, show and write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases.chunking import transformer_batch
from harness import searching
from harness.case import Case, Memory, Model, Parallelism
from harness.records import CaseResult, Divergence, Verdict
from harness.report.json import parse
from harness.run_options import RunOptions
from tests.harness.localize.pass_defects import hosts_with

CPU = RunOptions(device="cpu", timeout=120.0)
TOYS = "tests.harness.toy_systems:"


def toy(candidate: str) -> Case:
    return Case(
        name="toy",
        family="toy",
        reference=TOYS + "steady",
        candidate=TOYS + candidate,
        steps=3,
        parallelism=Parallelism(world_size=2, ep=1),
    )


def localized(case: Case, folder: Path) -> tuple[int, dict[str, Any]]:
    status = searching.localize(case, CPU, folder)
    return status, json.loads((folder / "latest" / searching.LOCALIZE_FILE).read_text())


def test_a_difference_is_told_with_the_calls_around_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(toy("one_bit_off"), expected="CLOSE", close_within=0.5)
    status, found = localized(case, tmp_path)
    out = capsys.readouterr().out.splitlines()
    assert (status, found["verdict"]) == (1, "DIFFERENT"), "a bound excuses nothing here"
    first = found["first_divergence"]
    assert (first["step"], first["rank"], first["operator"]) == (2, 1, "bitwise_xor_.Scalar")
    [culprit] = [call for call in first["neighbours"] if call["is_culprit"]]
    assert (culprit["operator"], culprit["agrees"]) == ("bitwise_xor_.Scalar", False)
    before = first["neighbours"][: first["neighbours"].index(culprit)]
    assert len(before) == 3 and all(call["agrees"] for call in before)
    start = out.index(next(line for line in out if line.startswith("toy: DIFFERENT (grad") and "expected" not in line))
    assert out[start + 1].startswith(
        "  first divergence: step 2, rank 1, grad weight: 1 of 6 elements, at most 1 ULP, 0x"
    )
    assert out[start + 2].startswith(
        "  to blame: bitwise_xor_.Scalar of the step itself (forward) on rank 1 is a call "
    )
    assert out[start + 3] == "  on ranks: 1"
    assert "  calls of rank 1 around it, in execution order:" in out
    [line] = [line for line in out if line.startswith("  >")]
    assert line.split()[:2] == [">", "bitwise_xor_.Scalar"] and "DIFFERS" in line
    report = parse((tmp_path / "latest" / "report.json").read_text())
    assert report.cases[0].first_divergence is not None
    assert report.cases[0].first_divergence.neighbours == first["neighbours"]


def test_systems_that_agree_leave_nothing_to_localize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = localized(toy("steady"), tmp_path)
    assert (status, found["verdict"], found["first_divergence"]) == (0, "EQUAL", None)
    assert "toy: nothing to localize: EQUAL\n" in capsys.readouterr().out


def test_a_case_without_a_verdict_is_no_equal_one() -> None:
    result = CaseResult(case=toy("steady"), verdict=Verdict.ERROR, steps=3, world_size=2, device="cpu", backend="gloo")
    assert list(searching.tell_story(result)) == ["toy: no difference: ERROR"]


def test_a_difference_that_no_call_explains_is_told_as_such() -> None:
    first = Divergence(step=0, rank=1, kind="grad", name="weight")
    result = CaseResult(
        case=toy("steady"),
        verdict=Verdict.DIFFERENT,
        steps=3,
        world_size=2,
        device="cpu",
        backend="gloo",
        differing_kinds=("grad",),
        first_divergence=first,
    )
    assert list(searching.tell_story(result)) == [
        "toy: DIFFERENT (grad)",
        "  first divergence: step 0, rank 1, grad weight",
        "  to blame: no operator call explains it",
    ]


def test_a_defect_inside_a_pass_that_comes_with_bitproof_is_named_with_its_call(tmp_path: Path) -> None:
    case = replace(
        transformer_batch,
        steps=1,
        model=Model(flavor="dense"),
        parallelism=Parallelism(world_size=2),
        memory=Memory(policy="full"),
    )
    with hosts_with("repeat_with_another_epsilon"):
        assert searching.bisect(case, CPU, tmp_path) == 1
    found = json.loads((tmp_path / "latest" / searching.BISECT_FILE).read_text())
    assert (found["pass"], found["equal"], found["region"]) == ("rematerialize", "tag_memory", None)
    first = found["first_divergence"]
    assert (first["pass"], first["operator"], first["direction"]) == ("rematerialize", "add.Tensor", "forward")
    assert first["node"].startswith("add_") and "_recomputed" in first["node"]
    probes = [(probe["applied"], probe["reference"], probe["verdict"]) for probe in found["probes"]]
    assert probes == [
        ("the whole column", "eager_chunked", "DIFFERENT"),
        ("until tag_memory", "eager", "EQUAL"),
        ("until chunk", "eager_chunked", "DIFFERENT"),
        ("until rematerialize", "eager", "DIFFERENT"),
    ]
    diff = tmp_path / "latest" / "graphs" / "transformer_batch" / "03-rematerialize.diff"
    assert str(diff.resolve()) in found["answer"][-2] and diff.is_file()

"""`localize` over real ranks: what it finds, shows and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.commands.localize import LOCALIZE_FILE, localize
from bitproof.harness.options import RunOptions

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_host")]

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
    status = localize(case, CPU, folder)
    return status, json.loads((folder / "latest" / LOCALIZE_FILE).read_text())


def test_a_difference_is_reported_with_the_call_to_blame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(toy("one_bit_off"), expected="CLOSE", close_within=0.5)
    status, found = localized(case, tmp_path)
    out = capsys.readouterr().out.splitlines()
    assert (status, found["verdict"]) == (1, "DIFFERENT"), "a bound excuses nothing here"
    first = found["first_divergence"]
    assert (first["step"], first["rank"], first["operator"]) == (2, 1, "bitwise_xor_.Scalar")
    start = out.index(next(line for line in out if line.startswith("toy: DIFFERENT (grad") and "expected" not in line))
    assert out[start + 1].startswith(
        "  first divergence: step 2, rank 1, grad weight: 1 of 6 elements, at most 1 ULP, 0x"
    )
    assert out[start + 2].startswith(
        "  to blame: bitwise_xor_.Scalar of the step itself (forward) on rank 1 is an extra call "
    )
    # The bit is flipped in a part of the record, so the whole tensor over that memory is exchanged.
    verified = next(line for line in out[start:] if line.startswith("  verified"))
    assert verified.startswith("  verified: with the reference's value here, all "), verified
    assert "  on ranks: 1" in out[start + 3 : start + 7]


def test_systems_that_agree_leave_nothing_to_localize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = localized(toy("steady"), tmp_path)
    assert (status, found["verdict"], found["first_divergence"]) == (0, "EQUAL", None)
    assert "toy: nothing to localize: EQUAL\n" in capsys.readouterr().out

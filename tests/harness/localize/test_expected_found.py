"""A cause in two lines: one form for each kind of defect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bitproof.harness.localize.culprit import How
from bitproof.harness.localize.expected_found import FIXED, expected_and_found
from bitproof.harness.records import Sample, TensorDifference
from tests.harness.localize.exchange.exchanged_steps import Sides, weights


def step(
    scale: float = 0.125, *, extra: bool = False, missing: bool = False, swaps: bool = False
) -> Mapping[str, Tensor]:
    """A layer that scales and adds."""
    w, x = weights((16, 16), (8, 16))
    h = x @ w
    h = h if missing else h * scale
    h = h.tanh() if extra else h
    y = functional.silu(h)
    out = (h if swaps else y) @ w
    out.square().mean().backward()
    assert w.grad is not None
    return {"w": w.grad, "y": y.detach(), "out": out.detach()}


@pytest.mark.parametrize(
    ("options", "expected", "found"),
    [
        ({"scale": 0.25}, "other=0.125", "other=0.25"),
        ({"extra": True}, "no such call", "tanh of the step itself (forward)"),
        ({"missing": True}, "mul.Tensor of the step itself (forward)", "no such call"),
        (
            {"swaps": True},
            "reads the output of silu of the step itself (forward)",
            "reads the output of mul.Tensor of the step itself (forward)",
        ),
    ],
    ids=["a wrong argument", "an extra call", "a missing call", "a wrong input"],
)
def test_a_defect_is_stated_in_two_lines(tmp_path: Path, options: dict[str, Any], expected: str, found: str) -> None:
    sides = Sides(tmp_path, step, lambda: step(**options))
    verifier = sides.verifier()
    culprit, *_ = verifier.blamed(sides.recordings["candidate"], verifier.ready)
    assert culprit is not None
    assert expected_and_found(culprit, verifier.ready) == (expected, found)


def test_a_wrong_value_is_stated_by_the_bits_of_its_first_differing_element(tmp_path: Path) -> None:
    sides = Sides(tmp_path, step, lambda: step(scale=0.25))
    verifier, culprit = sides.verifier(), sides.blamed("mm")
    output = TensorDifference(samples=[Sample([0, 3], "0x3e800000", "0x3f000000")])
    assert expected_and_found(culprit, verifier.ready, output) == (
        "bits 0x3e800000 at [0, 3] of its output",
        "bits 0x3f000000 at [0, 3] of its output",
    )
    assert expected_and_found(culprit, verifier.ready) == (
        "the reference's output of the same inputs",
        "another output",
    )


@pytest.mark.parametrize("how", [*FIXED, "inherits", "draws", "computes", "reads", "adds", "lacks"])
def test_each_kind_of_defect_has_two_short_lines_of_different_texts(tmp_path: Path, how: How) -> None:
    sides = Sides(tmp_path, step, lambda: step(scale=0.25))
    verifier, culprit = sides.verifier(), replace(sides.blamed("silu"), how=how)
    first, second = expected_and_found(culprit, verifier.ready)
    assert first and second and first != second and len(first) <= 160 and len(second) <= 160


@pytest.fixture
def fills_memory() -> Iterator[None]:
    """Fresh memory holds NaN, as in every run of bitproof."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def reads(kind: str) -> Mapping[str, Tensor]:
    """A layer and what is added to it, from memory of several kinds."""
    w, x = weights((4, 4), (4, 4))
    h = x @ w
    kept = torch.empty(4, 4).copy_(h.detach())
    added = torch.zeros(4, 4) if kind == "right" else h.detach() * 2
    if kind == "uninitialized":
        added = torch.empty(16).view(4, 4)
    elif kind == "NaN that the reference has elsewhere":
        added = torch.empty(4, 4)
    elif kind == "numpy":
        added = torch.zeros(4, 4)
        added.numpy()[:] = 3
    elif kind == "numpy at first":
        added = torch.empty(4, 4)
        added.numpy()[:] = 3
    elif kind == "written later":
        added = torch.empty(4, 4)
        added.fill_(3)
    out = (h + added).sin()
    out.square().sum().backward()
    assert w.grad is not None
    return {"w": w.grad, "out": out.detach(), "kept": kept}


@pytest.mark.parametrize(
    ("kind", "how", "found"),
    [
        ("uninitialized", "unwritten", FIXED["unwritten"][1]),
        ("NaN that the reference has elsewhere", "unwritten", FIXED["unwritten"][1]),
        ("numpy", "outside", FIXED["outside"][1]),
        ("numpy at first", "outside", FIXED["outside"][1]),
    ],
)
@pytest.mark.usefixtures("fills_memory")
def test_memory_that_no_call_wrote_is_named(tmp_path: Path, kind: str, how: str, found: str) -> None:
    sides = Sides(tmp_path, lambda: reads("right"), lambda: reads(kind))
    culprit, verification = sides.verified()
    reported = expected_and_found(culprit, sides.verifier().ready)
    assert (culprit.how, reported[1]) == (how, found), culprit
    assert verification.status == "verified", verification


@pytest.mark.usefixtures("fills_memory")
def test_memory_that_calls_wrote_before_it_was_read_is_not_called_so(tmp_path: Path) -> None:
    for kind in ("right", "written later"):
        sides = Sides(tmp_path / kind.replace(" ", "_"), lambda k=kind: reads(k), lambda: reads("doubled"))
        for call in sides.logs["reference"][0]:
            assert not call.outside and (not call.unwritten or call.operator in ("copy_", "fill_.Scalar")), call

"""Causes in trainers of several kinds, through the command line; more of them in tests/benchmarks/bench_blame.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.bench_blame import blamed_in, judged
from tests.benchmarks.defective_trainers import DEFECTS

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.mark.parametrize(
    ("kind", "defect"),
    [
        ("fsdp2", "decay"),  # the blamed call gives a DTensor
        ("ddp", "other_tokens_on_rank_1"),  # of one rank alone
        ("clipping", "swapped"),  # in a bucket, behind clipping
        ("accumulating", "rounded"),  # between micro-batches: of backward
        ("pipelined", "sends_back_more"),
        ("tp", "alpha"),
        ("loop", "beta"),  # a loop that is not left between steps
        ("fused", "left_out_on_rank_1"),
    ],
)
def test_a_defect_is_blamed_in_module_and_direction_operator_and_rank(kind: str, defect: str, tmp_path: Path) -> None:
    verdict, found = blamed_in(tmp_path, kind, defect)
    assert (verdict, judged(found, DEFECTS[kind, defect])) == ("DIFFERENT", (True, True, True)), found

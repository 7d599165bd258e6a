"""Causes in trainers of several kinds, through the command line; more of them in tests/benchmarks/bench_blame.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import defective_trainers
from tests.benchmarks.bench_blame import Program, case_of, judged, ran
from tests.benchmarks.defective_trainers import DEFECTS

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


CHOSEN = [
    ("fsdp2", "decay"),  # the blamed call gives a DTensor
    ("ddp", "other_tokens_on_rank_1"),  # of one rank alone
    ("clipping", "swapped"),  # in a bucket, behind clipping
    ("accumulating", "rounded"),  # between micro-batches: of backward
    ("pipelined", "sends_back_more"),
    ("tp", "alpha"),
    ("loop", "beta"),  # a loop that is not left between steps
    ("fused", "left_out_on_rank_1"),
]


def test_defects_are_blamed_in_module_and_direction_operator_and_rank(tmp_path: Path) -> None:
    chosen = [Program(defective_trainers, kind, (defect,)) for kind, defect in CHOSEN]
    results = ran(tmp_path, [case_of(tmp_path, program) for program in chosen])
    for program, of in zip(chosen, CHOSEN, strict=True):
        result = results[program.name]
        found = result["first_divergence"] or {}
        assert (result["verdict"], judged(found, DEFECTS[of])) == ("DIFFERENT", (True, True, True)), found

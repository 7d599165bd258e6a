"""A sum in an order of chance, in one expert on one rank, is called noise and found: in eager, and in the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases.chunking import moe_seq
from harness.case import Parallelism
from harness.launch import run_cases
from harness.records import CaseResult, Verdict
from harness.run_options import RunOptions
from tests.harness.localize.defects import EXPERTS
from tests.harness.localize.noise import NOISY_RANK

NOISE = "tests.harness.localize.noise"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    graph = replace(moe_seq, name="graph", steps=1, parallelism=Parallelism(world_size=2))
    cases = [graph, replace(graph, name="eager", reference=f"{NOISE}:eager")]
    options = RunOptions(device="cpu", timeout=120.0, extra_passes=(f"{NOISE}:add_noise",))
    return {result.case.name: result for result in run_cases(cases, options, tmp_path_factory.mktemp("run"))}


@pytest.mark.parametrize(("system", "role", "chunks"), [("graph", "candidate", {0}), ("eager", "reference", {0, 1})])
def test_the_noisy_call_is_blamed_on_its_rank_though_its_rows_reach_all(
    results: dict[str, CaseResult], system: str, role: str, chunks: set[int]
) -> None:
    result, first = results[system], results[system].first_divergence
    assert (result.verdict, result.control[role]) == (Verdict.NONDETERMINISTIC, "DIFFERENT"), result.error
    assert first is not None
    assert (first.between, first.step) == (f"{role} against itself", 0)
    assert (first.operator, first.module, first.direction) == ("sum_in_any_order", EXPERTS, "forward")
    assert first.how == "gives another output from the same inputs"
    assert (first.operator_rank, first.operator_ranks) == (NOISY_RANK, str(NOISY_RANK))
    assert first.chunk in chunks
    assert first.source is not None and first.source.rpartition(":")[0].endswith(".py")
    assert first.output_elements is not None and 0 < (first.output_elements_differing or 0) <= first.output_elements
    assert (first.output_max_ulp or 0) > 0


def test_a_noisy_graph_leaves_the_verdict_on_its_reference_alone(results: dict[str, CaseResult]) -> None:
    assert results["graph"].control == {"reference": "EQUAL", "candidate": "DIFFERENT"}
    assert results["eager"].control == {"reference": "DIFFERENT", "candidate": "DIFFERENT"}

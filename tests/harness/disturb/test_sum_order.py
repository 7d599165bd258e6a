"""Another order of sums, put into the candidate: the cases that are there to see it must be DIFFERENT."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitproof.builtin_cases import CASES, bucketing, shapes
from bitproof.harness.disturb.faults import SUM_ORDERS
from bitproof.harness.execute.launch import run_cases
from bitproof.harness.options import RunOptions
from bitproof.harness.powers.doctor.command import MAIN_CASES

pytestmark = pytest.mark.ranks

SEEING = (*bucketing.SEE_ORDER, *(case for case in shapes.CASES if case.name.endswith(("float32", "bf16_reduce"))))


def small(case, ranks=4):
    """A layer, one step, on so many ranks that each order is another: of two there is one, of three no pairs."""
    model = replace(case.model, layers=1, dense_layers=0)
    return replace(case, model=model, parallelism=replace(case.parallelism, world_size=ranks, ep=1), steps=1)


def run(case, folder, order):
    options = RunOptions(device="cpu", control="never", inject=order and f"sum-order:order={order}")
    [result] = run_cases([case], options, folder)
    return result


@pytest.mark.slow
def test_a_bucket_summed_by_position_is_different_and_blame_names_the_reduce_scatter(tmp_path):
    result = run(small(bucketing.SEE_ORDER[0], ranks=3), tmp_path, "position")
    assert (result.verdict, result.error) == ("DIFFERENT", None)
    assert result.first_divergence.kind == "grad"
    assert result.first_divergence.call.operator == "reduce_scatter_tensor"


@pytest.mark.slow
def test_of_two_ranks_there_is_one_order_and_the_fault_says_so(tmp_path):
    case = small(bucketing.SEE_ORDER[0])
    two = replace(case, parallelism=replace(case.parallelism, world_size=2))
    result = run(two, tmp_path, "descending")
    assert result.verdict == "ERROR" and "fault sum-order:order=descending,step=0 never fired" in result.error


def verdicts(cases, folder, order):
    """Of each case by name its verdict, and the operator that is blamed, None for none."""
    options = RunOptions(device="cpu", control="never", inject=order and f"sum-order:order={order}")
    found = {}
    for result in run_cases(cases, options, folder):
        first = result.first_divergence
        found[result.case.name] = (result.verdict.value, first and first.call and first.call.operator)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("order", [None, *SUM_ORDERS])
def test_every_case_that_is_there_to_see_the_order_of_sums_sees_each_and_blame_names_the_collective(tmp_path, order):
    expected = ("DIFFERENT", "reduce_scatter_tensor") if order else ("EQUAL", None)
    found = verdicts([small(case) for case in SEEING], tmp_path, order)
    assert found == {case.name: expected for case in SEEING}


@pytest.mark.slow
@pytest.mark.parametrize("order", SUM_ORDERS)
@pytest.mark.parametrize("name", MAIN_CASES)
def test_a_main_case_sees_each_order_in_its_first_step_and_blame_names_the_collective(tmp_path, name, order):
    found = verdicts([replace(CASES[name], steps=1)], tmp_path, order)
    assert found == {name: ("DIFFERENT", "reduce_scatter_tensor")}

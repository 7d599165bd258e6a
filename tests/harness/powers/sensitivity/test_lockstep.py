"""All ranks in one process: collectives take what the group's ranks hold."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.errors import PassError
from bitproof.harness.powers.sensitivity.lockstep import run_step
from bitproof.harness.powers.sensitivity.program import INPUT, PARAM
from tests.harness.powers.sensitivity.toy import VALUES, program_of, run


def test_a_sum_over_ranks_is_every_ranks():
    program, ranks = run()
    slot = program.compared["loss", "loss"]
    assert [values[slot].tolist() for values in ranks] == [[2.0, 8.0], [2.0, 8.0]]


def exchange(received):
    def build(graph, w, x):
        call = torch.ops._c10d_functional.all_to_all_single.default
        return [graph.call_function(call, (x, received, [1, 3], "all"))]

    return program_of(build)


def test_ranks_that_expect_other_rows_than_they_are_sent_fail_as_they_would():
    held = [VALUES[0], VALUES[1]]
    with pytest.raises(RuntimeError, match=r"rank 0 expects \[2, 2\] rows and is sent \[1, 1\]"):
        run_step(exchange([2, 2]), held)


def test_ranks_that_bring_other_shapes_fail_as_they_would():
    held = [VALUES[0], VALUES[1] | {(INPUT, "x"): torch.zeros(2), (PARAM, "w"): torch.zeros(2)}]

    def build(graph, w, x):
        return [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "all"))]

    with pytest.raises(RuntimeError, match="several shapes"):
        run_step(program_of(build), held)


def test_a_collective_that_is_not_known_here_is_refused():
    def build(graph, w, x):
        return [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "max", "all"))]

    with pytest.raises(PassError, match="a reduction by max"):
        run_step(program_of(build), VALUES)

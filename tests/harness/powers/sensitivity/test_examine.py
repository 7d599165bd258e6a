"""Calls examined: what is seen, what is lost, and what is blind by nature."""

from __future__ import annotations

import pytest
import torch

from bitproof.harness.powers.sensitivity.examine import TRIES, Examiner, NotRepeatableError
from bitproof.harness.powers.sensitivity.lockstep import run_step
from bitproof.harness.powers.sensitivity.program import INPUT, PARAM
from bitproof.harness.powers.sensitivity.spread import FAILURE, Fate
from tests.harness.powers.sensitivity.toy import aten, by_name, product, program_of, run


def examined(node, build=product, isolate=lambda follow: follow()):
    program, ranks = run(build)
    call = by_name(program, node)
    found = Examiner(program, ranks, "seed", isolate).examine(call.index)
    return found, [program.calls[index].operator for index in found.lost]


def test_a_call_that_a_compared_tensor_shows_is_seen():
    found, _ = examined("add")
    assert found.shown == "loss" and not found.is_blind and found.tries <= TRIES


def test_a_call_whose_value_is_multiplied_by_zero_is_blind_by_nature_and_one_that_is_rounded_away_is_not():
    found, lost = examined("neg")
    assert found.shown is None and found.is_blind and set(lost) <= {"mul", "add"}

    def rounded(graph, w, x):
        y = graph.call_function(aten.mul.Tensor, (x, w))
        return [graph.call_function(aten.add.Tensor, (y, 1e6))]

    found, lost = examined("mul", rounded)
    assert found.shown is None and not found.is_blind and lost == ["add"]
    assert found.tries == TRIES


def test_a_call_that_is_sliced_away_is_blind_and_one_of_which_a_part_is_taken_is_seen():
    def sliced(graph, w, x):
        y = graph.call_function(aten.neg.default, (x,))
        z = graph.call_function(aten.exp.default, (x,))
        parts = [graph.call_function(aten.slice.Tensor, (part, 0, *ends)) for part, ends in ((y, (4, 9)), (z, (0, 1)))]
        return [graph.call_function(aten.cat.default, (parts,))]

    found, lost = examined("neg", sliced)
    assert found.is_blind and lost == ["slice"]
    found, _ = examined("exp", sliced)
    assert not found.is_blind, "another element may be taken"


def test_what_nobody_reads_is_blind():
    def unread(graph, w, x):
        graph.call_function(aten.neg.default, (x,))
        return [w]

    found, _ = examined("neg", unread)
    assert found.is_blind and found.lost == (-1,)


def test_what_may_crash_is_followed_apart():
    def picked(graph, w, x):
        order = graph.call_function(aten.argsort.default, (x,))
        return [graph.call_function(aten.index.Tensor, (w, [order]))]

    apart = []

    def isolate(follow):
        apart.append(follow())
        return Fate(FAILURE)

    found, _ = examined("argsort", picked, isolate)
    assert apart and found.shown == FAILURE


def test_a_formula_is_seen_or_gives_the_same_bits_or_is_lost():
    found, _ = examined("all_reduce")
    assert found.neighbours == {"from the last rank": "same"}, "two summands have no order"

    def scored(graph, w, x):
        y = graph.call_function(aten.sigmoid.default, (x,))
        return [y, graph.call_function(aten.add.Tensor, (y, 1e6))]

    program = program_of(scored, returned=(("loss", "loss"), ("grad", "w")))
    ranks = run_step(program, [{(PARAM, "w"): torch.ones(1), (INPUT, "x"): torch.linspace(-4, 4, 99)}] * 2)
    call = by_name(program, "sigmoid")
    seen = Examiner(program, ranks, "seed", lambda follow: follow()).examine(call.index).neighbours
    assert seen["1 / (1 + exp(-x))"] == "seen"
    del program.compared["loss", "loss"], program.shown
    lost = Examiner(program, ranks, "seed", lambda follow: follow()).examine(call.index).neighbours
    assert lost["1 / (1 + exp(-x))"] == "lost"


def test_what_does_not_repeat_is_refused():
    program, ranks = run()
    call = by_name(program, "mul")
    ranks[0][by_name(program, "slice").result] = ranks[0][by_name(program, "slice").result] + 1
    ranks[1][by_name(program, "slice").result] = ranks[1][by_name(program, "slice").result] + 1
    with pytest.raises(NotRepeatableError, match="gives other bits when it is repeated"):
        Examiner(program, ranks, "seed", lambda follow: follow()).examine(call.index)

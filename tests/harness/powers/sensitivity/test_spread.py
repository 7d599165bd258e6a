"""Wrong values, followed from call to call until they are seen or lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitproof.harness.powers.sensitivity.spread import FAILURE, Compared, Fate, follow, readers_agree
from tests.harness.powers.sensitivity.toy import by_name, run


def fate(node, change, rank=0):
    program, ranks = run()
    slot = by_name(program, node).result
    found = follow(program, ranks, {(slot, rank): change(ranks[rank][slot].clone())})
    return found.shown, [program.calls[index].operator for index in found.lost]


def poked(place, by):
    def change(x):
        x[place] += by
        return x

    return change


def test_an_error_that_reaches_a_compared_tensor_is_seen_as_its_kind():
    assert fate("mul", poked(0, 0.5)) == ("loss", [])
    assert fate("mul", poked(1, 2.0**-20), rank=1) == ("loss", [])


def test_an_error_is_lost_where_nothing_takes_it_is_rounded_away_or_multiplied_by_zero():
    assert fate("mul", poked(3, 0.5)) == (None, ["slice"])
    assert fate("add", poked(1, 2.0**-23)) == (None, ["all_reduce"])
    assert fate("neg", poked(0, -1e6)) == (None, ["mul"])
    assert fate("neg", poked(0, 1e6)) == (None, ["add"]), "the sign of zero is another, and adding swallows that"


def test_where_every_call_is_compared_the_wrong_one_shows_itself_unless_it_only_packs():
    def fate_of(node, change, packing=()):
        program, ranks = run()
        slot = by_name(program, node).result
        compared = Compared.of(program, ranks, packing)
        return follow(program, ranks, {(slot, 0): change(ranks[0][slot].clone())}, compared).shown

    assert fate_of("mul", poked(3, 0.5)) == "activation", "the slice does not take it"
    assert fate_of("add", poked(1, 2.0**-22)) == "activation", "the sum over ranks loses it"
    assert fate_of("neg", poked(0, 1e6)) == "activation"
    assert fate_of("neg", poked(0, 1e6), packing=["neg"]) == "activation", "what reads it is another call"
    assert fate_of("add", poked(1, 2.0**-22), packing=["add", "add_tensor"]) is None


def test_what_makes_a_call_fail_is_seen():
    assert fate("slice_1", lambda x: torch.zeros(3)) == (FAILURE, [])


def test_a_mistake_of_ours_is_no_failure_of_a_run():
    def mistaken(*_):
        raise AttributeError

    program, ranks = run()
    index = by_name(program, "slice").index
    program.calls[index] = replace(program.calls[index], function=mistaken)
    with pytest.raises(AttributeError):
        follow(program, ranks, {(by_name(program, "mul").result, 0): torch.ones(4)})


def test_what_nobody_reads_is_lost_at_once():
    program, ranks = run()
    program.readers[by_name(program, "neg").result].clear()
    assert follow(program, ranks, {(by_name(program, "neg").result, 0): torch.ones(4)}) == Fate(None, (-1,))


def test_readers_agree_on_a_copy_and_not_on_another_value():
    program, ranks = run()
    slot = by_name(program, "mul").result
    assert readers_agree(program, ranks, slot, 1, ranks[1][slot].clone())
    assert not readers_agree(program, ranks, slot, 1, ranks[1][slot] + 1)

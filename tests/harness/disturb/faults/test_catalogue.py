"""The catalogue as a table: what every row must have."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest

from bitproof.builtin_cases import CASES
from bitproof.harness.case import Parallelism
from bitproof.harness.disturb import entry
from bitproof.harness.disturb.entry import ANY, Entry, Family, Site
from bitproof.harness.disturb.faults import FAULTS, Named, check_fault, parse_fault
from bitproof.harness.disturb.faults.catalogue import CATALOGUE, FAMILIES
from bitproof.harness.errors import UsageError
from bitproof.harness.powers.mutants.cli import DEFAULT_CASES

FAULT_ROWS = [row for row in CATALOGUE.values() if row.is_fault]


def test_there_are_faults_in_eleven_families_and_rewrites_that_are_none():
    assert len(FAULT_ROWS) >= 80
    assert len(CATALOGUE) - len(FAULT_ROWS) >= 15
    modules = [family.__name__.rpartition(".")[2] for family in FAMILIES]
    assert modules == list(dict.fromkeys(row.family for row in CATALOGUE.values()))
    assert set(modules) == set(get_args(Family))


def test_every_row_is_reported_and_sourced_under_a_name_of_its_own():
    for name, row in CATALOGUE.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) and name not in FAULTS
        assert row.says and row.source and not row.says.endswith(".")
        assert (row.call is not None) == bool(row.operators)


def test_a_function_becomes_the_row_of_its_name_and_docstring():
    @entry.row("ours", rank=-1)
    def one_bit_lost(g):
        """a bit is lost.

        More that nobody is told.
        """

    assert isinstance(one_bit_lost, Entry) and one_bit_lost.edit is not None
    assert (one_bit_lost.name, one_bit_lost.says, one_bit_lost.source) == ("one-bit-lost", "a bit is lost", "ours")

    @entry.row("ours", operators=("add_",))
    def nothing_added(call):
        """nothing is added."""

    assert isinstance(nothing_added, Entry) and nothing_added.call is not None and nothing_added.edit is None
    assert nothing_added.sites == (Site(None, "update", None, "add_"),)


def test_a_row_that_strikes_in_no_way_or_in_two_is_refused():
    with pytest.raises(AssertionError, match="strikes in 0 ways"):
        Entry(name="none", says="", source="")
    with pytest.raises(AssertionError, match="strikes in 2 ways"):
        Entry(name="two", says="", source="", order="pairwise", edit=lambda g: [])


def test_a_name_of_the_catalogue_reads_as_a_fault_and_writes_itself():
    for name in CATALOGUE:
        assert parse_fault(name) == Named(name=name)
        assert str(parse_fault(name)) == name


def test_a_misspelled_name_is_refused_with_the_nearest_ones():
    with pytest.raises(UsageError, match="did you mean no-weight-decay") as error:
        parse_fault("no-weigth-decay")
    assert "unknown fault 'no-weigth-decay'" in str(error.value)


def test_a_name_takes_no_fields():
    with pytest.raises(UsageError, match="unknown fault 'no-weight-decay'"):
        parse_fault("no-weight-decay:rank=1")


def test_a_fault_that_a_case_lacks_something_for_is_refused_saying_what():
    case = replace(CASES["moe_seq"], steps=2)
    check_fault(parse_fault("tokens-not-counted"), case)
    with pytest.raises(UsageError) as error:
        check_fault(parse_fault("chunk-1-sees-the-future"), case)
    assert str(error.value) == (
        "UsageError: fault chunk-1-sees-the-future cannot strike in case moe_seq\n  expected: whole blocks in chunks"
    )
    with pytest.raises(UsageError, match="expected: 2 steps or more"):
        check_fault(parse_fault("gradient-not-zeroed"), replace(case, steps=1))
    with pytest.raises(UsageError, match="a graph that runs as it is"):
        check_fault(parse_fault("tokens-not-counted"), CASES["inductor_moe"])
    with pytest.raises(UsageError, match="3 ranks or more"):
        few = replace(CASES["blocks_batch_float32"], parallelism=Parallelism(world_size=2))
        check_fault(parse_fault("summed-by-position"), few)


def test_every_fault_has_a_case_of_those_that_come_with_bitproof():
    """Where it can strike, and should be seen."""

    def without(names):
        cases = [CASES[name] for name in names]
        return {row.name for row in CATALOGUE.values() if all(row.unmet(x) or row.hidden(x) for x in cases)}

    assert without(CASES) == set()
    assert without(DEFAULT_CASES) == set()
    shared = ("experts_seq_world4", "joint_experts_seq_overlap", "pipeline_reductions_once", "pipeline_zbv")
    others = [name for name in DEFAULT_CASES if name not in shared]
    assert "wrong-group" in without(others), "in the other cases 2 ranks share a set of experts and 4 an expert"


def test_a_site_without_a_module_stands_for_every_one_and_another_does_not():
    site = Site("layers.0.moe", "forward", 1, "silu")
    assert site.is_at("layers.0.moe", "forward") and site.is_of("silu.default")
    assert not site.is_at("layers.1.moe", "forward") and not site.is_at("layers.0.moe", "backward")
    assert not site.is_of("mul.Tensor")
    anywhere = Site(ANY, "backward", ANY, "reduce_scatter_tensor")
    assert anywhere.is_at(None, "backward") and not anywhere.is_at(None, "forward")


def test_the_last_rank_is_the_wrong_one_where_a_row_says_so():
    row = CATALOGUE["one-ulp-on-one-rank"]
    assert (row.rank_of(2), row.rank_of(8)) == (1, 7)
    assert CATALOGUE["no-weight-decay"].rank_of(8) is None

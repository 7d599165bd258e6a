"""What a program is, and what brute force makes of it."""

from __future__ import annotations

import math

import numpy as np

from bitproof.harness.placement.problem import Choice, PlacementProblem
from tests.harness.placement.brute_force import brute_force, every_choice

NEVER = math.inf


def two_nodes() -> PlacementProblem:
    program = PlacementProblem()
    program.add_node("a", [Choice("cheap", 1.0, 8.0), Choice("small", 3.0, 2.0)])
    program.add_node("b", [Choice("x"), Choice("y", 1.0)])
    program.add_edge("a", "b", np.array([[NEVER, 5.0], [0.0, 0.0]]))
    return program


def test_what_is_taken_costs_its_choices_and_its_edges():
    taken = two_nodes().take({"a": 0, "b": 1})
    assert (taken.cost, taken.bytes) == (1.0 + 1.0 + 5.0, 8.0)


def test_edges_between_the_same_two_nodes_add_up():
    program = two_nodes()
    program.add_edge("a", "b", np.array([[0.0, 1.0], [2.0, 0.0]]))
    assert program.take({"a": 0, "b": 1}).cost == 8.0
    assert program.take({"a": 1, "b": 0}).cost == 5.0


def test_choices_that_do_not_go_together_are_never_taken():
    assert [taken.choices for taken in every_choice(two_nodes())] == [
        {"a": 0, "b": 1},
        {"a": 1, "b": 0},
        {"a": 1, "b": 1},
    ]


def test_brute_force_finds_the_cheapest_that_keeps_the_bound():
    found = brute_force(two_nodes())
    assert found is not None and found.choices == {"a": 1, "b": 0}
    assert brute_force(two_nodes(), bound=2.0) == found
    assert brute_force(two_nodes(), bound=1.9) is None


def test_a_node_that_is_fixed_has_one_choice_left():
    fixed = two_nodes().fixed({"a": 0})
    assert [choice.name for choice in fixed.nodes["a"]] == ["cheap"]
    assert [taken.cost for taken in every_choice(fixed)] == [7.0]

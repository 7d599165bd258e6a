"""The solver against brute force, bounds that cannot be kept, and a machine without a solver."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from bitproof.harness.errors import MachineError, PlacementError
from bitproof.harness.placement.problem import Choice, PlacementProblem
from bitproof.harness.placement.solve import MIB, least_bytes, solve
from tests.harness.placement.brute_force import brute_force


def random_program(seed: int) -> PlacementProblem:
    """Seven nodes of up to three choices, one of them with one alone, and edges of which a fifth of the pairs are not
    allowed; the first choices always are."""
    draw = np.random.default_rng(seed)
    program = PlacementProblem()
    for number in range(7):
        count = 1 if number == 3 else int(draw.integers(2, 4))
        choices = [Choice(f"c{k}", float(draw.integers(0, 20)), float(draw.integers(1, 9)) * MIB) for k in range(count)]
        program.add_node(f"n{number}", choices)
    for first, second in ((0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (5, 6), (1, 6)):
        a, b = f"n{first}", f"n{second}"
        costs = draw.integers(0, 15, (len(program.nodes[a]), len(program.nodes[b]))).astype(float)
        costs[draw.random(costs.shape) < 0.2] = math.inf
        costs[0, 0] = 3.0
        program.add_edge(a, b, costs)
    return program


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_brute_force_with_and_without_a_bound(seed: int) -> None:
    program = random_program(seed)
    free = brute_force(program)
    assert free is not None
    assert solve(program).taken.cost == pytest.approx(free.cost)
    bound = (free.bytes + least_bytes(program)) / 2
    bounded = brute_force(program, bound)
    assert bounded is not None and bounded.bytes <= bound
    found = solve(program, bound)
    assert found.taken.cost == pytest.approx(bounded.cost) and found.taken.bytes <= bound
    assert found.gap <= 1e-6


def test_the_least_bound_can_be_kept_and_no_smaller_one() -> None:
    program = random_program(0)
    least = least_bytes(program)
    assert solve(program, least).taken.bytes == least
    with pytest.raises(PlacementError) as error:
        solve(program, least - 1)
    assert str(error.value) == (
        "PlacementError: no placement keeps the bound on a rank's memory\n"
        f"  expected: a bound of at least {least / MIB} MiB: less than that no placement takes\n"
        f"  found: {(least - 1) / MIB:g} MiB\n"
        "  fix: raise autoplace.memory_mib of the case, shrink its batch or its model, or add ranks"
    )


def test_of_choices_that_cost_the_same_the_one_listed_first_is_taken() -> None:
    program = PlacementProblem()
    for name in "abc":
        program.add_node(name, [Choice("first", 2.0), Choice("second", 2.0), Choice("third", 2.0)])
    program.add_edge("a", "b", np.zeros((3, 3)))
    assert solve(program).taken.choices == dict.fromkeys("abc", 0)
    program.add_edge("b", "c", np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]))
    assert solve(program).taken.choices == {"a": 0, "b": 1, "c": 0}


def test_a_machine_without_scipy_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(
        MachineError, match=r"which is not installed\n.*\n.*\n  fix: pip install 'bitproof\[placement\]'"
    ):
        solve(random_program(0))

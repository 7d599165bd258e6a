"""Find the optimum of a placement problem with HiGHS, through `scipy.optimize.milp`.

Needs:    a problem with at least one feasible solution; scipy, the extra `placement`.
Promises: the solution is optimal: the solver proved a gap of zero, within its tolerance of 1e-6 of the cost. Among
          equal costs the first choice is taken, so the optimum does not depend on the solver's internals.
Refuses:  a memory limit that no solution meets; the error has the least possible limit. A machine without scipy
          (MachineError).

1. Fix nodes with a single choice. Their edges become costs of the other node, and choices that are not allowed with
   them are removed.
2. Make a binary variable for each remaining choice. The variables of a node add up to 1.
3. Make a variable for each allowed pair of an edge. For each choice, the variables of its pairs add up to its own
   variable.
4. Minimize the sum of costs, with the bytes within the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from bitproof.harness.errors import MachineError, PlacementError
from bitproof.harness.placement.problem import PlacementProblem, Taken

TIE = 1e-6
"""The cost, in microseconds, that each choice has in addition to the choice before it. Among equal costs the first
choice is then the cheapest."""

GAP = 1e-6
"""The largest accepted relative difference between the cost found and the solver's proven lower limit."""

MIB = 2.0**20


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """An optimal solution, the size of the linear program, and the gap that the solver proved."""

    taken: Taken
    num_variables: int
    num_constraints: int
    gap: float


def solve(problem: PlacementProblem, bound: float = math.inf) -> Optimum:
    """Return the cheapest solution that needs at most `bound` bytes per rank.

    Raises PlacementError if there is none, and MachineError without scipy.
    """
    found = _solve(problem, bound, [[choice.cost for choice in choices] for choices in problem.nodes.values()])
    if found is None:
        least = math.ceil(least_bytes(problem) / MIB * 1000) / 1000
        raise PlacementError(
            "no placement keeps the bound on a rank's memory",
            expected=f"a bound of at least {least} MiB: less than that no placement takes",
            found=f"{bound / MIB:g} MiB",
            fix="raise autoplace.memory_mib of the case, shrink its batch or its model, or add ranks",
        )
    return found


def least_bytes(problem: PlacementProblem) -> float:
    """Return the least number of bytes per rank that any solution needs."""
    free = PlacementProblem(
        problem.nodes, {key: np.where(np.isfinite(costs), 0.0, np.inf) for key, costs in problem.edges.items()}
    )
    found = _solve(free, math.inf, [[choice.bytes / MIB for choice in choices] for choices in problem.nodes.values()])
    assert found is not None, "without a bound something can always be taken"
    return problem.take(found.taken.choices).bytes


def _solve(problem: PlacementProblem, bound: float, costs: list[list[float]]) -> Optimum | None:
    """Return the solution with the least sum of `costs` and the edges' costs; None if no solution meets the bound.

    `costs` has a list for each node, with a cost for each choice.
    """
    forced, kept, base = _fix_single_choices(problem, costs)
    choices = {name: kept[name] for name in problem.nodes if name not in forced}
    lines = _linear_program(problem, choices, base)
    taken, gap = dict(forced), 0.0
    if choices:
        # Fixed nodes are no variables, so their bytes are subtracted from the bound.
        spent = sum(problem.nodes[name][index].bytes for name, index in forced.items())
        sizes = [problem.nodes[name][i].bytes / MIB for name, left in choices.items() for i in left]
        solved = _minimize(lines, sizes, (bound - spent) / MIB)
        if solved is None:
            return None
        values, gap = solved
        for name, left in choices.items():
            # A variable is 0 or 1 only up to the solver's tolerance.
            taken[name] = left[int(np.argmax(values[lines.first[name] : lines.first[name] + len(left)]))]
    found = problem.take({name: taken[name] for name in problem.nodes})
    # The solver works with tolerances, so its answer is checked exactly.
    if found.bytes > bound or not math.isfinite(found.cost):
        return None
    return Optimum(taken=found, num_variables=len(lines.objective), num_constraints=len(lines.equals), gap=gap)


@dataclass
class _LinearProgram:
    """A linear program: variables are columns, and each row is an equation.

    - `first`: for each node, the column of its first choice.
    - `num_choices`: the number of columns for choices. Columns for pairs follow.
    - `objective`: the cost of each column.
    - `rows`, `columns`, `values`: the nonzero entries of the matrix.
    - `equals`: the right side of each row.
    """

    first: dict[str, int]
    num_choices: int
    objective: list[float]
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    equals: list[float] = field(default_factory=list)

    def constrain(self, terms: list[tuple[int, float]], right: float) -> None:
        for column, value in terms:
            self.rows.append(len(self.equals))
            self.columns.append(column)
            self.values.append(value)
        self.equals.append(right)


def _linear_program(
    problem: PlacementProblem, choices: dict[str, list[int]], base: dict[str, list[float]]
) -> _LinearProgram:
    """Return the linear program for the remaining `choices` (steps 2 and 3 at the top of this file).

    `base` has the costs of all choices, by node.
    """
    first: dict[str, int] = {}
    count = 0
    for name, left in choices.items():
        first[name], count = count, count + len(left)
    # `rank` is the position among the node's choices: the small cost prefers the first of equals.
    objective = [base[name][i] + TIE * rank for name, left in choices.items() for rank, i in enumerate(left)]
    lines = _LinearProgram(first, count, objective)
    for name, left in choices.items():
        # Step 2: each node takes exactly one of its choices.
        lines.constrain([(first[name] + k, 1.0) for k in range(len(left))], 1.0)
    for (a, b), matrix in problem.edges.items():
        if a not in choices or b not in choices:
            continue
        # Step 3: a variable for each compatible pair; those with a choice add up to that choice's variable.
        costs = matrix[np.ix_(choices[a], choices[b])]
        allowed = [(int(i), int(j)) for i, j in np.argwhere(np.isfinite(costs))]
        pairs = {pair: len(lines.objective) + k for k, pair in enumerate(allowed)}
        lines.objective += [float(costs[pair]) for pair in allowed]
        for end, name in enumerate((a, b)):
            for i in range(len(choices[name])):
                terms = [(column, 1.0) for pair, column in pairs.items() if pair[end] == i]
                lines.constrain([*terms, (first[name] + i, -1.0)], 0.0)
    return lines


def _minimize(lines: _LinearProgram, sizes: list[float], bound: float) -> tuple[np.ndarray, float] | None:
    """Return a pair: the values of all variables at the optimum, and the optimality gap. None without a solution.

    This is step 4 at the top of this file. `sizes`, the bytes of the choices, and `bound` are in MiB.
    """
    optimize, sparse = _scipy()
    num_variables, equals = len(lines.objective), lines.equals
    table = sparse.csr_array((lines.values, (lines.rows, lines.columns)), (len(equals), num_variables))
    constraints = [optimize.LinearConstraint(table, equals, equals)]
    num_pairs = num_variables - lines.num_choices
    if math.isfinite(bound):
        constraints.append(optimize.LinearConstraint(sparse.csr_array([sizes + [0.0] * num_pairs]), -np.inf, bound))
    answer = optimize.milp(
        lines.objective,
        # Pairs need not be integers: integral choices force their pair to 1.
        integrality=[1] * lines.num_choices + [0] * num_pairs,
        bounds=optimize.Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if answer.x is None:
        return None
    gap = float(answer.mip_gap or 0.0)
    assert answer.status == 0 and gap <= GAP, answer.message
    return answer.x, gap


def _fix_single_choices(
    problem: PlacementProblem, costs: list[list[float]]
) -> tuple[dict[str, int], dict[str, list[int]], dict[str, list[float]]]:
    """Fix each node that has a single choice, or that has a single choice left after other nodes were fixed.

    Returns three dicts by node: the index of the fixed choice, the indices of remaining choices, and the costs of all
    choices. These costs include edges to fixed nodes.
    """
    kept = {name: list(range(len(choices))) for name, choices in problem.nodes.items()}
    base = dict(zip(problem.nodes, [list(row) for row in costs], strict=True))
    edges_of: dict[str, list[tuple[str, np.ndarray]]] = {name: [] for name in problem.nodes}
    for (a, b), matrix in problem.edges.items():
        edges_of[a].append((b, matrix))
        # Transposed, so that the rows are always the choices of the node itself.
        edges_of[b].append((a, matrix.T))
    forced: dict[str, int] = {}
    due = [name for name, left in kept.items() if len(left) == 1]
    # Fixing a node may leave a neighbour with a single choice, which is then fixed, too.
    while due:
        name = due.pop(0)
        if name in forced:
            continue
        forced[name] = kept[name][0]
        for other, matrix in edges_of[name]:
            if other in forced:
                continue
            row = matrix[forced[name]]
            kept[other] = [i for i in kept[other] if math.isfinite(row[i])]
            base[other] = [cost + float(row[i]) for i, cost in enumerate(base[other])]
            assert kept[other], f"nothing of {other} goes with {name}"
            if len(kept[other]) == 1:
                due.append(other)
    return forced, kept, base


def _scipy() -> tuple[ModuleType, ModuleType]:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MachineError(
            "placements are solved for by scipy, which is not installed",
            expected="scipy, the extra `placement` of bitproof",
            found=str(error),
            fix="pip install 'bitproof[placement]'",
        ) from error
    return optimize, sparse

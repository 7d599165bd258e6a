"""A small traced step as a program: its nodes, what goes together, and what is counted."""

from __future__ import annotations

import functools
import math
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from bitproof.harness.graph.tracing.trace import trace_fixed_step
from bitproof.harness.placement.build import STATE_BYTES, PlacedLayer, PlacedParameter, PlacementInputs, build
from bitproof.harness.placement.problem import PlacementProblem
from bitproof.harness.placement.solve import least_bytes, solve
from tests.harness.placement.brute_force import brute_force

D, H, ROWS = 8, 16, 4
"""Model dim, hidden dim, rows of a batch."""


class Layer(nn.Module):
    """Two products, of which the first may be split by output, and the second by input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, H, bias=False)
        self.down = nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Layer()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (x + cast(nn.ModuleDict, layer)["mlp"](x)).sin()
        return x


def scene(tensor_ranks: int = 2, data_ranks: int = 2, times: int = 1, opaque: bool = False) -> PlacementInputs:
    may_be = ("whole",) if tensor_ranks == 1 else ("split",) if opaque else ("whole", "split")
    return PlacementInputs(
        layers=[PlacedLayer(name=f"layers.{n}.mlp", may_be=may_be, is_opaque=opaque) for n in range(2)],
        parameters=[
            PlacedParameter(
                name=f"layers.{n}.mlp.{name}.weight",
                shape=shape,
                layer=f"layers.{n}.mlp",
                split_dim=dim if tensor_ranks > 1 else None,
                data_ranks=data_ranks,
            )
            for n in range(2)
            for name, shape, dim in (("up", (H, D), 0), ("down", (D, H), 1))
        ],
        tensor_ranks=tensor_ranks,
        times={"layers.1": times},
        compute=torch.float32,
        reduce=torch.float32,
    )


@functools.cache
def program(tensor_ranks: int = 2, data_ranks: int = 2, times: int = 1, opaque: bool = False) -> PlacementProblem:
    with torch.device("meta"):
        model, x = Model(), torch.empty(ROWS, D)
    step = trace_fixed_step(model, lambda x: model(x).sum(), [x], gradient_seed=1.0, device=torch.device("cpu"))
    return build(step, scene(tensor_ranks, data_ranks, times, opaque))


UP, DOWN = "layers.0.mlp.up.weight", "layers.0.mlp.down.weight"


def names(node: str, **settings: int) -> list[str]:
    return [choice.name for choice in program(**settings).nodes[node]]


def test_a_parameter_is_sharded_or_replicated_and_split_as_its_layer_is() -> None:
    assert names(UP) == ["S0 R", "S0 S0", "R R", "R S0"]
    assert names(DOWN) == ["S0 R", "S0 S1", "R R", "R S1"]
    goes = program().edges["layers.0.mlp", UP]
    assert names("layers.0.mlp") == ["whole", "split"]
    assert [[math.isfinite(x) for x in row] for row in goes] == [[True, False, True, False], [False, True, False, True]]


def test_a_parameters_bytes_are_its_state_and_a_gathered_copy() -> None:
    held = {choice.name: choice.bytes for choice in program().nodes[UP]}
    assert held == {
        "S0 R": H * D * (STATE_BYTES / 2 + 4),
        "S0 S0": H * D / 2 * (STATE_BYTES / 2 + 4),
        "R R": H * D * (STATE_BYTES + 4),
        "R S0": H * D / 2 * (STATE_BYTES + 4),
    }


def test_a_parameter_that_no_other_rank_reads_costs_nothing_to_bring() -> None:
    assert {choice.cost for choice in program(data_ranks=1).nodes[UP]} == {0.0}
    assert all(choice.cost > 0 for choice in program().nodes[UP])


def test_a_layer_that_stands_for_three_counts_three_times() -> None:
    once, thrice = program().nodes["layers.1.mlp.up.weight"], program(times=3).nodes["layers.1.mlp.up.weight"]
    assert [x.cost * 3 for x in once] == [x.cost for x in thrice]
    assert [x.bytes * 3 for x in once] == [x.bytes for x in thrice]
    assert program(times=3).nodes[UP] == program().nodes[UP]


def test_only_operators_of_a_layer_that_may_be_split_have_a_choice() -> None:
    products = [name for name in program().nodes if name.startswith("mm")]  # the data needs no gradient
    assert len(products) == 2 * 6 - 1 and all(len(program().nodes[name]) > 1 for name in products)
    assert len(program().nodes["sin"]) == 1, "it lies between layers"
    assert {len(x) for name, x in program(tensor_ranks=1).nodes.items() if name.startswith("mm")} == {1}


def test_a_split_layer_sums_its_output_and_its_inputs_gradient_once() -> None:
    split = program().fixed({f"layers.{n}.mlp": 1 for n in range(2)})
    sums = []
    taken = solve(split).taken
    for (a, b), costs in split.edges.items():
        if 0 < costs[taken.choices[a], taken.choices[b]] < math.inf:
            sums.append(split.nodes[a][taken.choices[a]].name[0])
    assert sums == ["P"] * 3, "the first layer's input is data, which needs no gradient"


def test_the_optimum_of_a_two_layer_model_is_that_of_brute_force_under_any_bound() -> None:
    """Forward alone, on two ranks of data and two of a tensor group: every combination of choices is tried."""
    whole = program()
    kept = {n for n in whole.nodes if n.startswith("layers.") or n in ("mm", "mm_1", "mm_2", "mm_3")}
    kept |= {n for n in whole.nodes if n in ("sin", "sin_1", "add", "add_1") or n in ("t", "t_1", "t_2", "t_3")}
    forward = PlacementProblem({n: x for n, x in whole.nodes.items() if n in kept})
    forward.edges = {pair: costs for pair, costs in whole.edges.items() if set(pair) <= kept}
    free = brute_force(forward)
    assert free is not None and solve(forward).taken.cost == pytest.approx(free.cost)
    least = least_bytes(forward)
    for share in (0.0, 0.4, 0.8):
        bound = least + share * (free.bytes - least)
        tried = brute_force(forward, bound)
        assert tried is not None and solve(forward, bound).taken.cost == pytest.approx(tried.cost)
    costs = [x.taken.cost for x in (solve(forward, least), solve(forward))]
    assert costs[0] > costs[1], "a bound has its price"


def test_an_opaque_layer_is_shared_evenly_and_reads_its_parameters_as_they_lie() -> None:
    opaque = program(opaque=True)
    assert names(UP, opaque=True) == ["S0 S0", "R S0"]
    whole, shared = (x.nodes["mm"] for x in (program(tensor_ranks=1), opaque))
    assert len(shared) == 1 and shared[0].cost == whole[0].cost / 2 and shared[0].bytes == whole[0].bytes / 2
    assert math.isfinite(solve(opaque).taken.cost)

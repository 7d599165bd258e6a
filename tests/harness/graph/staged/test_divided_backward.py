"""A backward divided into the gradient of a stage's input and those of its weights: parts, order, bits, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from bitproof.harness.case import Schedule
from bitproof.harness.errors import PassError
from bitproof.harness.graph.staged.actions import Action
from bitproof.harness.graph.staged.orders import actions_of
from bitproof.harness.graph.staged.placed_calls import Once
from bitproof.harness.graph.staged.stage_messages import refuse_waiting
from tests.harness.graph.graphs import Applied, D, Layers, parameter
from tests.harness.graph.staged.stages import bits, layer, parts_of, run
from tests.harness.graph.staged.test_once_a_step import narrow_layer
from tests.harness.graph.staged.test_staged_step import run_whole

aten = torch.ops.aten
SCHEDULES = [
    (2, Schedule(micro_batches=4, order="zero_bubble")),
    (4, Schedule(micro_batches=4, order="zero_bubble")),
    (2, Schedule(micro_batches=4, order="zero_bubble", stages_per_rank=2)),
]
IN_V = [(2, Schedule(micro_batches=5, order=order, stages_per_rank=2)) for order in ("zbv", "dual_pipe_v")]


def products(part: Any) -> int:
    return sum(node.target is aten.mm.default for node in part.module.graph.nodes)


@pytest.mark.parametrize("once", [Once(weights=True), Once(True, True, True)])
@pytest.mark.parametrize(
    ("ranks", "schedule"), [(1, Schedule(micro_batches=1, order="zero_bubble")), *SCHEDULES, *IN_V]
)
@pytest.mark.parametrize("of", [layer, narrow_layer])
def test_a_divided_backward_has_the_bits_of_the_whole_graph(
    of: Any, ranks: int, schedule: Schedule, once: Once
) -> None:
    model = Layers(*(of() for _ in range(4)))
    joint, parts = parts_of(model, ranks * schedule.stages_per_rank, once=once)
    assert bits(run(joint, parts, model, schedule, ranks)) == bits(run_whole(joint, model, schedule.micro_batches))


def test_each_product_of_backward_is_in_one_part_and_only_the_first_is_waited_for() -> None:
    model = Layers(layer(), layer())
    (_, whole), (_, divided) = parts_of(model, 2), parts_of(model, 2, once=Once(weights=True))
    for stage in (0, 1):
        before = whole.by_place[stage, "backward"]
        first, second = divided.by_place[stage, "backward"], divided.weights[stage]
        assert products(before) == products(first) + products(second)
        assert (first.sent, second.sent, second.received) == (before.sent, (), ())
        assert set(first.received) == set(before.received)
        assert set(first.results) | set(second.results) == set(before.results)
    # Nothing waits for the first stage, so all of its backward is of weights; the last computes one product for each.
    assert products(divided.by_place[0, "backward"]) == 0 < products(divided.weights[0])
    assert products(divided.by_place[1, "backward"]) == products(divided.weights[1]) == 1


def test_a_rank_takes_weights_after_as_many_inputs_as_there_are_ranks_before_it() -> None:
    found = [
        " ".join(map(short, actions_of(Schedule(micro_batches=3, order="zero_bubble"), 2, rank))) for rank in (0, 1)
    ]
    assert found == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]


def short(action: Action) -> str:
    return ("F" if action.half == "forward" else action.part[0].upper()) + str(action.micro_batch)


@pytest.mark.parametrize(("ranks", "schedule"), SCHEDULES)
def test_weights_keep_the_order_of_micro_batches_and_no_rank_waits_for_ever(ranks: int, schedule: Schedule) -> None:
    actions = [actions_of(schedule, ranks, rank) for rank in range(ranks)]
    plain = replace(schedule, order="1f1b")
    refuse_waiting(actions, schedule.stage_map(ranks))
    for own in actions:
        for stage in {action.stage for action in own}:
            weights = [x.micro_batch for x in own if x.stage == stage and x.part == "weights"]
            assert weights == list(range(schedule.micro_batches))
        # Undivided, they are the actions of 1F1B.
        rest = [x._replace(part="whole") for x in own if x.part != "weights"]
        assert rest == actions_of(plain, ranks, own[0].stage % ranks)
        assert all(first != second for first, second in pairwise(own))


def draws(module: Applied, x: torch.Tensor) -> torch.Tensor:
    y = x @ module.matrix
    # The hook draws in backward.
    y.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
    return y


def test_a_backward_that_draws_is_not_divided() -> None:
    model = Layers(Applied(draws, matrix=parameter(D, D)), layer())
    parts_of(model, 2)
    with pytest.raises(PassError) as error:
        parts_of(model, 2, once=Once(weights=True))
    assert str(error.value).startswith("PassError: the backward of stage ")
    assert "cannot be divided: `rand_like` writes in place, or draws numbers" in str(error.value)
    assert str(error.value).endswith("fix: choose the order 1f1b")

"""Faults of what takes micro-batches through stages, struck into a step in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bitproof.builtin_cases.pipelines import pipeline_interleaved, pipeline_zbv
from bitproof.harness.case import Schedule
from bitproof.harness.disturb.faults.catalogue import CATALOGUE
from bitproof.harness.disturb.faults.clock import NOW
from bitproof.harness.disturb.faults.micro_batches import SHARED
from bitproof.harness.graph.staged.actions import Action
from bitproof.harness.graph.staged.placed_calls import Once
from tests.harness.graph.graphs import Layers, batch
from tests.harness.graph.staged.stages import InOneProcess, all_actions, bits, layer, parts_of, run
from tests.harness.graph.staged.test_once_a_step import narrow_layer

ROWS = [entry for entry in CATALOGUE.values() if entry.runner is not None and entry.family != "loops"]
JOINS = [entry for entry in ROWS if SHARED in entry.needs]
OF_INPUTS = {"labels-of-another-micro-batch": "labels", "tokens-of-another-micro-batch": "tokens"}
OF_STEPS = "gathered-before-the-update"
OF_DIVIDED = ("weights-of-another-micro-batch", "weights-after-all-inputs")
OF_TURNS = ("turn-passes-the-activation-before", "turn-passes-the-gradient-before")
SCHEDULE = Schedule(micro_batches=4)


def given(found):
    """What a step gives, its losses as their mean."""
    losses, gradients, buffers = found
    return bits([[sum(losses[1:], losses[0]) / len(losses)], gradients, buffers])


@pytest.fixture(scope="module")
def right():
    model = Layers(layer(), layer())
    joint, parts = parts_of(model, 2)
    return model, joint, parts, given(run(joint, parts, model, SCHEDULE, 2))


@pytest.mark.parametrize(
    "entry",
    [x for x in ROWS if x not in JOINS and x.name not in (*OF_INPUTS, OF_STEPS, *OF_DIVIDED, *OF_TURNS)],
    ids=lambda entry: entry.name,
)
def test_a_fault_changes_what_a_step_gives_and_a_right_rewrite_does_not(entry, right, monkeypatch):
    model, joint, parts, expected = right
    monkeypatch.setattr(NOW, "rank", 0)
    monkeypatch.setattr(NOW, "world_size", 1)
    found = given(run(joint, parts, model, SCHEDULE, 2, entry.runner))
    assert (found == expected) is not entry.is_fault


@pytest.mark.parametrize("name", [OF_STEPS, "gathered-twice-a-step"])
def test_a_fault_in_what_is_gathered_shows_once_parameters_have_changed(name):
    entry, model = CATALOGUE[name], Layers(narrow_layer(), narrow_layer())
    _, parts = parts_of(model, 2, once=Once(gathers=True))

    def two_steps(strike):
        step = InOneProcess(parts, all_actions(SCHEDULE, 2))
        strike(step)
        own = [x.detach().clone() for x in model.state_dict(keep_vars=True).values()]
        *kept, read = parts.placeholders
        inputs = [{read: batch(seed=index)} for index in range(SCHEDULE.micro_batches)]
        found = []
        for _ in range(2):
            with torch.no_grad():
                found.append(step(dict(zip(kept, own, strict=True)), inputs)[0])
            own = [x + 1 for x in own]
        return [bits([losses]) for losses in found]

    right, found = two_steps(lambda step: None), two_steps(entry.runner)
    assert found[0] == right[0] and (found[1] == right[1]) is not entry.is_fault


@pytest.mark.parametrize("name", OF_DIVIDED)
def test_a_fault_in_the_order_of_a_divided_backward_changes_what_a_step_gives(name):
    entry, model = CATALOGUE[name], Layers(layer(), layer())
    joint, parts = parts_of(model, 2, once=Once(weights=True))
    schedule = Schedule(micro_batches=4, order="zero_bubble")
    right, found = (given(run(joint, parts, model, schedule, 2, way)) for way in (lambda step: None, entry.runner))
    assert (found == right) is not entry.is_fault


@pytest.mark.parametrize("name", OF_TURNS)
def test_a_fault_at_the_turn_of_a_v_changes_what_a_step_gives_and_needs_a_v(name):
    entry, model = CATALOGUE[name], Layers(*(layer() for _ in range(4)))
    joint, parts = parts_of(model, 4, once=Once(weights=True))
    for schedule in (Schedule(order="zbv", stages_per_rank=2), Schedule(order="zero_bubble", stages_per_rank=2)):
        right, found = (given(run(joint, parts, model, schedule, 2, way)) for way in (lambda step: None, entry.runner))
        assert (found == right) is not schedule.stage_map(2).is_v
    assert (entry.unmet(pipeline_zbv), len(entry.unmet(pipeline_interleaved))) == ([], 1)


@pytest.mark.parametrize("entry", JOINS, ids=lambda entry: entry.name)
def test_a_fault_changes_what_two_stages_share_and_a_right_rewrite_does_not(entry, monkeypatch):
    monkeypatch.setattr(NOW, "rank", 0)
    monkeypatch.setattr(NOW, "world_size", 1)
    others, shared = torch.ones(1), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))

    def joined(gradients):
        return {**gradients, "shared": gradients["shared"] + 0.3 * gradients["shared"]}

    def step_with(strike):
        step = InOneProcess(SimpleNamespace(), ())
        step.join = joined
        strike(step)
        totals = {"g": shared[0], "h": others}
        for own in shared[1:]:
            totals = {"g": step.add(totals["g"], own), "h": step.add(totals["h"], others)}
        _, totals = step.finish([], totals)
        return step.join({"shared": totals["g"], "other": totals["h"]})

    right = step_with(lambda step: None)
    assert (bits([list(step_with(entry.runner).values())]) == bits([list(right.values())])) is not entry.is_fault


@pytest.mark.parametrize(("name", "wrong"), OF_INPUTS.items())
def test_one_input_is_that_of_another_micro_batch(name, wrong):
    names = ("weight", "tokens", "labels", "positions")
    step = SimpleNamespace(
        parts=SimpleNamespace(placeholders=names), inputs=lambda action, given: given[action.micro_batch]
    )
    given = [{name: (name, index) for name in names[1:]} for index in range(3)]
    CATALOGUE[name].runner(step)
    assert step.inputs(Action("forward", 0, 0), given) == given[0] | {wrong: (wrong, 1)}
    assert step.inputs(Action("forward", 0, 2), given) == given[2]


def test_there_are_twenty_faults_and_eight_right_rewrites_of_it():
    assert sum(entry.is_fault for entry in ROWS) >= 20
    assert sum(not entry.is_fault for entry in ROWS) >= 8

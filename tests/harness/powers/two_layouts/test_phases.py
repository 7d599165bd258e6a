"""Which tensors two layouts must leave equal, by the sums that both were seen to take."""

from __future__ import annotations

import pytest

from bitproof.harness.compare.part_layouts import LogicalTensor
from bitproof.harness.powers.two_layouts.phases import PHASES, first_step_of_own_layout, is_exact, regrouped_from
from bitproof.harness.records import Manifest, Meeting


def manifest(*meetings: tuple[str, str, str], ranks: int = 8, backwards: int = 1) -> Manifest:
    found = [
        Meeting(phase=phase, what="sum", ranks=group, operator=operator, backwards=backwards)
        for phase, group, operator in meetings
    ]
    return Manifest(case={}, system="s", world_size=ranks, steps=1, meetings=found)


def halves(backwards: int) -> Manifest:
    found = Meeting(phase="forward", what="backward", ranks="", operator="", backwards=backwards)
    return Manifest(case={}, system="s", world_size=1, steps=1, meetings=[found])


PAIR, FOUR = "0,1", "0,1,2,3"


@pytest.mark.parametrize(
    ("here", "there", "first"),
    [
        (manifest(("backward", PAIR, "allreduce_")), manifest(("backward", PAIR, "_reduce_scatter_base_")), None),
        (manifest(("backward", FOUR, "allreduce_")), manifest(("backward", FOUR, "allreduce_")), None),
        (manifest(("backward", FOUR, "allreduce_")), manifest(("backward", FOUR, "_reduce_scatter_base_")), "backward"),
        (manifest(("backward", PAIR, "allreduce_")), manifest(("backward", "2,3", "allreduce_")), "backward"),
        (manifest(), manifest(("forward", PAIR, "all_reduce")), "forward"),
        (manifest(), manifest(("clip", PAIR, "all_reduce")), "clip"),
        (manifest(), manifest(("update", PAIR, "all_reduce")), "update"),
        (manifest(), manifest(ranks=4), "forward"),
        (
            manifest(("backward", PAIR, "allreduce_"), backwards=2),
            manifest(("backward", PAIR, "_reduce_scatter_base_"), backwards=2),
            "backward",
        ),
        (halves(1), halves(1), None),
        (halves(1), halves(2), "forward"),
        (
            manifest(("backward", PAIR, "allreduce_")),
            manifest(("backward", PAIR, "allreduce_"), backwards=2),
            "backward",
        ),
    ],
)
def test_sums_have_another_order_from_the_first_phase_with_other_ranks_or_operators(here, there, first):
    found = regrouped_from(here, there)
    assert (None if found is None else PHASES[found]) == first
    assert regrouped_from(there, here) == found


def added(what: str, operator: str, elements: int, group: str = "0,1,2", phase: str = "backward") -> Manifest:
    found = Meeting(phase=phase, what=what, ranks=group, operator=operator, elements=elements)
    return Manifest(case={}, system="s", world_size=8, steps=1, meetings=[found])


@pytest.mark.parametrize(
    ("here", "there", "are_moved", "first"),
    [
        (added("sum", "allreduce_", 8), added("sum", "allreduce_", 8), False, None),
        (added("sum", "allreduce_", 8), added("sum", "allreduce_", 9), False, "backward"),
        (added("sum", "allreduce_", 8), added("sum", "allreduce_", 8), True, "backward"),
        (added("sum", "allreduce_", 1), added("sum", "allreduce_", 1), True, None),
        (added("sum", "allreduce_", 0, PAIR), added("sum", "allreduce_", 0, PAIR), True, None),
        (added("sum", "allreduce_", 8, phase="forward"), added("sum", "allreduce_", 8, phase="forward"), True, None),
        *(
            (added("sum", "all_reduce", 0, PAIR, phase), added("sum", "all_reduce", 0, PAIR, phase), True, first)
            for phase, first in (("backward", None), ("clip", "clip"), ("update", "update"))
        ),
        (added("scale", "after /1.5", 0, PAIR), added("scale", "after /1.5", 0, PAIR), True, None),
        (added("scale", "after /1.5", 0, PAIR), added("scale", "before /1.5", 0, PAIR), False, "backward"),
    ],
)
def test_places_and_rounded_factors_decide_a_sum(here, there, are_moved, first):
    found = regrouped_from(here, there, are_moved=are_moved)
    assert (None if found is None else PHASES[found]) == first


def staged(parts: set[int], backwards: int, *met: str, ranks: int = 4) -> Manifest:
    found = [Meeting(phase="forward", what="parts", ranks="", operator="", backwards=count) for count in parts]
    found += [Meeting(phase="forward", what="sum", ranks=group, operator="allreduce_") for group in met]
    found.append(Meeting(phase="forward", what="backward", ranks="", operator="", backwards=backwards))
    return Manifest(case={}, system="s", world_size=ranks, steps=1, meetings=found)


@pytest.mark.parametrize(
    ("here", "there", "first"),
    [
        (staged({4}, 4), staged({4}, 8, ranks=1), None),
        (staged({4}, 4), staged({1}, 4, ranks=1), "forward"),
        (staged({1}, 1), staged({1}, 1, ranks=1), None),
        (staged({1}, 4), staged({1}, 8, ranks=1), "forward"),
        (staged({4}, 4, PAIR), staged({4}, 8), "forward"),
        (staged({4}, 4, PAIR), staged({4}, 4, ranks=1), "forward"),
    ],
)
def test_stages_add_alike_where_gradients_have_as_many_parts_and_no_rank_adds_over_others(here, there, first):
    for pair in ((here, there), (there, here)):
        found = regrouped_from(*pair, are_staged=True)
        assert (None if found is None else PHASES[found]) == first
        whole = regrouped_from(*pair)
        assert whole is not None or here.world_size == there.world_size, "ranks that hold the same are no stages"


def test_what_is_computed_before_that_must_be_equal_at_the_first_step_alone():
    backward = PHASES.index("backward")
    assert is_exact(LogicalTensor(0, "loss", "loss"), backward)
    assert is_exact(LogicalTensor(0, "activation", "layers.0@forward"), backward)
    assert is_exact(LogicalTensor(0, "buffer", "counts@before_optimizer"), backward)
    assert not is_exact(LogicalTensor(0, "activation", "layers.0@backward"), backward)
    assert not is_exact(LogicalTensor(0, "grad", "w"), backward)
    assert not is_exact(LogicalTensor(1, "loss", "loss"), backward)
    clip = PHASES.index("clip")
    assert not is_exact(LogicalTensor(0, "grad", "w"), clip) and is_exact(
        LogicalTensor(0, "activation", "a@backward"), clip
    )
    update = PHASES.index("update")
    assert is_exact(LogicalTensor(0, "grad", "w"), update) and not is_exact(LogicalTensor(0, "param", "w"), update)
    assert is_exact(LogicalTensor(5, "param", "w"), None)


def test_what_a_step_begins_with_must_be_equal_whatever_is_added_otherwise():
    begins = LogicalTensor(0, "buffer", "w@before_forward")
    assert is_exact(begins, PHASES.index("forward"))
    assert not is_exact(begins._replace(name="w@before_optimizer"), PHASES.index("forward"))
    assert not is_exact(begins._replace(kind="param"), PHASES.index("forward"))
    assert not is_exact(begins._replace(step=1), PHASES.index("forward"))


def test_steps_before_another_layout_begins_must_be_equal():
    resumed = Manifest(case={"resume_at": 2, "resumes_reference": True}, system="s", world_size=2, steps=4)
    assert (first_step_of_own_layout(resumed), first_step_of_own_layout(manifest())) == (2, 0)
    backward = PHASES.index("backward")
    found = [is_exact(LogicalTensor(step, "grad", "w"), backward, start=2) for step in range(4)]
    assert found == [True, True, False, False]
    assert is_exact(LogicalTensor(2, "loss", "loss"), backward, start=2)
    assert not is_exact(LogicalTensor(3, "loss", "loss"), backward, start=2)

"""Differing settings of optimizers, as sentences."""

import pytest

from bitproof.harness.compare.differing_settings import differing_settings, setting_sentences
from bitproof.harness.records import OPTIMIZERS

NAMES = ["a", "b", "c"]


def ranks(*entries: dict) -> list[dict]:
    return [{OPTIMIZERS: [*entries]}]


def group(number: int = 0, parameters: list[str] = NAMES, optimizer: str = "AdamW", **settings: str) -> dict:
    reported = {"lr": "0.1", "weight_decay": "0.0"} | settings
    return {
        "step": 0,
        "group": f"0.{number}",
        "optimizer": optimizer,
        "parameters": parameters,
        "settings": reported,
    }


def sentences(reference: list[dict], candidate: list[dict], step: int) -> list[str]:
    return [*setting_sentences(differing_settings(reference, candidate, step))]


def test_each_of_two_betas_is_a_setting() -> None:
    lines = sentences(ranks(group(betas="(0.9, 0.999)")), ranks(group(betas="(0.9, 0.99)")), 0)
    assert lines == ["AdamW has beta2 0.99 where the reference has 0.999, for a and 2 more parameters"]


def test_a_differing_number_is_reported_with_the_parameters_that_have_it() -> None:
    [reported] = sentences(ranks(group()), ranks(group(weight_decay="0.1")), 0)
    assert reported == "AdamW has weight_decay 0.1 where the reference has 0.0, for a and 2 more parameters"


def test_a_parameter_in_another_group_is_reported_alone() -> None:
    candidate = ranks(group(0, ["a", "c"]), group(1, ["b"], weight_decay="0.1"))
    [reported] = sentences(ranks(group()), candidate, 0)
    assert reported == "AdamW has weight_decay 0.1 where the reference has 0.0, for b"


def test_groups_in_another_order_differ_in_nothing() -> None:
    groups = [group(0, ["a"]), group(1, ["b", "c"], lr="0.2")]
    other = [group(0, ["c", "b"], lr="0.2"), group(1, ["a"])]
    assert [*sentences(ranks(*groups), ranks(*other), 0)] == []


def test_a_setting_counts_from_the_step_that_changes_it() -> None:
    later = {"step": 3, "group": "0.0", "settings": {"lr": "0.05"}}
    for step, expected in ((2, []), (3, ["lr 0.05"]), (9, ["lr 0.05"])):
        lines = [*sentences(ranks(group()), ranks(group(), later), step)]
        assert [part for part in expected if part in " ".join(lines)] == expected and len(lines) == len(expected)


def test_a_setting_of_one_side_alone_is_not_compared_and_another_class_is_reported() -> None:
    assert [*sentences(ranks(group()), ranks(group(decoupled="True")), 0)] == []
    lines = [*sentences(ranks(group()), ranks(group(optimizer="Adam")), 0)]
    assert lines == ["the optimizer of a and 2 more parameters is Adam, and AdamW in the reference"]


def test_of_many_settings_the_first_are_reported_and_the_others_counted() -> None:
    settings = {f"s{number}": "1" for number in range(5)}
    other = dict.fromkeys(settings, "2")
    lines = [*sentences(ranks(group(**settings)), ranks(group(**other)), 0)]
    assert len(lines) == 4 and lines[-1] == "2 more settings of optimizers differ"


def test_every_rank_may_hold_other_parameters() -> None:
    reference = [*ranks(group(0, ["a"])), *ranks(group(0, ["b"]))]
    candidate = [*ranks(group(0, ["a"])), *ranks(group(0, ["b"], lr="0.3"))]
    assert [*sentences(reference, candidate, 0)] == ["AdamW has lr 0.3 where the reference has 0.1, for b"]


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {OPTIMIZERS: 3},
        {OPTIMIZERS: [3]},
        {OPTIMIZERS: [group() | {"step": "0"}]},
        {OPTIMIZERS: [group() | {"settings": ["lr"]}]},
        {OPTIMIZERS: [group() | {"settings": {"lr": 1}}]},
        {OPTIMIZERS: [group() | {"parameters": "abc"}]},
        {OPTIMIZERS: [group() | {"parameters": [1]}]},
        {OPTIMIZERS: [group() | {"group": 0}]},
        {OPTIMIZERS: [{"step": 0}]},
    ],
)
def test_a_damaged_description_is_left_out(damage: dict) -> None:
    assert [*sentences([damage], ranks(group(lr="0.2")), 0)] == []
    assert [*sentences(ranks(group(lr="0.2")), [damage], 0)] == []

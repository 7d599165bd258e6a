from __future__ import annotations

import pytest

from bitproof.harness.capture.selection import ALL, are_patterns, chooser, first_and_last_step, name_value, parse_values
from bitproof.harness.errors import UsageError
from bitproof.harness.records import Key

KEYS = [
    Key(0, "loss", "loss", 0),
    Key(0, "grad", "layers.1.moe.w", 3),
    Key(10, "grad", "layers.10.moe.w", 0),
    Key(19, "param", "layers.1.moe.w", 1),
]


def chosen(*patterns):
    return [name_value(key) for key in filter(chooser(patterns), KEYS)]


def test_a_pattern_goes_over_step_kind_and_name_on_every_rank():
    assert chosen("*/grad/layers.1.moe.*") == ["0/grad/layers.1.moe.w"]
    assert chosen("*/*/layers.1.moe.*") == ["0/grad/layers.1.moe.w", "19/param/layers.1.moe.w"]
    assert chosen("19/*", "*/loss/*") == ["0/loss/loss", "19/param/layers.1.moe.w"]


def test_a_pattern_means_the_whole_name_and_its_very_case():
    assert chosen("9/*") == chosen("*/grad/layers") == chosen("*/GRAD/*") == chosen("layers.1.*") == []


def test_everything_and_nothing_can_be_chosen():
    assert chosen(*ALL) == [name_value(key) for key in KEYS]
    assert chosen() == []


def test_kinds_are_short_for_patterns():
    assert parse_values(["grad, param", "0/*", "grad"]) == ("*/grad/*", "*/param/*", "0/*")
    assert parse_values([]) == ()


@pytest.mark.parametrize("text", ["grads", "grad,weights", "", "layers.1.moe"])
def test_what_is_neither_kind_nor_pattern_is_refused(text):
    with pytest.raises(UsageError) as error:
        parse_values(["0/*", text])
    assert str(error.value) == (
        "UsageError: --values chooses no tensor\n"
        "  expected: kinds (loss, grad, param, buffer, optimizer, grad_norm, activation, rng), joined by commas, or a "
        "pattern over step/kind/name, such as '*/grad/layers.1.moe.*'\n"
        f"  found: {text.split(',')[-1]!r}"
    )


def test_the_first_and_the_last_step_are_one_in_a_run_of_one():
    assert first_and_last_step(20) == ("0/*", "19/*")
    assert first_and_last_step(1) == ("0/*",)


def test_patterns_from_disk_are_few_short_texts():
    assert are_patterns([]) and are_patterns(["0/*"] * 100)
    for damaged in (None, "0/*", [1], ["0/*"] * 101, ["*" * 1001]):
        assert not are_patterns(damaged)


def test_a_pattern_made_to_take_long_does_not():
    assert not chooser(["*a" * 400 + "b"])(Key(0, "grad", "a" * 990, 0))

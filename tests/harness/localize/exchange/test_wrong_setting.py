"""Wrong numbers of an update's calls, led back to the optimizer's setting."""

from __future__ import annotations

import pytest

from bitproof.harness.compare.differing_settings import DifferingSetting, differing_settings
from bitproof.harness.localize.exchange.wrong_setting import wrong_settings
from bitproof.harness.localize.logs.calls import Call, CallSite
from bitproof.harness.records import OPTIMIZERS

ADAMW = {"lr": "0.01", "betas": "(0.9, 0.999)", "eps": "1e-08", "weight_decay": "0.1"}


def settings(optimizer: str = "AdamW", **changed: str) -> list[DifferingSetting]:
    """The settings that differ if a candidate's group has these."""

    def ranks(values: dict[str, str]) -> list[dict]:
        entry = {"step": 0, "group": "0.0", "optimizer": optimizer, "parameters": ["a", "b"], "settings": values}
        return [{OPTIMIZERS: [entry]}]

    return differing_settings(ranks(ADAMW), ranks(ADAMW | changed), 0)


def call(direction: str = "update", part: str | None = "AdamW", **scalars: str) -> Call:
    return Call(CallSite(None, direction), "f", (), (), scalars=tuple(scalars.items()), part=part)


@pytest.mark.parametrize(
    ("changed", "expected", "found", "names"),
    [
        ({"betas": "(0.8, 0.999)"}, repr(1 - 0.9), repr(1 - 0.8), ["beta1"]),
        ({"betas": "(0.9, 0.99)"}, repr(1 - 0.999), repr(1 - 0.99), ["beta2"]),
        ({"betas": "(0.8, 0.999)", "weight_decay": "0.3"}, repr(1 - 0.9), repr(1 - 0.8), ["beta1"]),
        ({"betas": "(0.8, 0.999)", "weight_decay": "0.3"}, repr(1 - 0.001), repr(1 - 0.003), ["weight_decay"]),
        ({"lr": "0.02", "weight_decay": "0.3"}, repr(1 - 0.001), repr(1 - 0.006), ["lr", "weight_decay"]),
        ({"lr": "0.02", "eps": "1e-06"}, "[-0.1, -0.1]", "[-0.2, -0.2]", ["lr"]),
        ({"lr": "0.02"}, "7", "8", []),
    ],
    ids=["1 - beta1", "1 - beta2", "one of two", "the other of two", "both of two", "a list", "no formula"],
)
def test_a_number_is_led_back_to_the_settings_that_change_it(
    changed: dict[str, str], expected: str, found: str, names: list[str]
) -> None:
    wrong = wrong_settings(call(value=found), call(value=expected), settings(**changed), 0)
    assert [setting.name for setting in wrong] == names


def test_an_extra_call_has_the_setting_whose_number_it_is_given() -> None:
    changed = settings(weight_decay="0.3", eps="1e-06")
    assert [setting.name for setting in wrong_settings(call(alpha="0.3"), None, changed, 0)] == ["weight_decay"]
    assert [setting.name for setting in wrong_settings(None, call(alpha="0.1"), changed, 0)] == ["weight_decay"]
    assert wrong_settings(call(alpha="0.2"), None, changed, 0) == ()


def test_calls_of_another_direction_or_optimizer_have_no_wrong_setting() -> None:
    changed = settings(lr="0.02")
    for other in (call("forward", lr="0.02"), call(part="SGD", lr="0.02"), call(part=None, lr="0.02")):
        assert wrong_settings(other, other._replace(scalars=(("lr", "0.01"),)), changed, 0) == ()


def test_calls_with_equal_numbers_have_no_wrong_setting() -> None:
    assert wrong_settings(call(lr="0.01"), call(lr="0.01"), settings(lr="0.02"), 0) == ()

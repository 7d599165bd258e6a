"""Find the wrong optimizer settings that explain the wrong numbers of a call of an optimizer.

A setting reaches several calls, in each as another number. With AdamW's beta1, `lerp` gets `1 - beta1`, and `addcdiv`
gets `-lr / (1 - beta1**t)`. All these wrong numbers are a single defect.

A setting explains a wrong number if a formula in `_formulas` uses the setting, and the formula computes each system's
number from that system's settings. A number that no formula explains is another defect.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isclose, sqrt

from bitproof.harness.compare.differing_settings import DifferingSetting
from bitproof.harness.localize.logs.calls import Call

# A scalar may be a list of numbers as text, so numbers are searched for within the text.
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?|[-+]?inf|nan")

_MAX_LENGTH = 4000
"""The maximum length of a text that is searched for numbers: it may have a number for each parameter."""


def wrong_settings(
    call: Call | None, partner: Call | None, settings: Sequence[DifferingSetting], step: int
) -> tuple[DifferingSetting, ...]:
    """Return the `settings` that explain why a call of an optimizer differs from the reference's; empty if none does.

    For example, a weight decay explains a missing call: `call` or `partner` is None. `step` counts from 0.
    """
    known = call or partner
    if known is None or known.place.direction != "update":
        return ()
    # `part` of a call of an update is the class of its optimizer.
    own = [setting for setting in settings if setting.name and setting.optimizer == known.part]
    mine, theirs = (dict(side.scalars) if side is not None else {} for side in (call, partner))
    pairs = [(mine.get(name), theirs.get(name)) for name in mine | theirs if mine.get(name, "") != theirs.get(name, "")]
    if not own or not pairs:
        return ()
    found = {
        setting.name
        for pair in pairs
        for setting in own
        if setting.name in _explaining_settings(pair, setting, own, step)
    }
    return tuple(setting for setting in own if setting.name in found)


def _explaining_settings(
    pair: tuple[str | None, str | None], setting: DifferingSetting, own: Sequence[DifferingSetting], step: int
) -> Collection[str]:
    """Return the names of the settings that explain a pair of different numbers, such as -0.01 and -0.1.

    - `pair`: the candidate's and the reference's number as text, None if that system lacks the call.
    - `setting`: a differing setting. Its `mine` and `theirs` have all settings of the optimizer in both systems.
    - `own`: the optimizer's settings that differ.

    A setting explains the pair if a formula uses the setting, and the formula computes each system's number from that
    system's settings.
    """
    names = {other.name for other in own}
    sides = _formulas(setting.mine, step), _formulas(setting.theirs, step)
    found = set[str]()
    for formula, number in sides[0].items():
        # A number that both systems would compute alike explains no difference.
        if formula not in sides[1] or isclose(number, sides[1][formula], rel_tol=1e-12):
            continue
        if not all(_contains(text, side[formula]) for text, side in zip(pair, sides, strict=True)):
            continue
        # Put the reference's value of each setting, alone, into the candidate's settings: does the result change?
        for name in names & setting.mine.keys() & setting.theirs.keys():
            other = _formulas({**setting.mine, name: setting.theirs[name]}, step).get(formula)
            if other is None or not isclose(other, number, rel_tol=1e-12):
                found.add(name)
    return found


def _contains(text: str | None, number: float) -> bool:
    """Whether `text` contains a number. True if `text` is None: a system without the call has no number."""
    if text is None:
        return True
    for match in _NUMBER.finditer(text[:_MAX_LENGTH]):
        with suppress(ValueError):
            if isclose(float(match.group()), number, rel_tol=1e-12):
                return True
    return False


def _formulas(settings: Mapping[str, float], step: int) -> dict[str, float]:
    """Return the numbers that torch's optimizers compute from `settings`, by formula, such as "1 - beta1".

    `step` counts from 0, and `t` in a formula from 1.
    """
    return dict(_computed(settings, step + 1))


def _computed(settings: Mapping[str, float], t: int) -> Iterator[tuple[str, float]]:
    for name, value in settings.items():
        yield name, value
        yield f"-{name}", -value
        yield f"1 - {name}", 1 - value
    # An optimizer may lack a setting, and a setting may have any value, such as a beta of 1.
    with suppress(KeyError, ZeroDivisionError, ValueError, OverflowError):
        yield "1 - lr * weight_decay", 1 - settings["lr"] * settings["weight_decay"]
    with suppress(KeyError, ZeroDivisionError, ValueError, OverflowError):
        yield "sqrt(1 - beta2**t)", sqrt(1 - settings["beta2"] ** t)
    with suppress(KeyError, ZeroDivisionError, ValueError, OverflowError):
        yield "-lr / (1 - beta1**t)", -settings["lr"] / (1 - settings["beta1"] ** t)
    with suppress(KeyError, ZeroDivisionError, ValueError, OverflowError):
        yield "(1 - beta1**t) / -lr", (1 - settings["beta1"] ** t) / -settings["lr"]

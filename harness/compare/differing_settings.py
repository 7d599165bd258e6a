"""Compare the settings of two trainers' optimizers, if the trainers' bits differ.

The cause is often a single setting, which no record shows:

    AdamW has weight_decay 0.1 where the reference has 0.0, for blocks.0.ln1.weight and 23 more parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bitproof.harness.records import OPTIMIZERS

_MAX_SENTENCES = 3


class _ParameterSettings(NamedTuple):
    """The class of a parameter's optimizer, and the optimizer's settings for this parameter."""

    optimizer: str
    settings: Mapping[str, str]


class DifferingSetting(NamedTuple):
    """A setting that differs between the optimizers of two trainers, and the `parameters` to which it applies.

    - `found`, `expected`: the candidate's value, and the reference's. If the optimizers' classes differ, `name` is
      empty, and these are the classes.
    - `mine`, `theirs`: all numeric settings of the candidate, and of the reference, for the first parameter.

    Example: `DifferingSetting("AdamW", "beta1", "0.95", "0.9", ("ln1.weight",), {"beta1": 0.95, ...}, ...)`.
    """

    optimizer: str
    name: str
    found: str
    expected: str
    parameters: tuple[str, ...]
    mine: Mapping[str, float]
    theirs: Mapping[str, float]

    @property
    def of(self) -> str:
        """The names of the parameters, shortened: `ln1.weight and 2 more parameters`."""
        first, *more = self.parameters
        return f"{first} and {len(more)} more parameters" if more[1:] else f"{first} and {more[0]}" if more else first

    def __str__(self) -> str:
        if not self.name:
            return f"the optimizer of {self.of} is {self.found}, and {self.expected} in the reference"
        text = f"{self.optimizer} has {self.name} {self.found} where the reference has {self.expected}"
        return f"{text}, for {self.of}"


def differing_settings(
    reference: Iterable[Mapping[str, Any]], candidate: Iterable[Mapping[str, Any]], step: int
) -> list[DifferingSetting]:
    """Return the settings in which the two systems' optimizers differ at `step`, whether they were set at this step or
    earlier.

    `reference` and `candidate` have each rank's facts. A setting that only one optimizer has does not count.
    """
    # Parameters with the same difference are collected in one entry: by optimizer, setting, and both values.
    sides = [_settings_at(side, step) for side in (reference, candidate)]
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for name, mine in sides[1].items():
        if (theirs := sides[0].get(name)) is None:
            continue
        # Without a setting's name, the entry is about the optimizer's class.
        if mine.optimizer != theirs.optimizer:
            found.setdefault((mine.optimizer, "", mine.optimizer, theirs.optimizer), []).append(name)
        for key, text in mine.settings.items():
            # A setting that the other optimizer lacks is equal by default: another release of torch may have added it.
            if theirs.settings.get(key, text) != text:
                found.setdefault((mine.optimizer, key, text, theirs.settings[key]), []).append(name)
    return [
        DifferingSetting(*what, tuple(names), *(_numbers(side[names[0]].settings) for side in reversed(sides)))
        for what, names in found.items()
    ]


def setting_sentences(settings: Sequence[DifferingSetting]) -> Iterator[str]:
    yield from map(str, settings[:_MAX_SENTENCES])
    if len(settings) > _MAX_SENTENCES:
        yield f"{len(settings) - _MAX_SENTENCES} more settings of optimizers differ"


def _numbers(settings: Mapping[str, str]) -> dict[str, float]:
    found = dict[str, float]()
    for name, text in settings.items():
        # Other settings, such as True or None, appear in no formula.
        with suppress(ValueError):
            found[name] = float(text)
    return found


def _with_separate_betas(settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, text in settings.items():
        pair = text.strip("()").split(", ")
        if name == "betas" and len(pair) == 2:
            yield from zip(("beta1", "beta2"), pair, strict=True)
        else:
            yield name, text


def _settings_at(ranks: Iterable[Mapping[str, Any]], step: int) -> dict[str, _ParameterSettings]:
    found: dict[str, _ParameterSettings] = {}
    for rank in ranks:
        groups: dict[str, tuple[str, list[str], dict[str, str]]] = {}
        for entry in _entries_of(rank):
            # The log is in the order of steps.
            if entry["step"] > step:
                break
            # A group's first entry is complete. Later entries have only what changed.
            name, parameters, settings = groups.setdefault(entry["group"], ("", [], {}))
            groups[entry["group"]] = (
                entry.get("optimizer", name),
                entry.get("parameters", parameters),
                settings | entry["settings"],
            )
        for name, parameters, settings in groups.values():
            for parameter in parameters:
                # If several ranks have the parameter, the lowest rank's settings count.
                found.setdefault(parameter, _ParameterSettings(name, dict(_with_separate_betas(settings))))
    return found


def _entries_of(rank: Mapping[str, Any]) -> list[dict[str, Any]]:
    # A manifest is untrusted, and reading it does not check these values.
    entries = rank.get(OPTIMIZERS)
    if not isinstance(entries, list):
        return []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            return []
        names, settings = entry.get("parameters", []), entry.get("settings")
        texts = [entry.get("group"), entry.get("optimizer", ""), *(names if isinstance(names, list) else [None])]
        texts += [*settings, *settings.values()] if isinstance(settings, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            return []
    return entries

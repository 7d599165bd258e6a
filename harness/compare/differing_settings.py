"""Compare the settings of two trainers' optimizers, where their bits differ.

Records show which tensors an optimizer changed, not why. If settings differ, the cause is often one number of a group:

    AdamW has weight_decay 0.1 where the reference has 0.0, for blocks.0.ln1.weight and 23 more parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bitproof.harness.records import OPTIMIZERS

_MAX_SENTENCES = 3


class _Held(NamedTuple):
    """A parameter's optimizer, and the optimizer's settings for it."""

    optimizer: str
    settings: Mapping[str, str]


def differing_settings(
    reference: Iterable[Mapping[str, Any]], candidate: Iterable[Mapping[str, Any]], step: int
) -> Iterator[str]:
    """A sentence for each of the first settings that differ at `step`, no matter when they were set.

    `reference` and `candidate` are the descriptions of each rank's system. A setting that only one side's optimizer has
    is not compared: another release of torch may have added it.
    """
    sides = [_settings_at(side, step) for side in (reference, candidate)]
    found: dict[tuple[str, ...], list[str]] = {}
    for name, mine in sides[1].items():
        if (theirs := sides[0].get(name)) is None:
            continue
        if mine.optimizer != theirs.optimizer:
            found.setdefault((mine.optimizer, theirs.optimizer), []).append(name)
        for key, text in mine.settings.items():
            if theirs.settings.get(key, text) != text:
                found.setdefault((mine.optimizer, key, text, theirs.settings[key]), []).append(name)
    for what, names in [*found.items()][:_MAX_SENTENCES]:
        more = f" and {len(names) - 1} more parameters" if len(names) > 2 else f" and {names[1]}" if names[1:] else ""
        if len(what) == 2:
            yield f"the optimizer of {names[0]}{more} is {what[0]}, and {what[1]} in the reference"
        else:
            optimizer, key, text, known = what
            yield f"{optimizer} has {key} {text} where the reference has {known}, for {names[0]}{more}"
    if len(found) > _MAX_SENTENCES:
        yield f"{len(found) - _MAX_SENTENCES} more settings of optimizers differ"


def _settings_at(ranks: Iterable[Mapping[str, Any]], step: int) -> dict[str, _Held]:
    """Each parameter's optimizer and settings at a step, by name. If several ranks name it, the lowest rank counts."""
    found: dict[str, _Held] = {}
    for rank in ranks:
        groups: dict[str, tuple[str, list[str], dict[str, str]]] = {}
        for entry in _entries_of(rank):
            if entry["step"] > step:
                break
            name, held, settings = groups.setdefault(entry["group"], ("", [], {}))
            groups[entry["group"]] = (
                entry.get("optimizer", name),
                entry.get("parameters", held),
                settings | entry["settings"],
            )
        for name, held, settings in groups.values():
            for parameter in held:
                found.setdefault(parameter, _Held(name, settings))
    return found


def _entries_of(rank: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of a rank's description; none if they are damaged: a recording may come from anywhere."""
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

"""A certificate's files with something changed that JSON allows, of any type: what a reader of others' files meets."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from bitproof.harness.certificate_checker import FILES

Path = tuple[Any, ...]
Values = dict[str, Any]
"""What each file holds, by its name."""

STRANGE: tuple[Any, ...] = (
    *(0, 1, -1, 1 << 60, None, "", {}, [], ["none"], ["list"], ["bool", "True"], ["str", "a"], ["graph", 0]),
    *("optimizer x", "optimizer", "parameter", "parameter ", "buffer", "buffer ", "input", "input 1", "constant"),
    *("loss", "written parameter w", "self", "dim", "view", "getitem", "aten.as_strided.default"),
    *(["float", "0x1.0p+0"], ["float", "nan"], ["ranks", [[0, 1]]], ["ranks", [[1], [0]]], ["size", [1, "u0"]]),
    *(["size"], ["size", [0]], ["node", 0], ["value", 0], ["tensor"], {"tensor": []}, {"several": []}),
)
"""What stands for anything, once."""


def changed_as_json(contents: dict[str, bytes], chance: random.Random, *, subject: bool = True) -> dict[str, bytes]:
    """The files with one to three changes in one of them; without `subject`, none there. Digests are left as they
    were."""
    values: Values = {name: json.loads(contents[name]) for name in FILES}
    file = chance.choice(FILES)
    places = [place for place in _places(values[file]) if place and (subject or place[0] != "subject")]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        try:
            _change(values[file], chance.choice(places), places, chance)
        except (KeyError, IndexError, TypeError):  # an earlier change took the place away
            continue
    return {name: json.dumps(value).encode() for name, value in values.items()}


def _places(value: Any, above: Path = ()) -> Iterator[Path]:
    yield above
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from _places(value[key], (*above, key))


def _at(value: Any, place: Path) -> Any:
    for key in place:
        value = value[key]
    return value


def _change(value: Any, place: Path, places: list[Path], chance: random.Random) -> None:
    parent, key = _at(value, place[:-1]), place[-1]
    old, how = parent[key], chance.random()
    if how < 0.15:
        del parent[key]
    elif how < 0.25 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(old))
    elif how < 0.35 and isinstance(parent, list):
        other = chance.randrange(len(parent))
        parent[other], parent[key] = old, parent[other]
    elif how < 0.6:
        found = chance.choice(STRANGE) if chance.random() < 0.5 else _at(value, chance.choice(places))
        parent[key] = copy.deepcopy(found)
    else:
        parent[key] = chance.choice(_near(old))


def _near(old: Any) -> list[Any]:
    """What is nearly the same, or has another type."""
    if isinstance(old, int):
        return [old + 1, old - 1, old * 2, str(old), [old], ["size", [old]], ["node", old]]
    if isinstance(old, str):
        ends = old[:-1], old.split(" ")[0], old.replace(".default", ""), old.replace(".", "_.", 1)
        return [*ends, f"{old}_", f" {old}", f"{old} ", old.upper(), [old], 0]
    if isinstance(old, list):
        return [[], {}, "", None, [old], [*old, 0], [*old, None], old[::-1], [0, *old]]
    return [{}, [], "", 0, {"tensor": old}, None]

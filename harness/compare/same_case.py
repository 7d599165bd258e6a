"""Check that two recordings were made from the same case, in the same way. Otherwise they cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bitproof.harness.case import Case
from bitproof.harness.errors import CaseError
from bitproof.harness.records import Recording

# Fields that may differ between the cases of two comparable recordings: names and expectations change no bit.
LABELS = (
    "name",
    "family",
    "reference",
    "candidate",
    "expected",
    "differs",
    "close_within",
    "differs_within",
    "requires",
    "preload",
)


def contradictions(side: str, recording: Recording, case: Case) -> Iterator[str]:
    """Yield a sentence for each fact in a recording's manifest that contradicts `case`.

    `side` is the recording's role for these sentences, "reference" or "candidate".
    """
    manifest = recording.manifest
    if not manifest.case:
        yield f"the {side} manifest does not say which case it recorded"
        return
    expected = {"case": case.to_dict(), "steps": case.steps, "world_size": case.parallelism.world_size}
    found = {"case": in_current_form(manifest.case), "steps": manifest.steps, "world_size": manifest.world_size}
    # Leaf by leaf, so that a sentence names a single setting.
    for path, (want, have) in leaf_differences({name: (expected[name], found[name]) for name in expected}):
        yield f"the {side} was recorded with {path}={have!r}, the case says {want!r}"


def in_current_form(case: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recorded case in the form of this version of bitproof; settings that the case lacks get default values.

    A case that this version refuses is returned unchanged; comparing it then shows each difference.
    """
    try:
        return Case.from_dict(dict(case)).to_dict()
    except CaseError:
        return case


def unlike_digests(reference: Recording, candidate: Recording) -> Iterator[str]:
    # Then equal bits have unequal digests.
    kinds = [recording.manifest.digest or "unnamed" for recording in (reference, candidate)]
    if kinds[0] != kinds[1]:
        yield f"the reference has digests of kind {kinds[0]}, the candidate of kind {kinds[1]}: record both again"


def leaf_differences(values: Mapping[str, tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each path at which two trees of JSON values differ, such as `case.batch.seq_len`, with the pair of values
    there.

    `values` maps names to pairs of subtrees. Fields of a case in LABELS are not compared.
    """
    for name, (left, right) in values.items():
        path = f"{prefix}{name}"
        if path.removeprefix("case.") in LABELS:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            names = [*left, *(name for name in right if name not in left)]
            yield from leaf_differences({name: (left.get(name), right.get(name)) for name in names}, f"{path}.")
        # As JSON text, since 1 == 1.0 == True in Python, and NaN equals nothing.
        elif json.dumps(left, default=repr) != json.dumps(right, default=repr):
            yield path, (left, right)

"""Identifies a recording by a digest of its bits, and by the facts of its environment that can affect bits.

A certificate contains the identities of its two recordings, so that it cannot be used for other recordings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256

from bitproof.harness.compare.recorded_environment import environment_of
from bitproof.harness.compare.same_case import leaf_differences
from bitproof.harness.errors import cut
from bitproof.harness.powers.moved.records import RecordingIdentity
from bitproof.harness.records import Recording

MOST = 100
"""Most characters of a fact in a message."""
_OF_THE_SYSTEM = ("system", "ranks", "passes", "settings")
"""Facts that an identity leaves out: systems with the same bits and environment have the same identity."""


def identity_of(recording: Recording) -> RecordingIdentity:
    """Return a recording's identity: a digest of all records, their number, and facts about the environment."""
    made = sha256(str(recording.manifest.digest).encode())
    # Sorted, since the order in which ranks recorded does not matter.
    for key, record in sorted(recording.records.items()):
        made.update(json.dumps([*key, record.digest]).encode())
    facts = {name: fact for name, fact in environment_of(recording.manifest).items() if name not in _OF_THE_SYSTEM}
    environment = {name: json.dumps(fact, sort_keys=True) for name, fact in facts.items()}
    return RecordingIdentity(digest=made.hexdigest(), records=len(recording.records), environment=environment)


def differences(certified: RecordingIdentity, found: RecordingIdentity) -> Iterator[str]:
    sides = [{name: json.loads(text) for name, text in each.environment.items()} for each in (certified, found)]
    pairs = {name: (sides[0].get(name), sides[1].get(name)) for name in {**sides[0], **sides[1]}}
    for path, (left, right) in leaf_differences(pairs):
        yield f"{path} is {cut(json.dumps(left), MOST)} in the certificate, {cut(json.dumps(right), MOST)} here"
    if (certified.digest, certified.records) != (found.digest, found.records):
        yield "its records have other bits than those of the certificate"

"""Presents the finding of the check `baseline`: a clause and a sentence about both systems, and details of each system
that is not EQUAL.

For example, a candidate that drifted has the clause `candidate DRIFTED` beside the verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.baselines.records import BaselineResult, BaselineStatus
from bitproof.harness.records import ROLES, Block, CaseResult, Code, Finding, Role, Sentence
from bitproof.harness.report import text
from bitproof.harness.validate import read

Found = Mapping[Role, BaselineResult]
"""Each role whose recording was compared with its baseline."""

MAX_TENSORS = 100
"""Most drifted tensors in a report."""

_BRIEF = {
    BaselineStatus.DRIFTED: "{} DRIFTED",
    BaselineStatus.MISSING: "no baseline of {}",
    BaselineStatus.UNVERIFIED: "baseline of {} UNVERIFIED",
}
"""The clause beside the verdict, for the statuses that count against a case."""

_DEMAND = "--require-baseline fails such a case, and `bitproof accept --new` stores what is missing"


def finding_of(found: Found, systems: Mapping[Role, str]) -> Finding:
    sides = _sides(found, systems)
    objecting = [(side, about) for side, about in sides if about.status in _BRIEF]
    reported = {
        status: "; ".join(f"{side}: {_objection(about)}" for side, about in objecting if about.status in statuses)
        for status, statuses in (
            ("objection", (BaselineStatus.DRIFTED, BaselineStatus.MISSING)),
            ("unjudged", (BaselineStatus.UNVERIFIED,)),
        )
    }
    return Finding(
        brief=", ".join(_BRIEF[about.status].format(role) for role, about in found.items() if about.status in _BRIEF),
        blocks=tuple(_blocks(sides)),
        calls=tuple(about.call for _, about in objecting if about.call),
        # Plain JSON values, as in a report that is read from a file: statuses become texts.
        data=json.loads(json.dumps({role: asdict(about) for role, about in found.items()})),
        **reported,
    )


def baselines_of(result: CaseResult) -> dict[Role, BaselineResult]:
    finding = result.checks.get("baseline")
    return {} if finding is None else read_data(finding.data)


def read_data(data: dict[str, Any]) -> dict[Role, BaselineResult]:
    return read(dict[Role, BaselineResult], data, "checks.baseline.data", RecordingError, damaged="is damaged")


def _sides(found: Found, systems: Mapping[Role, str]) -> list[tuple[str, BaselineResult]]:
    # If both roles run the same system with the same result, one line describes them.
    if len({*map(systems.get, ROLES)}) == 1 and len(found) == len(ROLES) and found["reference"] == found["candidate"]:
        return [(f"both sides {systems['reference']}".rstrip(), found["reference"])]
    return [(f"{role} {systems.get(role, '')}".rstrip(), about) for role, about in found.items()]


def _objection(about: BaselineResult) -> str:
    """Return the objection to a system as text: `DRIFTED, first grad w; moved first: div.Tensor of layers.0 ...`."""
    first = f", first {about.drift[0].kind} {about.drift[0].name}" if about.drift else ""
    why = [f"moved first: {text.blame_of(about.call)}"] if about.call else about.reasons[:1]
    return "; ".join([f"{about.status}{first}", *why])


def _blocks(sides: list[tuple[str, BaselineResult]]) -> Iterator[Block]:
    yield Sentence(", ".join(f"{side} {about.status}" for side, about in sides))
    for side, about in sides:
        if about.status == BaselineStatus.NO_BASELINE:
            yield Sentence(f"{side}: compared with no baseline, as there is none; {_DEMAND}")
        elif about.status == BaselineStatus.NOT_COMPARABLE:
            yield Sentence(f"{side} against {about.path}: {'; '.join(about.reasons)}")
        # The sentence above has the reasons for NOT COMPARABLE.
        lines = [] if about.status == BaselineStatus.NOT_COMPARABLE else about.reasons
        if lines := [*lines, *_drifted(about)]:
            yield Code(f"{side} against {about.path}" if about.path else side, "\n".join(lines))


def _drifted(about: BaselineResult) -> Iterator[str]:
    if about.compared and about.status != BaselineStatus.EQUAL:
        tensors = f", of {text.count(about.tensors_drifted, 'tensor')}" if about.drift else ""
        yield f"{about.mismatched} of {about.compared} records drifted{tensors}"
    yield from text.drift(about.drift, ("in the baseline", "here"), about.tensors_drifted, MAX_TENSORS)
